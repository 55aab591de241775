"""What a step takes, guesses and all: learned from steps of any shape."""

from __future__ import annotations

from collections.abc import Sequence

from .costs import CostTable

PLAIN_FIRST = 3
"""Plain steps of so many sequences before the first guess."""


class StepCosts(CostTable):
    """Seconds of whole steps, by their tokens.

    ``partitioned``: the cache computes sequences in one pass only as far as their parts of the
    batch are equally long.
    """

    def __init__(self, *, partitioned: bool) -> None:
        super().__init__()
        self._partitioned = partitioned

    def of_step(self, count: int, counts: Sequence[int], *, boldly: bool = False) -> float:
        """Seconds of a step of ``count`` sequences, of which so many have a first guess, a second,
        ... ``boldly``: what is larger than anything measured takes as long as the largest."""
        most = self.largest if boldly else 1 << 30
        return sum(self.estimate(min(size, most)) for size in self._passes(count, counts))

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

    def observe_step(self, lengths: Sequence[int], seconds: float) -> None:
        """A step took that long. ``lengths``: tokens of each of its sequences."""
        longest = max(lengths)
        if longest == 1:
            self.observe(len(lengths), seconds)
            return
        counts = [sum(n > place for n in lengths) for place in range(1, longest)]
        passes = self._passes(len(lengths), counts)
        if len(passes) == 1:
            self.observe(passes[0], seconds)
            return
        # Shared out by what each piece is thought to take.
        expected = [self.estimate(size) for size in passes]
        whole = sum(expected)
        for size, part in zip(passes, expected, strict=True):
            if whole:
                self.observe(size, seconds * part / whole)
