"""Which tools a chat offers, and what it says about calling them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.api.chat_request import parse_chat_call
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import Tool, ToolChoice

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def read(**fields: Any) -> Any:
    return parse_chat_call(json.dumps({"messages": HI, **fields}).encode()).request


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(**fields)
    return error.value


def test_a_function_comes_with_all_that_is_said_of_it() -> None:
    request = read(
        tools=[function("f", description="Does it.", parameters=SCHEMA, strict=True), function("g")]
    )
    assert request.tools == (Tool("f", "Does it.", SCHEMA, strict=True), Tool("g"))
    assert request.tool_choice == ToolChoice("auto", None, parallel=True)


def test_parameters_that_say_nothing_are_none() -> None:
    assert read(tools=[function(parameters={})]).tools == (Tool("f"),)


def test_tools_of_other_types_are_not_offered_and_fail_nobody() -> None:
    others = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "g"}}]
    assert read(tools=[*others, function()]).tools == (Tool("f"),)
    assert read(tools=others).tools == ()


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (named("g"), ToolChoice("named", "g")),
    ],
)
def test_the_choice_is_kept_as_it_was_made(choice: Any, wanted: ToolChoice) -> None:
    request = read(tools=[function("f"), function("g")], tool_choice=choice)
    assert request.tool_choice == wanted
    assert [tool.name for tool in request.tools] == ["f", "g"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_only_these_are_offered(mode: str) -> None:
    request = read(
        tools=[function("f"), function("g"), function("h")],
        tool_choice=allowed("h", "f", mode=mode),
    )
    assert [tool.name for tool in request.tools] == ["f", "h"]
    assert request.tool_choice == ToolChoice(mode)


def test_calls_at_once_can_be_turned_off() -> None:
    assert not read(tools=[function()], parallel_tool_calls=False).tool_choice.parallel


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_an_empty_list_is_no_tools(choice: str) -> None:
    assert read(tools=[], tool_choice=choice).tools == ()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "an array"),
        ({"tools": [{}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "function", "function": None}]}, "tools[0].function", "is required"),
        ({"tools": [5]}, "tools[0]", "an object"),
        ({"tools": [{"type": 5, "function": {"name": "f"}}]}, "tools[0].type", "a string"),
        ({"tools": [function(), {"type": "function", "name": "f"}]}, "tools[1].function", "requi"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [function(parameters=5)]}, "tools[0].function.parameters", "an object"),
        ({"tools": [function(description=5)]}, "tools[0].function.description", "a string"),
        ({"tools": [function("a b")]}, "tools[0]", "must consist of"),
        ({"tools": [{"type": "x"}, function(), function()]}, "tools[2]", "two tools are called"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tools": [{"type": "x"}], "tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tool_choice": named("f")}, "tool_choice", "no tools to call"),
        ({"tools": [function()], "tool_choice": named("g")}, "tool_choice", 'called "g"'),
        ({"tools": [function()], "tool_choice": "f"}, "tool_choice", "none, auto, required"),
        ({"tools": [function()], "tool_choice": 5}, "tool_choice", "a string or an object"),
        ({"tools": [function()], "tool_choice": {}}, "tool_choice.type", "null"),
        ({"tools": [function()], "tool_choice": {"type": "custom"}}, "tool_choice.type", "custom"),
        (
            {"tools": [function()], "tool_choice": {"type": "function"}},
            "tool_choice.function.name",
            "name of a function",
        ),
        (
            {"tools": [function()], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "an object",
        ),
        (
            {"tools": [function()], "tool_choice": allowed("f", mode="none")},
            "tool_choice.allowed_tools.mode",
            "auto, required",
        ),
        (
            {"tools": [function()], "tool_choice": allowed()},
            "tool_choice.allowed_tools.tools",
            "at least one",
        ),
        (
            {"tools": [function()], "tool_choice": allowed("f", "g")},
            "tool_choice.allowed_tools.tools[1]",
            'called "g"',
        ),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
    ],
)
def test_a_tool_or_choice_that_makes_no_sense_is_named(
    fields: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert says in str(error)


@pytest.mark.parametrize("choice", ["required", named("f")])
def test_a_demanded_call_cannot_have_the_form_of_an_answer_as_well(choice: Any) -> None:
    fields = {"tools": [function()], "response_format": {"type": "json_object"}}
    assert refusal(**fields, tool_choice=choice).param == "tool_choice"
    assert read(**fields, tool_choice="auto").constraint is not None
