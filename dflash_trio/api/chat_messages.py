"""The messages of a chat completion, each checked, as turns that any template can render."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import Message
from ..text.messages import content_text
from .conversation import SYSTEM_ROLES, call_turn, part_text, result_turn
from .field_schemas import (
    NULL,
    STRING,
    any_of,
    array_of,
    describe,
    object_of,
    one_of,
    schema_field,
)
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter

ROLES = ("system", "developer", "user", "assistant", "tool")


@frozen
class Content:
    """Text of a turn: from a string, from null (``None``) or from text parts."""

    text: str | None


def _structure_content(value: Any, _: Any) -> Content:
    if value is None or isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise FieldProblem(
            f"must be a string, null or an array of parts, not {json_type_name(value)}"
        )
    texts = [part_text(part, f"[{index}]") for index, part in enumerate(value)]
    return Content(content_text(texts) if texts else None)


converter.register_structure_hook(Content, _structure_content)
_PART = object_of({"type": one_of("text", "input_text", "output_text"), "text": STRING})
describe(Content, any_of(STRING, NULL, array_of(_PART)))


@frozen
class CalledFunction:
    """What was called, with what."""

    name: str
    arguments: str
    """JSON text, as far as the model wrote one."""


@frozen
class ToolCalled:
    """One call in an assistant's turn."""

    id: str
    type: str = schema_field(one_of("function"), default="function")
    # Read by kind: a call of another type has none, and is told its type first.
    function: CalledFunction | None = field(default=None)

    @type.validator
    def _function_only(self, _: Any, value: str) -> None:
        if value != "function":
            raise FieldProblem(
                f"is {printable(value)}; only calls of functions are understood", "type"
            )

    @function.validator
    def _given(self, _: Any, value: CalledFunction | None) -> None:
        if value is None:
            raise FieldProblem("is required", "function")


@frozen
class ChatMessage:
    """One turn of the conversation."""

    role: str = schema_field(one_of(*ROLES))
    content: Content = Content(None)
    name: str | None = None
    tool_calls: tuple[ToolCalled, ...] | None = field(default=None)
    tool_call_id: str | None = field(default=None)
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: Any = field(default=None)

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        if value not in ROLES:
            raise FieldProblem(f"must be one of {', '.join(ROLES)}, not {printable(value)}", "role")

    @tool_calls.validator
    def _assistants_only(self, _: Any, value: tuple[ToolCalled, ...] | None) -> None:
        if value and self.role != "assistant":
            raise FieldProblem("only an assistant's turn has calls of tools", "tool_calls")

    @tool_call_id.validator
    def _results_have_one(self, _: Any, value: str | None) -> None:
        if value is None and self.role == "tool":
            raise FieldProblem("is required with role tool", "tool_call_id")

    @function_call.validator
    def _not_supported(self, _: Any, value: Any) -> None:
        if value:
            raise FieldProblem("is not available; use tool_calls", "function_call")

    def as_template_message(self, path: str) -> Message:
        text = self.content.text
        if text is None and self.role == "assistant":
            # What an assistant refused to do, it said nonetheless.
            text = self.refusal
        if text is None and not self.tool_calls:
            raise InvalidRequest(f"{path}.content: has no text.", param=f"{path}.content")
        turn: dict[str, Any] = {"role": self.role, "content": text}
        if self.role == "tool":
            turn = dict(result_turn(self.tool_call_id or "", text or ""))
        elif self.tool_calls:
            calls = (
                (call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
                if call.function is not None
            )
            turn = dict(call_turn(calls, text or ""))
        if self.name is not None:
            turn["name"] = self.name
        if self.reasoning_content and self.role == "assistant":
            turn["reasoning_content"] = self.reasoning_content
        return turn


def read_messages(messages: Sequence[ChatMessage]) -> tuple[tuple[Message, ...], bool]:
    """The turns, and whether the last one is to be continued. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages: must not be empty.", param="messages")
    turns = tuple(
        message.as_template_message(f"messages[{index}]") for index, message in enumerate(messages)
    )
    _check_results(messages)
    return turns, _continues(messages)


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Every result of a tool belongs to a call before it."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id not in called:
            path = f"messages[{index}].tool_call_id"
            shown = printable(message.tool_call_id or "")
            raise InvalidRequest(f"{path}: no call before it has the id {shown}.", param=path)
        called.update(call.id for call in message.tool_calls or ())


def _continues(messages: Sequence[ChatMessage]) -> bool:
    final = len(messages) - 1
    # System turns do not count as being between or behind: they all move to the front.
    spoken = [index for index, m in enumerate(messages) if m.role not in SYSTEM_ROLES]
    if spoken and messages[spoken[-1]].tool_calls:
        path = f"messages[{spoken[-1]}]"
        raise InvalidRequest(
            f"{path}: calls tools, and no tool message with a result follows it.", param=path
        )
    if messages[final].role != "assistant":
        return False
    if [messages[index].role for index in spoken[-2:]] == ["assistant", "assistant"]:
        raise InvalidRequest(
            f"messages[{final}]: two assistant turns at the end cannot both be continued.",
            param=f"messages[{final}]",
        )
    return True
