"""The tools of a chat completion, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from ..generation.errors import InvalidRequest
from ..generation.request import Tool, ToolChoice
from .field_schemas import (
    STRING,
    JsonObject,
    any_of,
    array_of,
    describe,
    object_of,
    one_of,
    schema_of,
)
from .json_body import json_type_name, printable
from .tools import check_tools, schema_or_none
from .validation import FieldProblem, converter

CHOICE_MODES = ("none", "auto", "required")


@frozen
class FunctionTool:
    """``tools[].function``."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


@frozen
class ChatTool:
    """One of ``tools``. Types other than ``function`` are somebody else's: not offered."""

    function: FunctionTool | None
    type: str | None = "function"


_structure_function_tool = converter.get_structure_hook(ChatTool)


def _structure_tool(value: Any, _: Any) -> ChatTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        return ChatTool(None, kind)
    tool: ChatTool = _structure_function_tool(value, ChatTool)
    if tool.function is None:
        raise FieldProblem("is required", ".function")
    return tool


converter.register_structure_hook(ChatTool, _structure_tool)
describe(
    ChatTool,
    object_of({"type": one_of("function"), "function": schema_of(FunctionTool)}),
)


@frozen
class ChatToolChoice:
    """``tool_choice``."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None
    """The functions that may be called, where these are not all."""


def _structure_choice(value: Any, _: Any) -> ChatToolChoice:
    if isinstance(value, str):
        return ChatToolChoice(_choice_mode(value, CHOICE_MODES, ""))
    if not isinstance(value, dict):
        raise FieldProblem(f"must be a string or an object, not {json_type_name(value)}")
    match value.get("type"):
        case "function":
            return ChatToolChoice("named", _function_name(value, ""))
        case "allowed_tools":
            return _allowed_tools(value.get("allowed_tools"))
        case str(other):
            raise FieldProblem(
                f"is {printable(other)}; use function or allowed_tools, or one of "
                f"{', '.join(CHOICE_MODES)} instead of an object",
                ".type",
            )
        case other:
            raise FieldProblem(f"must be a string, not {json_type_name(other)}", ".type")


def _choice_mode(value: Any, modes: Sequence[str], where: str) -> Any:
    if value not in modes:
        shown = printable(value) if isinstance(value, str) else json_type_name(value)
        raise FieldProblem(f"must be one of {', '.join(modes)}, not {shown}", where)
    return value


def _function_name(value: dict[str, Any], where: str) -> str:
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise FieldProblem("must be the name of a function", f"{where}.function.name")
    return name


def _allowed_tools(value: Any) -> ChatToolChoice:
    where = ".allowed_tools"
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}", where)
    mode = _choice_mode(value.get("mode", "auto"), ("auto", "required"), f"{where}.mode")
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise FieldProblem("must be an array of at least one tool", f"{where}.tools")
    names = []
    for index, tool in enumerate(tools):
        place = f"{where}.tools[{index}]"
        if not isinstance(tool, dict):
            raise FieldProblem(f"must be an object, not {json_type_name(tool)}", place)
        names.append(_function_name(tool, place))
    return ChatToolChoice(mode, allowed=tuple(names))


converter.register_structure_hook(ChatToolChoice, _structure_choice)
_NAMED = object_of({"type": one_of("function"), "function": object_of({"name": STRING})})
_ALLOWED = object_of({"mode": one_of("auto", "required"), "tools": array_of(_NAMED, minItems=1)})
describe(
    ChatToolChoice,
    any_of(
        one_of(*CHOICE_MODES),
        _NAMED,
        object_of({"type": one_of("allowed_tools"), "allowed_tools": _ALLOWED}),
    ),
)


def read_tools(
    tools: Sequence[ChatTool], choice: ChatToolChoice | None, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The functions on offer and the choice among them. Raises InvalidRequest."""
    choice = choice or ChatToolChoice("auto")
    offered: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        function = tool.function
        if function is not None:
            # By path: two of one name must both be there to be refused.
            offered[f"tools[{index}]"] = Tool(
                function.name,
                function.description,
                schema_or_none(function.parameters and function.parameters.value),
                function.strict is True,
            )
    if choice.allowed is not None:
        _check_allowed(choice.allowed, offered.values())
        offered = {path: tool for path, tool in offered.items() if tool.name in choice.allowed}
    wanted = ToolChoice(choice.mode, choice.name, parallel)
    functions = tuple(offered.values())
    if functions or wanted.forces:
        check_tools(functions, wanted, paths=tuple(offered))
    return functions, wanted


def _check_allowed(allowed: Sequence[str], tools: Any) -> None:
    known = {tool.name for tool in tools}
    for index, name in enumerate(allowed):
        if name not in known:
            path = f"tool_choice.allowed_tools.tools[{index}]"
            raise InvalidRequest(f"{path}: there is no tool called {printable(name)}.", param=path)
