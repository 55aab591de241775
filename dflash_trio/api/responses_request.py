"""The conversation in a body of OpenAI's Responses API: instructions and the items of the input.

Counting and generating read a conversation with the same function, so that a count is what the
answer to the same body will report.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import ThinkingRequest
from .chat_tools import CHOICE_MODES, ChatTool, ChatToolChoice, FunctionTool, read_tools
from .conversation import Conversation, merge_turns, text_turn
from .field_schemas import OBJECT, STRING, any_of, array_of, describe, one_of
from .json_body import json_type_name, printable
from .responses_items import (
    ConversationItem,
    InputItem,
    ItemReference,
    read_item,
    turns_of,
)
from .thinking_fields import EffortWord, thinking_request
from .validation import FieldProblem, converter, structure


class EarlierAnswers(Protocol):
    """Where a body's ids lead. What is not there was made elsewhere, or is gone."""

    def conversation(self, response_id: str) -> tuple[ConversationItem, ...]:
        """All items up to and with the answer of this id. Raises InvalidRequest."""
        ...

    def item(self, item_id: str) -> ConversationItem | None: ...


# ------------------------------------------------------------------------------- the fields


@frozen
class Input:
    """``input``: items, or a string, which stands for one user message."""

    items: tuple[InputItem, ...]


def _structure_input(value: Any, _: Any) -> Input:
    if isinstance(value, str):
        return Input((InputItem(read_item({"type": "message", "role": "user", "content": value})),))
    if not isinstance(value, list):
        raise FieldProblem(f"must be a string or an array of items, not {json_type_name(value)}")
    if not value:
        raise FieldProblem("must not be empty")
    return Input(converter.structure(value, tuple[InputItem, ...]))


converter.register_structure_hook(Input, _structure_input)
describe(Input, any_of(STRING, array_of(OBJECT, minItems=1)))


@frozen
class OfferedTool:
    """One of ``tools``. Those that are no functions are a provider's: not run here, nor shown."""

    tool: ChatTool


def _structure_tool(value: Any, _: Any) -> OfferedTool:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", "type")
    if kind != "function":
        return OfferedTool(ChatTool(None, kind))
    return OfferedTool(ChatTool(converter.structure(value, FunctionTool)))


converter.register_structure_hook(OfferedTool, _structure_tool)
describe(OfferedTool, OBJECT)


@frozen
class ChosenTool:
    """``tool_choice``."""

    choice: ChatToolChoice


def _structure_choice(value: Any, _: Any) -> ChosenTool:
    if isinstance(value, str):
        return ChosenTool(ChatToolChoice(_mode(value, CHOICE_MODES, "")))
    if not isinstance(value, dict):
        raise FieldProblem(f"must be a string or an object, not {json_type_name(value)}")
    match value.get("type"):
        case "function":
            return ChosenTool(ChatToolChoice("named", _name(value, "name")))
        case "allowed_tools":
            return ChosenTool(_allowed(value))
        case str(other):
            raise FieldProblem(
                f"demands a {printable(other)}, which this server does not run", "type"
            )
        case other:
            raise FieldProblem(f"must be a string, not {json_type_name(other)}", "type")


def _allowed(value: dict[str, Any]) -> ChatToolChoice:
    mode = _mode(value.get("mode", "auto"), ("auto", "required"), "mode")
    tools = value.get("tools")
    if not isinstance(tools, list):
        raise FieldProblem(f"must be an array, not {json_type_name(tools)}", "tools")
    names = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise FieldProblem(f"must be an object, not {json_type_name(tool)}", where)
        # As among the tools themselves, those of a provider do not count.
        if tool.get("type", "function") == "function":
            names.append(_name(tool, f"{where}.name"))
    return ChatToolChoice(mode, allowed=tuple(names))


_Mode = Literal["none", "auto", "required"]


def _mode(value: Any, modes: tuple[str, ...], where: str) -> _Mode:
    if value not in modes:
        shown = printable(value) if isinstance(value, str) else json_type_name(value)
        raise FieldProblem(f"must be one of {', '.join(modes)}, not {shown}", where)
    return cast(_Mode, value)


def _name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise FieldProblem(f"must be the name of a function, not {json_type_name(name)}", where)
    return name


converter.register_structure_hook(ChosenTool, _structure_choice)
describe(ChosenTool, any_of(one_of(*CHOICE_MODES), OBJECT))


@frozen
class Reasoning:
    """``reasoning``: how much to think. There are no summaries, whichever are asked for."""

    effort: EffortWord | None = None
    summary: str | None = None

    def as_thinking(self) -> ThinkingRequest:
        return thinking_request(effort=self.effort)


@frozen
class ResponsesConversation:
    """The fields of a body that become the prompt. Others, such as ``store``, are not seen."""

    input: Input
    instructions: str | None = None
    model: str | None = None
    tools: tuple[OfferedTool, ...] | None = None
    tool_choice: ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: Any = field(default=None)
    prompt: Any = field(default=None)

    @conversation.validator
    def _no_conversations(self, _: Any, value: Any) -> None:
        if value is not None:
            raise FieldProblem(
                "this server keeps no conversations; send the items, or previous_response_id",
                "conversation",
            )

    @prompt.validator
    def _no_prompts(self, _: Any, value: Any) -> None:
        if value is not None:
            raise FieldProblem(
                "this server keeps no prompt templates; send instructions and input", "prompt"
            )


@frozen
class ReadConversation:
    """A body's conversation, and the items that it consists of, earlier ones included."""

    conversation: Conversation
    items: tuple[ConversationItem, ...]
    earlier_bytes: int
    """About the size of the texts that came from kept answers and not with the body."""


def read_conversation_items(
    data: dict[str, Any], earlier: EarlierAnswers | None = None
) -> ReadConversation:
    """Read the conversation in a parsed body. Raises InvalidRequest naming field and index.

    ``earlier``: ``None`` where no kept answers can be looked up.
    """
    body = structure(ResponsesConversation, data)
    items: tuple[ConversationItem, ...] = ()
    if body.previous_response_id is not None:
        if earlier is None:
            raise InvalidRequest(
                "previous_response_id: earlier answers cannot be carried on here; send their "
                "items.",
                param="previous_response_id",
            )
        items = earlier.conversation(body.previous_response_id)
    kept = len(items)
    items += _resolved(body.input.items, earlier)
    _check_outputs(items, kept)
    turns = turns_of(items)
    if not turns:
        raise InvalidRequest("input: has nothing that a model could read.", param="input")
    if body.instructions:
        turns.insert(0, text_turn("system", [body.instructions]))
    chosen = body.tool_choice.choice if body.tool_choice is not None else None
    offered = [entry.tool for entry in body.tools or ()]
    _check_allowed(chosen, offered)
    tools, choice = read_tools(offered, chosen, parallel=body.parallel_tool_calls is not False)
    conversation = Conversation(
        # A final assistant message is answered, not continued: an item is a whole message.
        merge_turns(turns),
        model=body.model,
        tools=tools,
        tool_choice=choice,
        thinking=(body.reasoning or Reasoning()).as_thinking(),
    )
    brought = [
        entry
        for index, entry in enumerate(items)
        if index < kept or isinstance(body.input.items[index - kept].value, ItemReference)
    ]
    return ReadConversation(conversation, items, sum(map(_text_size, brought)))


def _resolved(
    given: tuple[InputItem, ...], earlier: EarlierAnswers | None
) -> tuple[ConversationItem, ...]:
    """The items themselves, where some are references."""
    items: list[ConversationItem] = []
    referred: set[str] = set()
    for index, entry in enumerate(given):
        item = entry.value
        if isinstance(item, ConversationItem):
            items.append(item)
            continue
        path = f"input[{index}].id"
        if item.id in referred:
            # A body of many small references could otherwise become any amount of text.
            raise InvalidRequest(
                f"{path}: the item {printable(item.id)} is referred to twice.", param=path
            )
        referred.add(item.id)
        found = earlier.item(item.id) if earlier is not None else None
        if found is None:
            raise InvalidRequest(
                f"{path}: no item {printable(item.id)} is kept here: answers are kept in bounded "
                "memory of this process. Send the item itself.",
                param=path,
            )
        items.append(found)
    return tuple(items)


def _text_size(item: ConversationItem) -> int:
    turn = item.turn or {}
    calls = turn.get("tool_calls", ())
    texts = [turn.get("content"), turn.get("reasoning_content")]
    texts += [call["function"]["arguments"] for call in calls]
    return sum(len(text) for text in texts if text)


def _check_allowed(choice: ChatToolChoice | None, tools: list[ChatTool]) -> None:
    """Raise InvalidRequest for an allowed function that is not on offer."""
    if choice is None or choice.allowed is None:
        return
    known = {tool.function.name for tool in tools if tool.function is not None}
    for name in choice.allowed:
        if name not in known:
            raise InvalidRequest(
                f"tool_choice.tools: there is no tool called {printable(name)}.",
                param="tool_choice.tools",
            )


def _check_outputs(items: tuple[ConversationItem, ...], kept: int) -> None:
    """Raise InvalidRequest for a tool's output without its call; the first ``kept`` are known."""
    called: set[str] = set()
    for index, item in enumerate(items):
        turn = item.turn or {}
        called.update(call["id"] for call in turn.get("tool_calls", ()))
        call_id = turn.get("tool_call_id")
        if call_id is not None and call_id not in called:
            path = f"input[{index - kept}].call_id"
            raise InvalidRequest(
                f"{path}: there is no call {printable(call_id)} before this output of one.",
                param=path,
            )


def known_fields() -> frozenset[str]:
    """Every field that is read here. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(ResponsesConversation))
