"""What simulations of drafts have in common: guesses that are right by chance, and the telling of
them, as the scheduler does it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from operator import mul
from types import SimpleNamespace
from typing import Any

from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.model_runner import BatchSlice

BLOCK = 7
"""Guesses at a time."""


def always(chance: float) -> tuple[float, ...]:
    """Chances that guess 1, 2, ... comes, if each has this one once those before it came."""
    return tuple(accumulate(repeat(chance, BLOCK), mul))


def right_of(dice: random.Random, chances: Sequence[float], guesses: int) -> int:
    """How many of so many guesses come. ``chances``: that guess 1, 2, ... does."""
    for place, (before, chance) in enumerate(pairwise((1.0, *chances[:guesses]))):
        if dice.random() >= chance / before:
            return place
    return guesses


def tell(
    drafter: Drafter, records: Sequence[Any], guesses: Sequence[Any], right: Sequence[int]
) -> None:
    """A step is over, in which so many of each sequence's guesses came."""
    runs = [
        [
            SimpleNamespace(
                sequence=SimpleNamespace(drafts=record), kept=1 + more, accepted=more,
                judged=min(1 + more, len(guess)), right=range(more), error=None,
            )
        ]
        for record, guess, more in zip(records, guesses, right, strict=True)
    ]  # fmt: skip
    batch = [BatchSlice(row, 0, (1, *guess), 1 + len(guess)) for row, guess in enumerate(guesses)]
    if drafter.asleep:
        drafter.missed(batch)
        return
    drafter.observe(batch, [1 + more for more in right], runs)  # type: ignore[arg-type]
