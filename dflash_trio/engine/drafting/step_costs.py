"""What a step takes, guesses and all: learned from steps of any shape."""

from __future__ import annotations

from collections.abc import Sequence

from .costs import CostTable

PLAIN_FIRST = 3
"""Plain steps of so many sequences before the first guess."""
FIRST_REFERENCE, LAST_REFERENCE = 8, 128
"""Steps with guesses after which a plain one is due, to see what it takes now."""
AFTER = 2
"""Plain steps behind one with guesses that may take longer than others: a GPU replays what it
has recorded for batches of one shape, and records anew for another."""
_NOTICED = 0.15
"""Of a plain step: what they take longer by is noise below that."""
_MOST_AFTER = 3.0
"""Plain steps that such a one may take longer by; more is somebody else's doing."""
_AFTER_WEIGHT = 0.2
"""Of a new measurement of that."""


class StepCosts(CostTable):
    """Seconds of whole steps, by their tokens.

    ``partitioned``: the cache computes sequences in one pass only as far as their parts of the
    batch are equally long. ``builds_graphs``: it builds a graph anew for each pass of several, as
    a GPU does. What they take is told apart then from steps of one pass, since it would make plain
    steps of the same size seem slower.
    """

    def __init__(self, *, partitioned: bool, builds_graphs: bool = False) -> None:
        super().__init__()
        self._partitioned = partitioned
        self._pieces = CostTable() if builds_graphs else None
        # Of the first plain step behind one with guesses, the second, ...: what it takes longer by,
        # in plain steps.
        self._longer: list[float | None] = [None] * AFTER
        self._since_guesses = AFTER
        """Plain steps since one with guesses, as far as they are told apart."""
        self._since_plain = 0
        self._reference = FIRST_REFERENCE

    def of_step(
        self, count: int, counts: Sequence[int], *, boldly: bool = False, in_a_row: int = 1
    ) -> float:
        """Seconds of a step of ``count`` sequences, of which so many have a first guess, a second,
        ..., with what plain ones behind it take longer, where so many steps with guesses are to
        come ``in_a_row``. ``boldly``: what is larger than anything measured takes as long as the
        largest."""
        passes = self._passes(count, counts)
        if len(passes) == 1:
            most = super().largest if boldly else passes[0]
            seconds = self.estimate(min(passes[0], most))
        else:
            seconds = sum(self._piece(size, boldly=boldly) for size in passes)
        return seconds + self.switching(count) / in_a_row

    @property
    def largest(self) -> int:
        return max(super().largest, self._pieces.largest if self._pieces is not None else 0)

    def _piece(self, size: int, *, boldly: bool = False) -> float:
        """Seconds of one pass of several."""
        known = self._pieces if self._pieces is not None and self._pieces.largest else self
        return known.estimate(min(size, known.largest) if boldly else size)

    def switching(self, count: int) -> float:
        """Seconds that the plain steps of ``count`` sequences behind one with guesses take longer
        in all, if the next step has guesses; 0 where the latest one had some, too."""
        longer = sum(map(self._noticed, range(AFTER))) if self._since_guesses else 0.0
        return self.estimate(count) * longer if longer else 0.0

    def _noticed(self, place: int) -> float:
        longer = self._longer[place] or 0.0
        return longer if longer > _NOTICED else 0.0

    def _passes(self, count: int, counts: Sequence[int]) -> list[int]:
        """The sizes of the pieces that the cache computes a batch in."""
        if not self._partitioned:
            return [count + sum(counts)]
        passes, equal = [count], count
        for more in counts:
            if more == equal:
                passes[-1] += more
            else:
                passes.append(more)
                equal = more
        return passes

    def knows_plain(self, count: int) -> bool:
        """What a step without guesses takes: measured a few times, or between others."""
        times = self.times(count)
        return times >= PLAIN_FIRST or (not times and self.knows(count))

    def plain_is_due(self, count: int) -> bool:
        """A step of ``count`` sequences should have no guesses, to see what that takes."""
        return self._since_plain >= self._reference or not self.knows_plain(count)

    def observe_step(self, lengths: Sequence[int], seconds: float, *, judged: bool) -> None:
        """A step took that long. ``lengths``: tokens of each of its sequences; ``judged``: guesses
        had their turn in it."""
        if judged:
            self._since_plain += 1
        else:
            if self._since_plain >= self._reference:
                self._reference = min(2 * self._reference, LAST_REFERENCE)
            self._since_plain = 0
        longest = max(lengths)
        if longest == 1:
            self._observe_plain(len(lengths), seconds)
            return
        self._since_guesses = 0
        counts = [sum(n > place for n in lengths) for place in range(1, longest)]
        passes = self._passes(len(lengths), counts)
        if len(passes) == 1:
            self.observe(passes[0], seconds)
            return
        # Shared out by what each piece is thought to take.
        expected = [self._piece(size) for size in passes]
        whole = sum(expected)
        for size, part in zip(passes, expected, strict=True):
            if whole:
                (self if self._pieces is None else self._pieces).observe(
                    size, seconds * part / whole
                )

    def _observe_plain(self, count: int, seconds: float) -> None:
        place, self._since_guesses = self._since_guesses, min(AFTER, self._since_guesses + 1)
        plain = self.estimate(count)
        if place < AFTER and plain:
            longer = min(max(seconds / plain - 1.0, -1.0), _MOST_AFTER)
            known = self._longer[place]
            self._longer[place] = (
                longer if known is None else known + _AFTER_WEIGHT * (longer - known)
            )
            seconds /= 1.0 + self._noticed(place)
        self.observe(count, seconds)
