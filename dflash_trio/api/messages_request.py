"""The conversation in a body of Anthropic's Messages API: system, messages, their content blocks.

Counting and generating read a conversation with the same function, so that a count is what the
answer to the same body will report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs import field, frozen

from ..generation.request import Message
from .conversation import Conversation, merge_turns, text_turn
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter, structure

ROLES = ("user", "assistant", "system")
BILLING_HEADER = "x-anthropic-billing-header"
"""How a system block begins that is for Anthropic's accounting. It is no instruction, and some
clients change it with every turn: in the prompt, it would keep prefixes from being equal."""

# ------------------------------------------------------------------------- content blocks


@frozen
class TextBlock:
    """A piece of text."""

    text: str


Block = TextBlock
"""What a content may consist of."""


def _read_text_block(block: dict[str, Any]) -> Block:
    text = block.get("text")
    if not isinstance(text, str):
        raise FieldProblem(f"must be a string, not {json_type_name(text)}", ".text")
    return TextBlock(text)


_READERS: dict[str, Callable[[dict[str, Any]], Block]] = {"text": _read_text_block}
_NOT_AVAILABLE = {
    "tool_use": "tool calls are not available yet",
    "tool_result": "tool results are not available yet",
    "thinking": "thinking blocks are not available yet",
    "redacted_thinking": "thinking blocks are not available yet",
}


def _read_block(value: Any) -> Block:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", ".type")
    if kind in _NOT_AVAILABLE:
        raise FieldProblem(f"is a {kind} block: {_NOT_AVAILABLE[kind]}")
    reader = _READERS.get(kind)
    if reader is None:
        raise FieldProblem(f"is of type {printable(kind)}; only text is understood here")
    return reader(value)


@frozen
class Content:
    """Blocks, or a string, which stands for one text block."""

    blocks: tuple[Block, ...]


def _structure_content(value: Any, _: Any) -> Content:
    if isinstance(value, str):
        return Content((TextBlock(value),))
    if not isinstance(value, list):
        raise FieldProblem(f"must be a string or an array of blocks, not {json_type_name(value)}")
    blocks: list[Block] = []
    for index, block in enumerate(value):
        try:
            blocks.append(_read_block(block))
        except FieldProblem as problem:
            raise FieldProblem(str(problem), f"[{index}]{problem.where}") from None
    return Content(tuple(blocks))


converter.register_structure_hook(Content, _structure_content)

# ------------------------------------------------------------------------------- the body


@frozen
class Turn:
    """One message. ``system`` ones may stand anywhere."""

    role: str = field()
    content: Content

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        if value not in ROLES:
            raise FieldProblem(f"must be one of {', '.join(ROLES)}, not {printable(value)}", "role")

    def as_template_message(self) -> Message:
        return text_turn(self.role, (block.text for block in self.content.blocks))


@frozen
class Thinking:
    """``thinking``: ``adaptive`` leaves it to the model, as saying nothing does."""

    type: str = field()

    @type.validator
    def _asks_for_nothing(self, _: Any, value: str) -> None:
        if value == "enabled":
            raise FieldProblem("thinking is not available yet; leave it out", "type")
        if value not in ("disabled", "adaptive"):
            raise FieldProblem(
                f"must be one of enabled, disabled, adaptive, not {printable(value)}", "type"
            )


@frozen
class ToolChoice:
    """``tool_choice``: without tools only what asks for none."""

    type: str = field()

    @type.validator
    def _asks_for_nothing(self, _: Any, value: str) -> None:
        if value not in ("auto", "none"):
            raise FieldProblem("tool calls are not available yet; use auto or none", "type")


@frozen
class MessagesConversation:
    """The fields of a body that become the prompt. Others, such as ``metadata``, are not seen."""

    messages: tuple[Turn, ...] = field()
    system: Content | None = None
    model: str | None = None
    tools: Any = field(default=None)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @messages.validator
    def _not_empty(self, _: Any, value: tuple[Turn, ...]) -> None:
        if not value:
            raise FieldProblem("must not be empty", "messages")

    @tools.validator
    def _no_tools_yet(self, _: Any, value: Any) -> None:
        if value is not None and not isinstance(value, list):
            raise FieldProblem(f"must be an array, not {json_type_name(value)}", "tools")
        if value:
            raise FieldProblem("tools are not available yet; leave them out", "tools")

    def as_conversation(self) -> Conversation:
        turns = [turn.as_template_message() for turn in self.messages]
        texts = [block.text for block in self.system.blocks] if self.system is not None else []
        instructions = [text for text in texts if not text.lstrip().startswith(BILLING_HEADER)]
        if any(instructions):
            turns.insert(0, text_turn("system", instructions))
        return Conversation(
            merge_turns(turns),
            continue_final=self.messages[-1].role == "assistant",
            model=self.model,
        )


def read_messages_conversation(data: dict[str, Any]) -> Conversation:
    """The conversation in a parsed body. Raises InvalidRequest naming the field and its index."""
    return structure(MessagesConversation, data).as_conversation()


def known_fields() -> frozenset[str]:
    """Every field that is read here. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(MessagesConversation))
