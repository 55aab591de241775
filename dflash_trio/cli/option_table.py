"""All options together: looking one up, and finding the one that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from dflash_trio.cli.launch_options import LAUNCH_OPTIONS, LISTENER_OPTIONS
from dflash_trio.cli.model_options import MODEL_OPTIONS
from dflash_trio.cli.option import Option
from dflash_trio.cli.single_model_options import SINGLE_MODEL_OPTIONS

OPTIONS: tuple[Option, ...] = (
    *LAUNCH_OPTIONS,
    *LISTENER_OPTIONS,
    *MODEL_OPTIONS,
    *SINGLE_MODEL_OPTIONS,
)

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}

REMOVED: Mapping[str, str] = {
    "primary-gpu": "write --load-balancing-primary-gpu BACKEND:N",
    "load-balancing-next-model": "write --model PATH for each further model, and --load-balancing",
    "next-model": "write --model PATH for each further model, and --load-balancing",
}
"""Spellings of earlier versions, each with what to write now."""

# Matching is quadratic in the lengths: a megabyte of nonsense must not take a minute to refuse.
_LONGEST_GUESS = 64


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` most likely stands for, if any comes near."""
    names = list(known)
    guess = name[:_LONGEST_GUESS].lower().replace("_", "-")
    if guess in names:
        return guess
    if guess == "h" and "help" in names:
        return "help"
    # An abbreviation is refused, but it still says what was meant.
    longer = [candidate for candidate in names if guess and candidate.startswith(guess)]
    if longer:
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(guess, names, n=1, cutoff=0.6)), None)
