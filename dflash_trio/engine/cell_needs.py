"""How many KV cells sequences need, and what their promises leave over."""

from __future__ import annotations

from collections.abc import Callable

from .admission import KVLedger
from .sequence import Sequence


class CellNeeds:
    """``answers``: those of a generation that are not retired."""

    def __init__(self, ledger: KVLedger, answers: Callable[[int], list[Sequence]]) -> None:
        self._ledger = ledger
        self._answers = answers

    def needed(self, sequence: Sequence) -> int:
        """Cells for all that a generation's answers have so far; the prompt counts once."""
        if sequence.prepared.n == 1:
            return sequence.length
        answers = self._answers(sequence.generation_id)
        return len(sequence.prompt) + sum(answer.generated for answer in answers)

    def headroom(self, sequence: Sequence) -> int:
        """Cells that a sequence is promised beyond what it has, where there are as many."""
        left = sequence.prepared.max_tokens - sequence.generated
        room = self._ledger.max_ctx - sequence.length + 1
        return min(self._ledger.decode_headroom, room, left)

    def promise_next(self, sequence: Sequence) -> bool:
        """See to it that a decoding sequence is promised the cell for its next token. False: the
        pool is out."""
        hold = sequence.hold
        shortfall = self.needed(sequence) - hold.cells
        if shortfall <= 0:
            return True
        return self._ledger.extend(hold, max(shortfall, self.headroom(sequence))) >= shortfall

    def spare(self, sequence: Sequence, whole: int = 0) -> tuple[int, int]:
        """Tokens after its next one that a decoding sequence has cells for already and could say,
        and those cells. Where no cells are shared, ``whole`` are granted up to the context's end,
        whatever it was promised and may say: they are nobody else's."""
        hold, prepared = sequence.hold, sequence.prepared
        # Answers of one generation have a promise in common.
        answers = 1 if prepared.n == 1 else len(self._answers(sequence.generation_id))
        cells = (hold.cells - self.needed(sequence)) // answers
        room = self._ledger.room - sequence.length - 1
        if whole and self._ledger.has_all_cells:
            return min(whole, room), max(cells, min(whole, room))
        return min(cells, room, prepared.max_tokens - sequence.generated - 1), cells

    def resume(self, sequence: Sequence, spare: int) -> bool:
        """Promise a paused generation its cells again, if ``spare`` would be left."""
        answers = len(self._answers(sequence.generation_id))
        needed = self.needed(sequence) + answers * max(1, self.headroom(sequence))
        cells = min(needed, self._ledger.pool)
        return self._ledger.try_resume(sequence.hold, cells, spare=spare)
