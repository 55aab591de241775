"""Throughput and time to first token against the number of streams, as an SVG of our own.

Two panels side by side. Streams and milliseconds are on logarithmic scales, tokens a second on a
linear one from zero. Whiskers on throughput reach from the slowest to the fastest round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from attrs import frozen

from .figures import quantile, summary
from .rounds import Measured

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d00")
_WIDTH, _HEIGHT = 860, 340
_TOP, _BOTTOM = 58, 290
_PANELS = ((70, 410), (500, 840))


@frozen
class Point:
    """A value at so many streams, with the range of its rounds."""

    streams: int
    value: float
    low: float
    high: float


@frozen
class Line:
    name: str
    points: tuple[Point, ...]


def svg(results: Sequence[Measured]) -> str:
    """The plot; of one number of streams, its points alone."""
    done = [measured for measured in results if measured.pairs]
    streams = sorted({measured.workload.streams for measured in done})
    names = list(dict.fromkeys(series.name for measured in done for series in measured.series))
    rates, firsts = _lines(done, names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for index, name in enumerate(names):
        x = 70 + index * 190
        parts.append(f'<circle cx="{x}" cy="14" r="4" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 9}" y="18">{escape(name)}</text>')
    parts += _panel(_PANELS[0], "tokens/s, all streams together", rates, streams, log=False)
    parts += _panel(_PANELS[1], "median time to first token, ms", firsts, streams, log=True)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(done: Sequence[Measured], names: Sequence[str]) -> tuple[list[Line], list[Line]]:
    rates, firsts = [], []
    for name in names:
        rate_points, first_points = [], []
        for measured in sorted(done, key=lambda m: m.workload.streams):
            for series in measured.series:
                if series.name != name:
                    continue
                found = summary(series, measured.baseline)
                at = measured.workload.streams
                rate = float(found["tokens_per_second"])
                rate_points.append(Point(at, rate, min(series.rates), max(series.rates)))
                waits = [1e3 * (r.first - r.sent) for t in series.rounds for r in t.requests]
                middle = quantile(waits, 0.5)
                first_points.append(Point(at, middle, middle, middle))
        rates.append(Line(name, tuple(rate_points)))
        firsts.append(Line(name, tuple(first_points)))
    return rates, firsts


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _panel(
    sides: tuple[int, int], title: str, lines: Sequence[Line], streams: Sequence[int], *, log: bool
) -> list[str]:
    left, right = sides
    values = [v for line in lines for p in line.points for v in (p.low, p.high)]
    ticks = _log_ticks(min(values), max(values)) if log else _linear_ticks(max(values))
    y = _scale(ticks[0], ticks[-1], _BOTTOM, _TOP, log=log)
    x = _scale(streams[0], streams[-1], left + 20, right - 20, log=True)
    parts = [f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for tick in ticks:
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for count in streams:
        parts.append(
            f'<text x="{x(count):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{count}</text>'
        )
    middle = (left + right) / 2
    parts.append(f'<text x="{middle}" y="{_BOTTOM + 38}" text-anchor="middle">streams</text>')
    for index, line in enumerate(lines):
        parts += _drawn(line, x, y, _colour(index))
    return parts


def _drawn(
    line: Line, x: Callable[[float], float], y: Callable[[float], float], colour: str
) -> list[str]:
    path = " ".join(f"{x(p.streams):.1f},{y(p.value):.1f}" for p in line.points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for p in line.points:
        at = x(p.streams)
        parts.append(f'<circle cx="{at:.1f}" cy="{y(p.value):.1f}" r="3.5" fill="{colour}"/>')
        if p.high > p.low:
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(p.low):.1f}" y2="{y(p.high):.1f}" '
                f'stroke="{colour}"/>'
            )
    return parts


def _scale(
    low: float, high: float, begin: float, end: float, *, log: bool
) -> Callable[[float], float]:
    """From values to places. Of one value only, the middle."""
    curve: Callable[[float], float] = math.log if log else float
    if high <= low:
        return lambda _: (begin + end) / 2
    span = curve(high) - curve(low)
    return lambda value: begin + (end - begin) * (curve(value) - curve(low)) / span


def _linear_ticks(high: float) -> list[float]:
    """From zero in round steps, to what is not below ``high``."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * index for index in range(math.ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, around both ends."""
    low = max(low, 1e-3)
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(max(high, low))) + 1
    steps = [f * 10.0**e for e in range(first, last + 1) for f in (1, 2, 5)]
    below = max(step for step in steps if step <= low * 1.0001)
    above = min(step for step in steps if step >= high * 0.9999)
    return [step for step in steps if below <= step <= above] or [below]
