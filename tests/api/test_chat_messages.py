"""What the turns of a chat may be, above all those with calls of tools and their results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.api.chat_request import parse_chat_call
from dflash_trio.generation.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def calling(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL], **fields}


def read(*messages: Any, **fields: Any) -> Any:
    return parse_chat_call(json.dumps({"messages": messages, **fields}).encode()).request


def refusal(*messages: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(*messages)
    return error.value


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=str
)
def test_a_turn_that_calls_tools_may_say_nothing_however_that_is_written(
    content: dict[str, Any],
) -> None:
    request = read(USER, calling(**content), RESULT)
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT,
    )
    assert not request.continue_final


def test_text_beside_calls_and_thinking_before_them_are_kept() -> None:
    turn = read(USER, calling(content="Let me see.", reasoning_content="hm"), RESULT).messages[1]
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "hm")
    assert turn["tool_calls"] == [CALL]


def test_a_result_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert read(USER, calling(), {**RESULT, "content": parts}).messages[2]["content"] == "4\n2"


def test_a_result_may_be_empty() -> None:
    assert read(USER, calling(), {**RESULT, "content": ""}).messages[2]["content"] == ""


def test_a_call_without_its_type_is_a_functions() -> None:
    call = {key: value for key, value in CALL.items() if key != "type"}
    assert read(USER, calling(tool_calls=[call]), RESULT).messages[1]["tool_calls"] == [CALL]


def test_arguments_that_are_no_json_are_kept_as_the_model_wrote_them() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    turn = read(USER, calling(tool_calls=[call]), RESULT).messages[1]
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_what_an_assistant_refused_is_what_it_said() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert read(USER, refused, USER).messages[1]["content"] == "No."


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([USER, {"role": "assistant"}], "messages[1].content", "no text"),
        ([USER, {"role": "assistant", "tool_calls": []}], "messages[1].content", "no text"),
        ([USER, {"role": "assistant", "content": []}], "messages[1].content", "no text"),
        ([USER, {"role": "assistant", "content": None}, USER], "messages[1].content", "no text"),
        ([USER, calling(), {"role": "tool", "content": "x"}], "messages[2].tool_call_id", "requir"),
        ([USER, calling(), {**RESULT, "content": None}], "messages[2].content", "no text"),
        ([USER, RESULT], "messages[1].tool_call_id", 'no call before it has the id "c1"'),
        (
            [USER, calling(), {**RESULT, "tool_call_id": "c2"}],
            "messages[2].tool_call_id",
            "no call before",
        ),
        ([RESULT, USER, calling(), RESULT], "messages[0].tool_call_id", "no call before"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls", "only an assistant"),
        ([USER, calling(tool_calls={})], "messages[1].tool_calls", "an array"),
        ([USER, calling(tool_calls=[5])], "messages[1].tool_calls[0]", "an object"),
        (
            [USER, calling(tool_calls=[{"function": CALL["function"]}])],
            "messages[1].tool_calls[0].id",
            "is required",
        ),
        (
            [USER, calling(tool_calls=[{"id": "c1", "type": "custom", "custom": {}}])],
            "messages[1].tool_calls[0].type",
            "only calls of functions",
        ),
        (
            [USER, calling(tool_calls=[{"id": "c1", "type": "function"}])],
            "messages[1].tool_calls[0].function",
            "is required",
        ),
        (
            [USER, calling(tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}])],
            "messages[1].tool_calls[0].function.arguments",
            "a string, not an object",
        ),
        (
            [USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}],
            "messages[1].function_call",
            "use tool_calls",
        ),
        ([USER, calling()], "messages[1]", "no tool message"),
        ([USER, calling(), {"role": "system", "content": "x"}], "messages[1]", "no tool message"),
    ],
)
def test_turns_that_make_no_conversation_are_named(
    messages: list[Any], param: str, says: str
) -> None:
    error = refusal(*messages)
    assert error.param == param
    assert says in str(error)


def test_a_call_between_two_assistant_turns_keeps_them_apart() -> None:
    said = {"role": "assistant", "content": "It is"}
    assert read(USER, calling(content="Let me see."), RESULT, said).continue_final


def test_tool_results_at_the_end_are_answered() -> None:
    assert not read(USER, calling(), RESULT).continue_final
