"""What is to be checked, and how patiently: plain data, made by the command or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

Policy = Literal["drain", "finalize"]
"""What the server is expected to do with active answers at the first signal: finish them, or end
them at once in the proper form."""

Equal = Literal["exact", "prefix", "length"]
"""How an answer is compared with the golden run's: the same text; the same beginning
(``PREFIX_CHARACTERS``) and the same length; the same length only."""

SIGNAL_PATTERNS = ("term", "int", "twice", "thrice")
PREFIX_CHARACTERS = 40


class UsageError(Exception):
    """The check cannot be run as asked for. One line."""


def _holds_an_address(_: object, __: object, words: tuple[str, ...]) -> None:
    if not any("{port}" in word or "{socket}" in word for word in words):
        raise UsageError("the server's command has to contain {port} or {socket}")


@frozen
class CheckOptions:
    """One check of one server command. Times are in seconds."""

    server: tuple[str, ...] = field(validator=_holds_an_address)
    """The command's words; ``{port}`` becomes a free TCP port of 127.0.0.1, ``{socket}`` the path
    of a Unix socket that does not exist yet. Nothing else is substituted, and no shell runs."""
    apis: tuple[str, ...] = ("chat",)
    policy: Policy = "drain"
    model: str | None = None
    """The ``model`` of requests; ``None``: the first that ``/v1/models`` names."""
    slots: int | None = field(default=None, validator=optional(ge(1)))
    """How many answers the server makes at a time; ``None``: what ``/status/json`` says, else 1."""
    ready: str = "/health"
    """The path that answers 200 once the server can serve."""
    prefill_tokens: int = field(default=1500, validator=ge(1))
    """About how long the long prompt is; four characters of English count as one token."""
    answer_tokens: int = field(default=300, validator=ge(8))
    long_answer_tokens: int = field(default=4000, validator=ge(8))
    """For the zero window, which needs an answer larger than all buffers on its way, and for a
    client that leaves while the rest of its answer would still take long."""
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with every request."""
    extra: Mapping[str, Any] = MappingProxyType({"ignore_eos": True})
    """Further fields of every generating request."""
    equal: Equal = "exact"
    signals: frozenset[str] = frozenset(SIGNAL_PATTERNS)
    scenarios: tuple[str, ...] = ()
    """Names, phases or shell patterns of the scenarios to run; empty: all."""
    timeout: float = field(default=120.0, validator=gt(0))
    """The longest that any single thing may take: the start, an answer, the end after a signal."""
    slack: float = field(default=3.0, validator=gt(0))
    """What "at once" may take at most."""
    third_exit: int = 130
    """The exit code expected after a third signal; -9 would be death by SIGKILL."""
    jobs: int = field(default=1, validator=ge(1))
    """Scenarios that run side by side, each with a server of its own."""
    log_folder: Path | None = None
    """Where the servers' output is kept; ``None``: nowhere."""
