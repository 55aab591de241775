"""What steps of a size take, learned from steps of any size."""

from __future__ import annotations

from bisect import bisect_left

from attrs import define

_EXACT = 8
"""Sizes up to this are told apart; larger ones are taken together by eighths of an octave."""
_WEIGHT = 0.2
"""Of a new measurement against all before it."""
_OUTLIER = 3.0
"""A measurement counts as no more than this many times what was known."""


@define(eq=False)
class _Cost:
    seconds: float
    times: int = 1


class CostTable:
    """Seconds by size. Deterministic, and without a clock: it is told what was measured.

    A size is believed once it was measured twice, and then for the smaller of the two: the first
    step of a new shape also builds graphs and pages in memory. Until then, and for sizes never
    measured, what lies between two known sizes is interpolated; what lies beyond the largest goes
    on as it did before, and costs nothing more while there is but one.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        # Sizes that are believed, in order.
        self._known: list[int] = []

    @property
    def largest(self) -> int:
        """The largest size measured; 0 before the first."""
        return max(self._costs, default=0)

    def observe(self, size: int, seconds: float) -> None:
        """A step of ``size`` took that long."""
        size = _rounded(size)
        cost = self._costs.get(size)
        if cost is None:
            self._costs[size] = _Cost(seconds)
            if not self._known:
                self._known.append(size)
            return
        cost.times += 1
        if cost.times == 2:
            cost.seconds = min(cost.seconds, seconds)
            self._believe(size)
        else:
            seconds = min(seconds, _OUTLIER * cost.seconds)
            cost.seconds += _WEIGHT * (seconds - cost.seconds)

    def _believe(self, size: int) -> None:
        at = bisect_left(self._known, size)
        if at == len(self._known) or self._known[at] != size:
            self._known.insert(at, size)
        # The very first measurement was believed for want of another.
        self._known = [s for s in self._known if self._costs[s].times > 1]

    def knows(self, size: int) -> bool:
        """It lies within what was measured."""
        known = self._known
        return bool(known) and known[0] <= _rounded(size) <= known[-1]

    def estimate(self, size: int) -> float:
        """Seconds of a step of ``size``; 0 while nothing is known at all."""
        known = self._known
        if not known:
            return 0.0
        size = _rounded(size)
        at = bisect_left(known, size)
        if at < len(known) and known[at] == size:
            return self._costs[size].seconds
        if at == 0:
            return self._costs[known[0]].seconds
        if at == len(known):
            return self._beyond(size)
        below, above = known[at - 1], known[at]
        share = (size - below) / (above - below)
        low, high = self._costs[below].seconds, self._costs[above].seconds
        return low + share * (high - low)

    def _beyond(self, size: int) -> float:
        known = self._known
        largest = known[-1]
        seconds = self._costs[largest].seconds
        if len(known) == 1:
            return seconds
        # Over an octave where possible: between neighbours noise would decide.
        base = known[max(0, bisect_left(known, largest // 2 + 1) - 1)]
        slope = (seconds - self._costs[base].seconds) / (largest - base)
        return seconds + max(0.0, slope) * (size - largest)


def _rounded(size: int) -> int:
    if size <= _EXACT:
        return size
    unit = 1 << (size.bit_length() - 4)
    return size // unit * unit
