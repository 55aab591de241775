"""What a block draft has of each sequence, and what computes its guesses from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import define

from .drafting.draft_tree import Ranking
from .drafting.provider import Wanted
from .llama_features import PendingRows


@define
class DraftRow:
    """Of one sequence."""

    pending: PendingRows
    begin: int = 0
    end: int = 0
    """Positions in the draft's cache, without the pending ones that follow."""
    known: int = 0
    """All of it ends here."""

    def injected(self, count: int) -> None:
        """The first ``count`` pending ones are in the cache now."""
        if not count:
            return  # where pending ones would begin says nothing then
        if self.begin == self.end:
            self.begin = self.pending.begin
        self.end = self.pending.begin + count
        self.pending.drop_first(count)

    def forget(self) -> None:
        """Everything. Cells may hold it yet."""
        self.pending.cut(0)
        self.begin = self.end = self.known = 0


class BlockComputer(Protocol):
    """Injects features, and computes blocks behind them. It is told of sequences of whom the draft
    knows all, in ascending order of their rows, and moves their pending features into the cache.

    What it finds belongs to the sequences in their order. It may find nothing for the last ones,
    and forgets rows that there are no cells for."""

    def inject(self, rows: Sequence[int]) -> None:
        """All pending features of these rows."""
        ...

    def guesses(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The likeliest token at each place. Waits."""
        ...

    def rankings(self, wanted: Sequence[Wanted]) -> list[Ranking]:
        """The likeliest tokens at each place. Waits."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """Drop a row's cells from position ``length`` on."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Give row ``target``, which is empty, the first ``length`` positions of ``source``."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
