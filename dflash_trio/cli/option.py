"""What an option is: one row of the table that the grammar, the checks and the help all read."""

from __future__ import annotations

from enum import Enum

import attrs

from dflash_trio.cli.values import ValueType


class Scope(Enum):
    """How far an option reaches, and so where it may stand."""

    LAUNCH = "whole launch"
    """Anywhere on the command line, once."""
    LISTENER = "listener"
    """In the first block only."""
    MODEL = "model"
    """In any block, for that model."""
    SINGLE_MODEL = "single model"
    """As ``MODEL``, and never beside ``--load-balancing``: these set process-wide policy."""

    @property
    def per_model(self) -> bool:
        return self in (Scope.MODEL, Scope.SINGLE_MODEL)


@attrs.frozen
class Option:
    """One option. ``name`` has no dashes: ``max-ctx`` is ``--max-ctx`` and a TOML key."""

    name: str
    scope: Scope
    takes: ValueType | None
    """The kind of its value; ``None`` for a flag."""
    default: str
    """For people: what holds when it is not given."""
    help: str
    """One sentence."""
    field: str = attrs.field(default="", kw_only=True)
    """The configuration field that it fills (``sampling.x`` inside a model's sampling values);
    empty where the launch is assembled by hand or the feature is still to come."""
    flag_value: bool = attrs.field(default=True, kw_only=True)
    """What a flag puts into its field."""
    repeatable: bool = attrs.field(default=False, kw_only=True)
    """May be given several times in a block; the values add up."""
    many_values: bool = attrs.field(default=False, kw_only=True)
    """Takes one value or more behind one flag."""
    secret: bool = attrs.field(default=False, kw_only=True)
    """Its value is never shown in a message."""
    available: bool = attrs.field(default=True, kw_only=True)
    """Whether this build offers the feature to a model that loads."""
    instead: str = attrs.field(default="", kw_only=True)
    """What to do without a feature that is not there yet, to follow ``leave it out``."""
    only_value: str = attrs.field(default="", kw_only=True)
    """The one value that this build offers so far; empty where there is no such bound."""
    in_file: bool = attrs.field(default=True, kw_only=True)
    """Whether the configuration file may hold it."""

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return f"--{self.name}"

    @property
    def usage(self) -> str:
        """The flag with its value's placeholder."""
        if self.takes is None:
            return self.flag
        more = f" [{self.takes.metavar} ...]" if self.many_values else ""
        return f"{self.flag} {self.takes.metavar}{more}"

    @property
    def is_list(self) -> bool:
        """Whether its values come as a tuple (and in TOML as an array)."""
        return self.repeatable or self.many_values
