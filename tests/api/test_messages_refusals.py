"""What a body of POST /v1/messages may not say, and what each wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trio.api.messages_call import parse_messages_call
from dflash_trio.generation.errors import InvalidRequest
from tests.api.test_messages_request import (
    CALL,
    ENABLED,
    HI,
    RESULT,
    TOOL,
    asked,
    assistant,
    parse,
    text,
    user,
)


def refusal(**body: Any) -> InvalidRequest:
    """What a body, with whatever it lacks of a good one, is told."""
    with pytest.raises(InvalidRequest) as error:
        parse({"max_tokens": 4096, "messages": HI, **body})
    return error.value


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, None, [], 10.0])
def test_a_limit_that_is_no_positive_integer_is_refused(value: Any) -> None:
    assert refusal(max_tokens=value).param == "max_tokens"


def test_a_limit_is_required_and_may_be_huge() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse({"messages": HI})
    assert (error.value.param, "is required" in str(error.value)) == ("max_tokens", True)
    assert asked(max_tokens=10**12).max_tokens == 10**12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a", 1]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a", "b" * 5000]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"system": [CALL]}, "system[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [TOOL, {"name": "g"}]}, "tools[1].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0]"),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{**TOOL, "type": 5}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "f"}, TOOL]}, "tools[2]"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": "enabled"}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "budget_tokens": "2000"}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "budget_tokens": 4096}}, "thinking.budget_tokens"),
        ({"thinking": ENABLED, "max_tokens": 1024}, "thinking.budget_tokens"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {"type": 5}}}, "output_format.schema"),
    ],
)
def test_a_field_of_a_wrong_type_or_range_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    error = refusal(**fields)
    assert (error.param, str(error).startswith(f"{param}: ")) == (param, True), error


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user(text("a"), IMAGE)], "messages[0].content[1]"),
        ([user({"type": "document", "source": {}})], "messages[0].content[0]"),
        ([user({"type": "nonsense"})], "messages[0].content[0]"),
        (
            [*HI, assistant(CALL), user({**RESULT, "content": [text("a"), IMAGE]})],
            "messages[2].content[0].content[1]",
        ),
        ([*HI, assistant(CALL), user({**RESULT, "content": 5})], "messages[2].content[0].content"),
        (
            [*HI, assistant(CALL), user({**RESULT, "is_error": "no"})],
            "messages[2].content[0].is_error",
        ),
        ([*HI, assistant({**CALL, "id": 5}), *HI], "messages[1].content[0].id"),
        ([*HI, assistant({**CALL, "id": ""}), *HI], "messages[1].content[0].id"),
        ([*HI, assistant({**CALL, "name": None}), *HI], "messages[1].content[0].name"),
        ([*HI, assistant({**CALL, "input": "{}"}), *HI], "messages[1].content[0].input"),
        ([*HI, assistant({"type": "thinking"}), *HI], "messages[1].content[0].thinking"),
        # Who says what.
        ([user(CALL)], "messages[0].content[0]"),
        ([user({"type": "thinking", "thinking": "x"})], "messages[0].content[0]"),
        ([*HI, assistant(text("a"), RESULT)], "messages[1].content[1]"),
        ([*HI, {"role": "system", "content": [RESULT]}], "messages[1].content[0]"),
        # What belongs together.
        ([user(RESULT)], "messages[0].content[0].tool_use_id"),
        ([user(RESULT), assistant(CALL), *HI], "messages[0].content[0].tool_use_id"),
        ([*HI, assistant(CALL), user(RESULT, RESULT)], "messages[2].content[1].tool_use_id"),
        (
            [*HI, assistant(CALL), user(RESULT), assistant(text("a")), user(RESULT)],
            "messages[4].content[0].tool_use_id",
        ),
        ([*HI, assistant(CALL, CALL), user(RESULT)], "messages[1].content[1].id"),
        (
            [*HI, assistant(CALL), user(RESULT), assistant(CALL), user(RESULT)],
            "messages[3].content[0].id",
        ),
        # Nothing that could be continued.
        ([*HI, assistant(text("a"), CALL)], "messages[1].content[1]"),
        ([*HI, assistant(CALL), assistant(text("a"))], "messages[1].content[0]"),
    ],
)
def test_a_wrong_block_is_refused_by_its_place(messages: Any, param: str) -> None:
    error = refusal(messages=messages)
    assert (error.param, str(error).startswith(f"{param}: ")) == (param, True), error


def test_images_are_named_as_what_they_are() -> None:
    assert '"image"' in str(refusal(messages=[user(IMAGE)]))
    assert '"document"' in str(refusal(messages=[user({"type": "document", "source": {}})]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'\xef\xbb\xbf{"max_tokens": 1}',
        '{"max_tokens": 1}'.encode("utf-16"),
        b'{"max_tokens": 1, "messages": "\xff"}',
        b'{"max_tokens": 1, "max_tokens": 1}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 4, "messages": [{"role": "user", "content": "x \\ud83d y"}]}',
        b'{"max_tokens": 4, "messages": [], "stop_sequences": ["\\ud83d"]}',
        b'{"max_tokens": 4, "model": "\\ud83d", "messages": []}',
        b'{"max_tokens": 4, "tools": [{"name": "\\ud83d", "input_schema": {}}], "messages": []}',
    ],
)
def test_a_malformed_body_is_refused_with_words_that_can_be_sent(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_messages_call(raw)
    assert str(error.value).encode()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": TOOL["name"]}])
def test_a_forced_call_and_a_form_of_the_answer_contradict_each_other(
    choice: dict[str, Any],
) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert refusal(tools=[TOOL], tool_choice=choice, output_config=form).param == "tool_choice"
