"""docs/diagrams/: the state machines of the code, from the tables that the code itself obeys.

The tables say which transitions there are. Here stand only the places on the paper and the words
beside the arrows; a transition without words, and words without a transition, are an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path

from dflash_trio.engine import health
from dflash_trio.engine.sequence import LAWFUL as SEQUENCE
from dflash_trio.routing.drain import LAWFUL as DRAIN

from .svg import Arrow, Edge, Picture, draw

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "diagrams"

_SEQUENCE = Picture(
    "The life of a sequence",
    places={
        "queued": (0, 0),
        "prefilling": (1, 0),
        "decoding": (2, 0),
        "paused": (1, 1),
        "retired": (3, 0.5),
    },
    arrows={
        ("queued", "prefilling"): Arrow("its first step", shift=(-4, -10)),
        ("queued", "decoding"): Arrow("another answer has their prompt", bend=44),
        ("queued", "paused"): Arrow("no cells left"),
        ("prefilling", "decoding"): Arrow("the prompt\nis computed", shift=(-4, 17)),
        ("prefilling", "paused"): Arrow("no cells\nleft", shift=(34, 0)),
        ("decoding", "paused"): Arrow("no cells left"),
        ("paused", "prefilling"): Arrow("cells\nagain", shift=(-26, 0)),
    },
    final="retired",
    final_label="ended, failed\nor cancelled",
)
_DRAIN = Picture(
    "The phases of a shutdown",
    places={"serving": (0, 0), "draining": (1, 0), "finalizing": (2, 0), "cutting": (3, 0)},
    arrows={
        ("serving", "draining"): Arrow("first signal", shift=(-4, -10)),
        ("draining", "finalizing"): Arrow("second signal or\n--drain-timeout", shift=(-4, -18)),
        ("finalizing", "cutting"): Arrow("2 seconds", shift=(-4, -10)),
    },
)
_HEALTH = Picture(
    "The health of an engine",
    places={"loading": (0, 0), "healthy": (1, 0), "stalled": (2, 0), "lost": (1, 1)},
    arrows={
        ("loading", "healthy"): Arrow("loaded", shift=(-4, -10)),
        ("loading", "lost"): Arrow("abandoned"),
        ("healthy", "stalled"): Arrow("a step takes\ntoo long", shift=(-2, -18)),
        ("healthy", "lost"): Arrow("its thread ended"),
        ("stalled", "healthy"): Arrow("it returns", shift=(2, 12)),
        ("stalled", "lost"): Arrow("its thread ended"),
    },
)


class Mismatch(Exception):
    """The words for a diagram and the code's table are not of the same transitions."""


def checked(picture: Picture, table: Mapping[str, Collection[str]]) -> Picture:
    """``picture``, if it shows exactly the transitions of ``table``."""
    edges: set[Edge] = {(before, after) for before, all_ in table.items() for after in all_}
    shown = set(picture.arrows)
    if picture.final is not None:
        shown |= {(state, picture.final) for state in table if state != picture.final}
    if edges != shown or set(table) != set(picture.places):
        raise Mismatch(f"{picture.title}: {sorted(edges ^ shown)}")
    return picture


def _by_value(table: Mapping[Enum, Collection[Enum]]) -> dict[str, list[str]]:
    return {before.value: [after.value for after in all_] for before, all_ in table.items()}


def files() -> dict[str, str]:
    """Each file's text by its name."""
    return {
        "sequence.svg": draw(checked(_SEQUENCE, _by_value({**SEQUENCE}))),
        "drain.svg": draw(checked(_DRAIN, {**DRAIN})),
        "health.svg": draw(checked(_HEALTH, _by_value({**health.LAWFUL}))),
    }
