"""From what was seen to what is reported. Pure functions of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

RESAMPLES = 2000
MIB = 1 << 20


@define
class Request:
    """One answered request, by the contestant's own clock. Seconds."""

    sent: float
    first: float
    """Its first token was there."""
    last: float
    """Its last event was there."""
    gaps: list[float]
    """Between each token's arrival and the next one's."""
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


@define
class Round:
    """One contestant's turn."""

    requests: list[Request]
    cpu_seconds: float | None = None
    """Of the contestant's processes; ``None``: they are not ours to look at."""
    generator_cpu_seconds: float = 0.0
    load: float = 0.0
    """The machine's load average at its end."""

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return max(r.last for r in self.requests) - min(r.sent for r in self.requests)

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def rate(self) -> float:
        """Tokens a second, all streams together."""
        return self.tokens / self.seconds


@define
class Series:
    """All rounds of one contestant in one workload."""

    name: str
    rounds: list[Round] = field(factory=list)
    peak_pss_anon: int | None = None
    peak_rss: int | None = None

    @property
    def rates(self) -> list[float]:
        return [turn.rate for turn in self.rounds]


@frozen
class Interval:
    """A figure and where it lies in 95 of 100 cases."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """As a share of the figure; NaN, which no margin is wide enough for, of one pair."""
        return (self.high - self.low) / self.value


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two values next to it, linearly. NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ratio_of_pairs(these: Sequence[float], those: Sequence[float]) -> Interval:
    """The ratio these/those of two that took turns, with its bootstrap interval.

    Pair by pair, since whatever else the machine does hits both of a pair about alike; the pairs'
    geometric mean, since that of the reciprocals is its reciprocal. The resampling has a seed of
    its own: the same rounds give the same interval. One pair says nothing of where the ratio lies.
    """
    logs = [math.log(a / b) for a, b in zip(these, those, strict=True)]
    chance = random.Random(1)
    count = len(logs)
    if count == 1:
        return Interval(math.exp(logs[0]), math.nan, math.nan)
    means = sorted(math.fsum(chance.choices(logs, k=count)) / count for _ in range(RESAMPLES))
    return Interval(
        math.exp(math.fsum(logs) / count),
        math.exp(quantile(means, 0.025)),
        math.exp(quantile(means, 0.975)),
    )


def summary(series: Series, baseline: Series) -> dict[str, Any]:
    """What the table shows of a series, in the units of its columns."""
    requests = [request for turn in series.rounds for request in turn.requests]
    first = [request.first - request.sent for request in requests]
    gaps = [gap for request in requests for gap in request.gaps]
    tokens = sum(turn.tokens for turn in series.rounds)
    cpu = [turn.cpu_seconds for turn in series.rounds]
    generator = math.fsum(turn.generator_cpu_seconds for turn in series.rounds)
    ratio = ratio_of_pairs(series.rates, baseline.rates)
    return {
        "rounds": len(series.rounds),
        "tokens": tokens,
        "tokens_per_second": geometric_mean(series.rates),
        "ratio": ratio.value,
        "ratio_interval": [ratio.low, ratio.high],
        "ttft_median_ms": quantile(first, 0.5) * 1e3,
        "ttft_p95_ms": quantile(first, 0.95) * 1e3,
        "gap_median_ms": quantile(gaps, 0.5) * 1e3,
        "gap_p95_ms": quantile(gaps, 0.95) * 1e3,
        "gap_max_ms": max(gaps, default=math.nan) * 1e3,
        "cpu_seconds_per_1000_tokens": (
            None if None in cpu else math.fsum(c or 0.0 for c in cpu) / tokens * 1e3
        ),
        "generator_cpu_seconds_per_1000_tokens": generator / tokens * 1e3,
        "tokens_per_event": tokens / max(1, len(gaps) + len(requests)),
        "prompt_tokens_mean": sum(r.prompt_tokens for r in requests) / len(requests),
        "cached_tokens_mean": sum(r.cached_tokens for r in requests) / len(requests),
        "peak_pss_anon_mib": _mib(series.peak_pss_anon),
        "peak_rss_mib": _mib(series.peak_rss),
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
