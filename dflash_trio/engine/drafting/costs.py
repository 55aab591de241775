"""What steps of a size take, learned from steps of any size."""

from __future__ import annotations

from bisect import bisect_left

from attrs import define

_EXACT = 32
"""Sizes up to this are told apart; larger ones are taken together by eighths of an octave."""
_WEIGHT = 0.125
"""Of a new measurement, against all before it."""
_MOST_WEIGHT = 8
"""Of a size's measurements in the line, however many there were."""
_DOUBT = 2
"""Measurements that the line counts as, against those of a size."""
_FADING = 0.98
"""Of what a size's measurements weigh beyond a single one, with each measurement of any size."""
_LEAST = 1e-6
"""Seconds: about what a clock can tell."""
_OUTLIER = 2.0
"""A measurement counts as no more than this many times what was known."""


@define(eq=False)
class _Cost:
    seconds: float
    latest: int
    """When it was last measured, in measurements of all sizes."""
    times: int = 1
    residual: float = 0.0
    """Above the line, as far as that is believed."""


class CostTable:
    """Seconds by size. Deterministic, and without a clock: it is told what was measured.

    Through all sizes that were measured lies a line, which a single measurement can move a little
    only; what is above or below it at a size is believed as it is measured again and again. So
    what takes longer for a reason is found, and what was slow once, or while the machine was busy,
    is not avoided for ever.

    The first step of a new shape also builds graphs and pages in memory: of the first two
    measurements of a size the smaller counts, and a first one for no more than in proportion to
    the next smaller size. With one size known, others take no longer.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        # In order.
        self._sizes: list[int] = []
        self._now = 0
        # The line: seconds at size 0, and for each more.
        self._base = self._slope = 0.0

    @property
    def largest(self) -> int:
        """The largest size measured; 0 before the first."""
        return self._sizes[-1] if self._sizes else 0

    def times(self, size: int) -> int:
        """How often it was measured."""
        cost = self._costs.get(_rounded(size))
        return cost.times if cost is not None else 0

    def observe(self, size: int, seconds: float) -> None:
        """A step of ``size`` took that long. Nothing takes no time: what was measured as that would
        be believed for ever, as later measurements count as a few times the first at most."""
        seconds = max(seconds, _LEAST)
        size = _rounded(size)
        cost = self._costs.get(size)
        self._now += 1
        if cost is None:
            at = bisect_left(self._sizes, size)
            if at:
                below = self._sizes[at - 1]
                seconds = min(seconds, self._costs[below].seconds * size / below)
            self._sizes.insert(at, size)
            self._costs[size] = _Cost(seconds, self._now)
        else:
            cost.times += 1
            cost.latest = self._now
            if cost.times == 2:
                cost.seconds = min(cost.seconds, seconds)
            else:
                seconds = min(seconds, _OUTLIER * cost.seconds)
                weight = max(_WEIGHT, 1 / cost.times)
                cost.seconds += weight * (seconds - cost.seconds)
        self._fit()

    def _fit(self) -> None:
        """The line, by least squares of relative errors."""
        weights = xs = ys = xxs = xys = 0.0
        for size, cost in self._costs.items():
            weight = self._weight(cost) / max(cost.seconds, 1e-9) ** 2
            weights += weight
            xs += weight * size
            ys += weight * cost.seconds
            xxs += weight * size * size
            xys += weight * size * cost.seconds
        spread = weights * xxs - xs * xs
        # No longer with less to do, and nothing for nothing.
        slope = (weights * xys - xs * ys) / spread if len(self._costs) > 1 and spread > 0 else 0.0
        slope = min(max(slope, 0.0), ys / xs if xs else 0.0)
        self._slope = slope
        self._base = (ys - slope * xs) / weights
        for size, cost in self._costs.items():
            weight = self._weight(cost)
            above = cost.seconds - self._base - slope * size
            cost.residual = above * weight / (weight + _DOUBT)

    def _weight(self, cost: _Cost) -> float:
        """What it counts as, in measurements."""
        faded = _FADING ** (self._now - cost.latest)
        return 1 + (min(cost.times, _MOST_WEIGHT) - 1) * faded

    def knows(self, size: int) -> bool:
        """It lies within what was measured."""
        sizes = self._sizes
        return bool(sizes) and sizes[0] <= _rounded(size) <= sizes[-1]

    def estimate(self, size: int) -> float:
        """Seconds of a step of ``size``; 0 while nothing is known at all."""
        sizes = self._sizes
        if not sizes:
            return 0.0
        size = _rounded(size)
        at = bisect_left(sizes, size)
        if at < len(sizes) and sizes[at] == size:
            residual = self._costs[size].residual
        elif at == 0 or at == len(sizes):
            residual = self._costs[sizes[max(0, at - 1)]].residual
        else:
            below, above = sizes[at - 1], sizes[at]
            low, high = self._costs[below].residual, self._costs[above].residual
            residual = low + (high - low) * (size - below) / (above - below)
        return max(0.0, self._base + self._slope * size + residual)


def _rounded(size: int) -> int:
    if size <= _EXACT:
        return size
    unit = 1 << (size.bit_length() - 4)
    return size // unit * unit
