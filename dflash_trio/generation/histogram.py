"""Counts of durations by size: written where they happen, read as a whole when somebody asks."""

from __future__ import annotations

from bisect import bisect_left

from attrs import define, field, frozen


@frozen
class HistogramSnapshot:
    """What a histogram held at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, included; the last bucket has none."""
    counts: tuple[int, ...]
    """Observations in each bucket, one more than bounds. Not cumulative."""
    total: float
    """Sum of all observed values."""

    @property
    def count(self) -> int:
        return sum(self.counts)


@define(eq=False)
class Histogram:
    """Written by one thread; read from any, which may miss the observation being made."""

    bounds: tuple[float, ...]
    """Ascending, in the unit of what is observed."""
    _counts: list[int] = field(init=False)
    _total: float = field(default=0.0, init=False)

    @_counts.default
    def _empty(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self._counts), self._total)
