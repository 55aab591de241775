"""What a running generation tells its request, in the order it happens.

For every submitted sequence: any number of :class:`TextDelta`, then exactly one of
:class:`Finished` and :class:`Failed`, then exactly one :class:`Retired`, which is always last and
means that the engine holds nothing of the sequence any more.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

FinishReason = Literal["stop", "length", "cancelled"]

SERVER_SHUTDOWN = "server_shutdown"
"""``Finished.detail`` of a generation ended early by the server's own shutdown."""


@frozen
class Usage:
    """Token counts of one generation."""

    prompt_tokens: int
    completion_tokens: int
    """Every token sampled, the one that ended the generation included."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cells were reused instead of computed."""


@frozen
class TextDelta:
    """New text, whole UTF-8 characters only. May be empty: tokens that show nothing yet."""

    text: str
    tokens: int
    """Tokens sampled so far in this generation."""


@frozen
class Finished:
    """The generation came to an end that its client may be told as an answer."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    """The stop string that matched, if one did."""
    detail: str | None = None
    """Why beyond the reason: ``server_shutdown``, ``no_free_cells`` or ``context_full``."""


@frozen
class Failed:
    """The engine could not go on with this generation."""

    message: str


@frozen
class Retired:
    """The engine has freed the sequence's cells and its slot. Last, exactly once."""


Event = TextDelta | Finished | Failed | Retired
