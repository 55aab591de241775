"""Boxes and arrows as an SVG: states on a grid, transitions between them.

Drawn here, and not by Mermaid in the browser, so that the pages need no script and no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from attrs import frozen

WIDTH, HEIGHT = 116, 40
"""Of a box."""
COLUMN, ROW = 236, 130
"""From one place on the grid to the next."""
MARGIN = 34
PARTING = 9
"""How far apart the two arrows of a pair run."""

Point = tuple[float, float]
Edge = tuple[str, str]


@frozen
class Arrow:
    """How a transition is drawn."""

    label: str
    """What brings it about; lines are parted by line ends."""
    bend: float = 0.0
    """How far its middle is pushed to the left of its way."""
    shift: Point = (0, 0)
    """How far its label is moved from its middle."""


@frozen
class Picture:
    """A machine on paper. ``places``: each state's column and row, the top left being 0, 0."""

    title: str
    places: Mapping[str, Point]
    arrows: Mapping[Edge, Arrow]
    final: str | None = None
    """A state that may follow on every other; drawn beside a frame around those."""
    final_label: str = ""


def draw(picture: Picture) -> str:
    """The whole file."""
    right = max(x for x, _ in picture.places.values()) * COLUMN + WIDTH + 2 * MARGIN
    bottom = max(y for _, y in picture.places.values()) * ROW + HEIGHT + 2 * MARGIN
    top = -_above(picture)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top:g} {right:g} {bottom - top:g}" '
        f'width="{right:g}" height="{bottom - top:g}" role="img">',
        f"<title>{escape(picture.title)}</title>",
        "<style>text{font:13px sans-serif;text-anchor:middle;fill:#1a1a1a}"
        ".box{fill:#e8eef7;stroke:#33527a;stroke-width:1.4}.frame{fill:none;stroke:#8a97a8;"
        "stroke-dasharray:5 4}.way{fill:none;stroke:#33527a;stroke-width:1.4}"
        ".label{font-size:12px;paint-order:stroke;stroke:#fff;stroke-width:5px}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#33527a"/></marker></defs>',
        f'<rect y="{top:g}" width="{right:g}" height="{bottom - top:g}" rx="6" fill="#fff"/>',
        *_frame(picture),
    ]
    ways = [(edge, arrow, _way(picture, edge, arrow)) for edge, arrow in picture.arrows.items()]
    lines += [f'<path class="way" marker-end="url(#tip)" d="{way[0]}"/>' for _, _, way in ways]
    lines += [_box(state, _center(place)) for state, place in picture.places.items()]
    for _, arrow, (_, middle) in ways:
        place = middle[0] + arrow.shift[0], middle[1] + arrow.shift[1]
        lines += _text(arrow.label, place, "label")
    return "\n".join([*lines, "</svg>", ""])


def _above(picture: Picture) -> float:
    """What bent arrows need above the first row."""
    return max(0.0, *(arrow.bend - 10 for arrow in picture.arrows.values()))


def _center(place: Point) -> Point:
    return MARGIN + place[0] * COLUMN + WIDTH / 2, MARGIN + place[1] * ROW + HEIGHT / 2


def _box(state: str, center: Point) -> str:
    x, y = center[0] - WIDTH / 2, center[1] - HEIGHT / 2
    return (
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
        f'<text x="{center[0]:g}" y="{center[1] + 4.5:g}">{escape(state)}</text>'
    )


def _text(text: str, middle: Point, kind: str) -> Iterator[str]:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        y = middle[1] + 4 + 15 * (number - (len(lines) - 1) / 2)
        yield f'<text class="{kind}" x="{middle[0]:.1f}" y="{y:.1f}">{escape(line)}</text>'


def _way(picture: Picture, edge: Edge, arrow: Arrow) -> tuple[str, Point]:
    """The arrow's path, from border to border, and the middle of it."""
    start, end = (_center(picture.places[state]) for state in edge)
    length = math.dist(start, end)
    left = ((end[1] - start[1]) / length, -(end[0] - start[0]) / length)
    # Of a pair in both directions each keeps to its left.
    aside = PARTING if edge[::-1] in picture.arrows else 0.0
    start, end = (
        (point[0] + left[0] * aside, point[1] + left[1] * aside) for point in (start, end)
    )
    push = arrow.bend * 2
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    pulled = middle[0] + left[0] * push, middle[1] + left[1] * push
    begin, stop = _border(start, pulled, start), _border(end, pulled, end)
    path = f"M{begin[0]:.1f} {begin[1]:.1f}Q{pulled[0]:.1f} {pulled[1]:.1f} "
    on_it = middle[0] + left[0] * (arrow.bend), middle[1] + left[1] * (arrow.bend)
    return f"{path}{stop[0]:.1f} {stop[1]:.1f}", on_it


def _border(center: Point, towards: Point, shifted: Point) -> Point:
    """Where a line from a box's middle to ``towards`` leaves the box."""
    dx, dy = towards[0] - shifted[0], towards[1] - shifted[1]
    share = min(
        (WIDTH / 2 + 1) / abs(dx) if dx else math.inf,
        (HEIGHT / 2 + 1) / abs(dy) if dy else math.inf,
    )
    return center[0] + dx * share, center[1] + dy * share


def _frame(picture: Picture) -> Iterator[str]:
    """Around all states but the final one, with an arrow from it to that."""
    if picture.final is None:
        return
    centers = [_center(place) for state, place in picture.places.items() if state != picture.final]
    left, right = (edge(x for x, _ in centers) for edge in (min, max))
    upper, lower = min(y for _, y in centers), max(y for _, y in centers)
    x, y = left - WIDTH / 2 - 18, upper - HEIGHT / 2 - 14 - _above(picture)
    width = right + WIDTH / 2 + 18 - x
    yield (
        f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{lower + HEIGHT / 2 + 14 - y:g}" rx="10"/>'
    )
    end = _center(picture.places[picture.final])
    yield (
        f'<path class="way" marker-end="url(#tip)" '
        f'd="M{x + width:g} {end[1]:g}L{end[0] - WIDTH / 2 - 1:g} {end[1]:g}"/>'
    )
    middle = (x + width + end[0] - WIDTH / 2) / 2 - 4, end[1] - 18
    yield from _text(picture.final_label, middle, "label")
