"""A launch as its operator wrote it: options read and in form, nothing decided yet.

The command line and the configuration file both end here, so everything behind this point treats
them alike. Each value remembers how it was spelled and where it stands, for the refusals to come.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from attrs import field, frozen

from dflash_trio.cli.errors import UsageError, printable, refusal, shortened, shown
from dflash_trio.cli.option import Option
from dflash_trio.cli.values import NAME, BadValue

_SPLIT_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


@frozen
class Given:
    """One option with its value."""

    option: Option
    spelling: str
    """``--max-ctx`` on the command line, ``max-ctx`` in a file."""
    texts: tuple[str, ...]
    """The values as written; empty for a flag."""
    value: Any
    """The parsed value; a tuple for a list option."""
    where: str
    """The place for messages; empty where the spelling says enough."""

    @property
    def written(self) -> str:
        """The option with its value, for messages."""
        if not self.texts or self.option.secret:
            return self.spelling
        return f"{self.spelling} {' '.join(shown(text) for text in self.texts)}"

    def refused(self, problem: str, remedy: str) -> UsageError:
        """The error that this option cannot stand as it is: ``--option problem (where)``."""
        return refusal(f"{self.spelling} {problem}", remedy, self.where)


Values = Mapping[str, Given]
"""Given options by their names."""


@frozen
class Block:
    """One model block."""

    position: int
    values: Values
    source: str = ""
    """The configuration file, as messages name it; empty on the command line."""

    @property
    def path(self) -> str:
        """The model's GGUF file."""
        path: str = self.values["model"].value
        return path

    @property
    def name(self) -> str:
        """The model's name: what was given, else the file's stem."""
        given = self.values.get("model-name")
        return given.value if given is not None else default_model_name(self.path)

    @property
    def label(self) -> str:
        """How messages name this block."""
        return block_label(self.position, self.name, self.source)


@frozen
class ParsedLaunch:
    """Everything that was given."""

    launch: Values = field(factory=dict)
    listener: Values = field(factory=dict)
    blocks: tuple[Block, ...] = ()


def block_label(position: int, name: str, source: str = "") -> str:
    """How messages name a block: ``model block 2 (ds4)``, with its table where it has one."""
    named = f" ({shortened(printable(name))})" if name.strip() else ""
    table = f", [[model]] of {source}" if source else ""
    return f"model block {position + 1}{named}{table}"


def default_model_name(path: str) -> str:
    """The file's stem; of a split GGUF's part, the stem that all its parts share."""
    return _SPLIT_PART.sub("", PurePath(path).stem)


def given(option: Option, spelling: str, texts: tuple[str, ...], where: str) -> Given:
    """Read an option's values; UsageError names the first that is out of form."""
    if option.takes is None:
        return Given(option, spelling, (), True, where)
    parsed = []
    for text in texts:
        try:
            parsed.append(option.takes.parse(text))
        except BadValue as bad:
            problem = f"{spelling} {bad}" if option.secret else f"{spelling} {shown(text)} {bad}"
            raise refusal(problem, f"write {option.takes.form}", where) from None
    if option.many_values:
        _check_rising(spelling, parsed, where)
    return Given(option, spelling, texts, tuple(parsed) if option.is_list else parsed[0], where)


def added(earlier: Given, later: Given) -> Given:
    """A repeatable option given again: both lists of values, in order."""
    return Given(
        later.option,
        later.spelling,
        earlier.texts + later.texts,
        earlier.value + later.value,
        later.where,
    )


def check_default_name(block: Block) -> None:
    """Refuse a block whose file's stem is no name, and that gives no other."""
    if "model-name" in block.values:
        return
    try:
        NAME.parse(block.name)
    except BadValue as bad:
        raise refusal(
            f"the file's stem {shown(block.name)} {bad} as a model's name",
            "give --model-name NAME",
            block_label(block.position, "", block.source),
        ) from None


def _check_rising(spelling: str, points: list[tuple[int, float]], where: str) -> None:
    tokens = [point[0] for point in points]
    if any(later <= earlier for earlier, later in pairwise(tokens)):
        raise refusal(
            f"{spelling} does not rise from point to point", "write its points in order", where
        )
