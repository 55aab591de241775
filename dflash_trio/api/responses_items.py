"""The items that a Responses conversation consists of, each as a turn for a model's template.

Items come in a body's input and out of the answers that this server keeps; both are read here, so
that an answer carried on by its id costs the same prompt as its items sent again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import field, frozen

from ..generation.request import Message
from ..text.messages import content_text
from .answer import new_id
from .conversation import SYSTEM_ROLES, call_turn, part_text, result_turn, text_turn
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter

ROLES = ("user", "assistant", "system", "developer")
MAX_ID_LENGTH = 128
"""Characters of an item's id that are kept; an item with a longer one is given another."""

HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "computer_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "tool_search_call",
        "tool_search_output",
    }
)
"""What a provider did between two turns. No model here was trained to read it, and the answer that
came of it is an item of its own: these are left out of the prompt."""
_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}


@frozen
class ConversationItem:
    """One item, as it is shown and as the template sees it."""

    id: str
    shown: Mapping[str, Any]
    """With its id and status, as lists of items have it."""
    turn: Message | None
    """``None``: it is not part of the prompt."""

    @property
    def is_reasoning(self) -> bool:
        return self.shown.get("type") == "reasoning"


@frozen
class ItemReference:
    """Stands for an item that this server has kept."""

    id: str


@frozen
class InputItem:
    """One of whatever the input may consist of."""

    value: ConversationItem | ItemReference


# -------------------------------------------------------------------------- kinds of items


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
class ReasoningText:
    """``content`` of a reasoning item: null, or parts of type ``reasoning_text``."""

    texts: tuple[str, ...] = ()


def _structure_reasoning_text(value: Any, _: Any) -> ReasoningText:
    if value is None:
        return ReasoningText()
    if not isinstance(value, list):
        raise FieldProblem(f"must be an array of parts, not {json_type_name(value)}")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise FieldProblem(f"must be an object, not {json_type_name(part)}", f"[{index}]")
        text = part.get("text")
        if not isinstance(text, str):
            raise FieldProblem(f"must be a string, not {json_type_name(text)}", f"[{index}].text")
        texts.append(text)
    return ReasoningText(tuple(texts))


converter.register_structure_hook(ReasoningText, _structure_reasoning_text)


def _not_empty(_instance: Any, attribute: Any, value: str) -> None:
    if not value:
        raise FieldProblem("must not be empty", attribute.name)


@frozen
class _MessageFields:
    role: str = field()
    content: Content

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        if value not in ROLES:
            raise FieldProblem(f"must be one of {', '.join(ROLES)}, not {printable(value)}", "role")


@frozen
class _CallFields:
    call_id: str = field(validator=_not_empty)
    name: str
    arguments: str


@frozen
class _CustomCallFields:
    call_id: str = field(validator=_not_empty)
    name: str
    input: str


@frozen
class _OutputFields:
    call_id: str = field(validator=_not_empty)
    output: Content


@frozen
class _ReasoningFields:
    content: ReasoningText = ReasoningText()
    summary: tuple[Any, ...] | None = None
    encrypted_content: str | None = None


def _read_message(item: dict[str, Any]) -> tuple[Message, dict[str, Any]]:
    fields = converter.structure(item, _MessageFields)
    part: dict[str, Any] = {"type": "input_text"}
    if fields.role == "assistant":
        part = {"type": "output_text", "annotations": []}
    content = [{**part, "text": text} for text in fields.content.texts]
    return text_turn(fields.role, fields.content.texts), {**item, "content": content}


def _read_call(item: dict[str, Any]) -> tuple[Message, dict[str, Any]]:
    fields = converter.structure(item, _CallFields)
    return call_turn([(fields.call_id, fields.name, fields.arguments)]), item


def _read_custom_call(item: dict[str, Any]) -> tuple[Message, dict[str, Any]]:
    # Templates know only calls with arguments: a custom tool's text becomes the one of them.
    fields = converter.structure(item, _CustomCallFields)
    arguments = json.dumps({"input": fields.input}, ensure_ascii=False)
    return call_turn([(fields.call_id, fields.name, arguments)]), item


def _read_output(item: dict[str, Any]) -> tuple[Message, dict[str, Any]]:
    fields = converter.structure(item, _OutputFields)
    return result_turn(fields.call_id, content_text(list(fields.output.texts))), item


def _read_reasoning(item: dict[str, Any]) -> tuple[Message | None, dict[str, Any]]:
    # A summary is not what the model thought, and what is encrypted was encrypted elsewhere.
    text = "\n".join(filter(None, converter.structure(item, _ReasoningFields).content.texts))
    shown = {**item, "summary": item.get("summary") or []}
    if not text:
        return None, shown
    return {"role": "assistant", "content": "", "reasoning_content": text}, shown


_Reader = Callable[[dict[str, Any]], tuple[Message | None, dict[str, Any]]]
_READERS: dict[str, _Reader] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    "reasoning": _read_reasoning,
    **dict.fromkeys(HOSTED_ITEMS, lambda item: (None, item)),
}


def _structure_item(value: Any, _: Any) -> InputItem:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type")
    if kind is None:
        alone = "id" in value and "role" not in value and "content" not in value
        kind = "item_reference" if alone else "message"
    if not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", "type")
    if kind == "item_reference":
        return InputItem(converter.structure(value, ItemReference))
    return InputItem(read_item({**value, "type": kind}))


converter.register_structure_hook(InputItem, _structure_item)


def read_item(item: dict[str, Any]) -> ConversationItem:
    """An item with its type, of a body or of an answer. Raises FieldProblem or cattrs' errors."""
    kind = item["type"]
    reader = _READERS.get(kind)
    if reader is None:
        raise FieldProblem(f"is of type {printable(kind)}, which is not understood here")
    turn, shown = reader(item)
    given = item.get("id")
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID_LENGTH:
        given = new_id(_ID_PREFIXES.get(kind, "item_"))
    status = item.get("status") or "completed"
    return ConversationItem(given, {**shown, "id": given, "status": status}, turn)


def turns_of(items: Iterable[ConversationItem]) -> list[Message]:
    """The turns of a conversation, oldest first, not merged.

    Reasoning belongs to the assistant's words or calls after it; where none follow, it is left
    out, as the answer that it led to never came.
    """
    turns: list[Message] = []
    next_role: str | None = None
    for item in reversed(list(items)):
        if item.turn is None or (item.is_reasoning and next_role != "assistant"):
            continue
        turns.append(item.turn)
        if item.turn["role"] not in SYSTEM_ROLES:
            next_role = item.turn["role"]
    turns.reverse()
    return turns
