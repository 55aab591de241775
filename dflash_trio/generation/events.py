"""What a running generation tells its request, in the order it happens.

For each answer of a submitted generation (it has ``n``, told apart by ``index``): any number of
:class:`TextDelta`, then exactly one :class:`Finished`; or one :class:`Failed` for all of them that
have not finished. After all of it exactly one :class:`Retired`, which is always last and means that
the engine holds nothing of the generation any more.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

FinishReason = Literal["stop", "length", "cancelled"]
ThinkingClosedBy = Literal["model", "budget", "reply_budget"]
"""The model itself; the engine at the request's budget; the engine to leave room for a reply."""

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
    reasoning_tokens: int = 0
    """Those of the completion that were thinking, with what opened and closed it."""
    thinking_closed_by: ThinkingClosedBy | None = None
    """Who closed the block of thinking; ``None``: nobody, or there was none."""
    accepted_drafts: int | None = None
    """Tokens of the completion that a draft had guessed; ``None``: the model has no draft."""
    rejected_drafts: int | None = None
    """Guesses that were verified and not taken."""


CONTENT = "content"
REASONING = "reasoning"
TOOL_PREFIX = "tool:"
"""Begins the channel of a tool call's arguments; the tool's name follows."""


@frozen
class TokenAlternative:
    """A token that might have come, and how likely it was."""

    token: int
    piece: bytes
    """What it stands for; control tokens by their literals."""
    logprob: float
    """Natural logarithm, of the model's own distribution at temperature 1, before any bias,
    penalty, filter or grammar."""


@frozen
class TokenLogprob:
    """One token of the answer, with its alternatives, the likeliest first."""

    chosen: TokenAlternative
    top: tuple[TokenAlternative, ...] = ()


@frozen
class TextDelta:
    """New text, whole UTF-8 characters only. May be empty: tokens that show nothing yet."""

    text: str
    tokens: int
    """Tokens sampled so far in this answer."""
    channel: str = CONTENT
    """``content``, ``reasoning``, or ``tool:NAME`` for arguments of a call of that name, where a
    model's format keeps these apart by itself."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of tokens of the content whose text is out; empty unless asked for."""
    index: int = 0
    """Which of the generation's answers."""


@frozen
class Finished:
    """An answer came to an end that its client may be told."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    """The stop string that matched, if one did."""
    detail: str | None = None
    """Why beyond the reason: ``server_shutdown``, ``no_free_cells`` or ``context_full``."""
    index: int = 0
    """Which of the generation's answers."""


@frozen
class Failed:
    """The engine could not go on with this generation."""

    message: str
    is_the_requests: bool = False
    """What it asked for cannot be done: another try would fail as well."""


@frozen
class Retired:
    """The engine has freed the sequence's cells and its slot. Last, exactly once."""


Event = TextDelta | Finished | Failed | Retired
