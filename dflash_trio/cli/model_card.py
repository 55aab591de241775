"""Model cards: a small TOML file of a model's own defaults, in the words of the options.

``--model-card FILE`` names it; otherwise it is the file beside the model that ends in
``.card.toml``, if there is one. Its keys are options, each in the section it belongs to, and what
they may hold is what the options may.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from dflash_trio.cli.errors import UsageError, refusal, shown
from dflash_trio.cli.fields import model_fields_of
from dflash_trio.cli.given import Block, Given, given
from dflash_trio.cli.input_files import read_file
from dflash_trio.cli.option_table import BY_NAME, nearest
from dflash_trio.cli.toml_text import parse_toml, texts_of
from dflash_trio.config import EFFORTS, ModelCard

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "sampling": ("temperature", "top-p", "top-k", "min-p", "repeat-penalty", "seed"),
    "limits": ("default-max-tokens", "hard-limit-reply-budget", "think-max-tokens"),
    "reasoning": ("thinking", *(f"reasoning-effort-{effort}" for effort in EFFORTS)),
    "tools": ("tool-parser",),
    "chat": ("turn-ends",),
}
"""What a card may say: by the names of the options, and ``turn-ends``, which is none."""

TURN_ENDS = "turn-ends"
MOST_TURN_ENDS = 16

SUFFIX = ".card.toml"

_MEANT = {"max-tokens": "default-max-tokens"}
"""Keys of the APIs, where the nearest spelling would be another option."""

_HOME = {key: section for section, keys in SECTIONS.items() for key in keys}


def card_beside(model_path: str) -> str:
    """Where a model's card is looked for: the model's path with another ending."""
    return os.path.join(os.path.dirname(model_path), PurePath(model_path).stem + SUFFIX)


def read_card(block: Block) -> ModelCard | None:
    """A block's card, ``None`` if it has none. UsageError names the file, the key and the block."""
    named = block.values.get("model-card")
    if named is not None:
        path: str = named.value
        content = read_file(path, named.spelling, named.where)
    else:
        path = card_beside(block.path)
        # A link that leads nowhere was meant to lead somewhere: that is not "no card".
        if not os.path.lexists(path):
            return None
        content = read_file(path, "the model card", block.label)
    document = parse_toml(content, f"model card {shown(path)}", block.label)
    values: dict[str, Given] = {}
    turn_ends: tuple[str, ...] = ()
    place = f"{shown(path)}, {block.label}"
    for section, table in document.items():
        if section not in SECTIONS:
            raise _no_section(section, place)
        if not isinstance(table, dict):
            raise refusal(f"{section} is no table", f"write it as [{section}]", place)
        where = f"[{section}] of {place}"
        if section == "chat":
            turn_ends = _read_turn_ends(table, where)
        else:
            values |= _read_section(section, table, where)
    return ModelCard(path=path, turn_ends=turn_ends, **model_fields_of(values))


def _read_turn_ends(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    for key in table:
        if key != TURN_ENDS:
            raise _misplaced(key, where)
    ends = table.get(TURN_ENDS, [])
    good = isinstance(ends, list) and all(isinstance(end, str) and end for end in ends)
    if not good or len(ends) > MOST_TURN_ENDS:
        remedy = f"write a list of at most {MOST_TURN_ENDS} strings, none of them empty"
        raise refusal(f"{TURN_ENDS} is not what it should be", remedy, where)
    return tuple(ends)


def _read_section(section: str, table: Mapping[str, Any], where: str) -> dict[str, Given]:
    for key in table:
        if key not in SECTIONS[section]:
            raise _misplaced(key, where)
    return {
        key: given(BY_NAME[key], key, tuple(texts_of(BY_NAME[key], entry, where)), where)
        for key, entry in table.items()
    }


def _no_section(name: str, place: str) -> UsageError:
    if name in _HOME or name in BY_NAME:
        return _misplaced(name, f"top level of {place}")
    guess = nearest(name, SECTIONS)
    known = ", ".join(f"[{section}]" for section in SECTIONS)
    remedy = f"did you mean [{guess}]?" if guess else f"a card has {known}"
    return refusal(f"{shown(name)} is no section of a model card", remedy, place)


def _misplaced(key: str, where: str) -> UsageError:
    name = shown(key)
    if key in _HOME:
        return refusal(f"{name} has no place here", f"put it into [{_HOME[key]}]", where)
    if key in BY_NAME:
        remedy = f"give it as {BY_NAME[key].flag}"
        return refusal(f"{name} does not belong into a model card", remedy, where)
    plain = key.lstrip("-").replace("_", "-")
    guess = _MEANT.get(plain) or nearest(plain, _HOME)
    remedy = f"did you mean {guess}?" if guess else f"a card knows {', '.join(_HOME)}"
    return refusal(f"{name} is no key of a model card", remedy, where)
