"""Curves of a training run as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d00", "#444444")
WIDTH, HEIGHT = 860, 340
TOP, BOTTOM = 58, 290
PANELS = ((70, 410), (500, 840))

Line = tuple[str, Sequence[tuple[float, float]]]


def svg(curves: Sequence[Mapping[str, Any]], title: str) -> str:
    """Loss, and on held-out prompts tokens committed a step and acceptance by position."""
    loss = [(c["seconds"] / 60, c["loss"]) for c in curves if c.get("loss") is not None]
    judged = [c for c in curves if c.get("accepted")]
    left: list[Line] = [("loss, nats", loss)]
    left.append(("committed a step", [(c["seconds"] / 60, c["committed"]) for c in judged]))
    right: list[Line] = []
    for index in range(len(judged[0]["accepted"]) if judged else 0):
        points = [(c["seconds"] / 60, c["accepted"][index]) for c in judged]
        right.append((f"{index + 1}", points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="70" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    parts += _panel(PANELS[0], "training loss, and tokens a step on unseen prompts", left)
    parts += _panel(PANELS[1], "share of blocks accepted up to position", right)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(sides: tuple[int, int], title: str, lines: Sequence[Line]) -> list[str]:
    left, right = sides
    points = [point for _, line in lines for point in line]
    parts = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>']
    if not points:
        return [*parts, f'<text x="{left}" y="{TOP + 20}">nothing yet</text>']
    up = ticks(max(max(value for _, value in points), 1e-9))
    along = ticks(max(max(at for at, _ in points), 1e-9))

    def x(at: float) -> float:
        return left + (right - left) * at / along[-1]

    def y(value: float) -> float:
        return BOTTOM + (TOP - BOTTOM) * value / up[-1]

    for tick in up:
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in along:
        parts.append(
            f'<text x="{x(tick):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    middle = (left + right) / 2
    parts.append(
        f'<text x="{middle}" y="{BOTTOM + 38}" text-anchor="middle">minutes of training</text>'
    )
    for index, (name, line) in enumerate(lines):
        if not line:
            continue
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        at, value = line[-1]
        parts.append(
            f'<text x="{min(x(at), right) - 4:.1f}" y="{y(value) - 5:.1f}" text-anchor="end" '
            f'fill="{colour}">{escape(name)} {value:.2f}</text>'
        )
    return parts


def ticks(high: float) -> list[float]:
    """From zero in round steps, to what is not below ``high``."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.9999)
    return [step * index for index in range(math.ceil(high / step * 0.9999) + 1)]
