"""The conversation in a body of OpenAI's Responses API: instructions and the items of the input.

Counting and generating read a conversation with the same function, so that a count is what the
answer to the same body will report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs import field, frozen

from ..generation.request import Message
from .conversation import Conversation, merge_turns, part_text, text_turn
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter, refuse_unavailable, structure

ROLES = ("user", "assistant", "system", "developer")

_ITEMS_NOT_AVAILABLE = {
    "function_call": "tool calls are not available yet",
    "function_call_output": "tool results are not available yet",
    "custom_tool_call": "tool calls are not available yet",
    "custom_tool_call_output": "tool results are not available yet",
    "reasoning": "reasoning items are not available yet",
    "item_reference": "answers are not kept, so items cannot be referred to",
}
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
}

# ----------------------------------------------------------------------------- input items


@frozen
class Content:
    """The texts of a message: of a string, or of its parts."""

    texts: tuple[str, ...]


def _structure_content(value: Any, _: Any) -> Content:
    if isinstance(value, str):
        return Content((value,))
    if not isinstance(value, list):
        raise FieldProblem(f"must be a string or an array of parts, not {json_type_name(value)}")
    return Content(tuple(part_text(part, f"[{index}]") for index, part in enumerate(value)))


converter.register_structure_hook(Content, _structure_content)


@frozen
class MessageItem:
    """An item of type ``message``, which may leave its type out."""

    role: str = field()
    content: Content

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        if value not in ROLES:
            raise FieldProblem(f"must be one of {', '.join(ROLES)}, not {printable(value)}", "role")

    def as_template_message(self) -> Message:
        return text_turn(self.role, self.content.texts)


@frozen
class Item:
    """One of whatever the input may consist of."""

    value: MessageItem


def _read_message(item: dict[str, Any]) -> MessageItem:
    return converter.structure(item, MessageItem)


_READERS: dict[str, Callable[[dict[str, Any]], MessageItem]] = {"message": _read_message}


def _structure_item(value: Any, _: Any) -> Item:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type", "message")
    if not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", "type")
    if kind in _ITEMS_NOT_AVAILABLE:
        raise FieldProblem(f"is a {kind}: {_ITEMS_NOT_AVAILABLE[kind]}")
    reader = _READERS.get(kind)
    if reader is None:
        raise FieldProblem(f"is of type {printable(kind)}, which is not understood here")
    return Item(reader(value))


converter.register_structure_hook(Item, _structure_item)


@frozen
class Input:
    """``input``: items, or a string, which stands for one user message."""

    items: tuple[Item, ...]


def _structure_input(value: Any, _: Any) -> Input:
    if isinstance(value, str):
        return Input((Item(MessageItem("user", Content((value,)))),))
    if not isinstance(value, list):
        raise FieldProblem(f"must be a string or an array of items, not {json_type_name(value)}")
    if not value:
        raise FieldProblem("must not be empty")
    return Input(converter.structure(value, tuple[Item, ...]))


converter.register_structure_hook(Input, _structure_input)

# ------------------------------------------------------------------------------- the body


@frozen
class Tool:
    """A tool on offer. Those that a provider would run by itself are not run here, nor shown."""

    type: str = field()

    @type.validator
    def _no_functions_yet(self, _: Any, value: str) -> None:
        if value == "function":
            raise FieldProblem("function tools are not available yet; leave them out", "type")


@frozen
class Reasoning:
    """``reasoning``: how much to think. What is to be shown of it asks for nothing."""

    effort: Any = field(default=None)

    @effort.validator
    def _not_yet(self, _: Any, value: Any) -> None:
        if value is not None:
            raise FieldProblem("is not available yet; leave it out", "effort")


@frozen
class ResponsesConversation:
    """The fields of a body that become the prompt. Others, such as ``store``, are not seen."""

    input: Input
    instructions: str | None = None
    model: str | None = None
    tools: tuple[Tool, ...] | None = None
    reasoning: Reasoning | None = None

    def as_conversation(self) -> Conversation:
        turns = [item.value.as_template_message() for item in self.input.items]
        if self.instructions:
            turns.insert(0, text_turn("system", [self.instructions]))
        # A final assistant message is answered, not continued: an item is a whole message.
        return Conversation(merge_turns(turns), model=self.model)


def read_responses_conversation(data: dict[str, Any]) -> Conversation:
    """The conversation in a parsed body. Raises InvalidRequest naming the field and its index."""
    refuse_unavailable(data, _ASKS_FOR_NOTHING)
    return structure(ResponsesConversation, data).as_conversation()


def known_fields() -> frozenset[str]:
    """Every field that is read here. The others are ignored."""
    fields = frozenset(a.name for a in attrs.fields(ResponsesConversation))
    return fields | _ASKS_FOR_NOTHING.keys()
