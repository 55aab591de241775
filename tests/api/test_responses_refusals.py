"""Bodies of the Responses API that are refused: in words, by field and index."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.api.response_store import ResponseStore
from dflash_trio.api.responses_call import known_fields, parse_responses_call
from dflash_trio.generation.errors import InvalidRequest
from tests.api.test_responses_request import A_CALL, HI, ITS_OUTPUT, F, refusal


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "is required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": None}, "input", "not null"),
        ({"input": [{"type": "web_search_call"}]}, "input", "nothing that a model could read"),
        ({"input": [*HI, {"role": "banana", "content": "x"}]}, "input[1].role", "banana"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "only text",
        ),
        (
            {"input": [*HI, {"role": "user", "content": [{"type": "input_text"}]}]},
            "input[1].content[0].text",
            "not null",
        ),
        ({"input": [{"type": "compaction"}]}, "input[0]", "not understood"),
        ({"input": [ITS_OUTPUT]}, "input[0].call_id", 'no call "c1" before'),
        ({"input": [ITS_OUTPUT, A_CALL]}, "input[0].call_id", "no call"),
        ({"input": [{**A_CALL, "call_id": ""}]}, "input[0].call_id", "must not be empty"),
        ({"input": [{**A_CALL, "arguments": {}}]}, "input[0].arguments", "not an object"),
        ({"input": [A_CALL, {**ITS_OUTPUT, "output": 5}]}, "input[1].output", "a number"),
        (
            {"input": [A_CALL, {**ITS_OUTPUT, "output": [{"type": "input_image"}]}]},
            "input[1].output[0]",
            "only text",
        ),
        (
            {"input": [{"type": "reasoning", "content": [{}]}]},
            "input[0].content[0].text",
            "not null",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "bounded memory"),
        ({"input": [{"id": "x"}]}, "input[0].id", "bounded memory"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", "send their items"),
        ({"input": "x", "conversation": "c"}, "conversation", "keeps no conversations"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "no prompt templates"),
        ({"input": "x", "background": True}, "background", "listens"),
        ({"input": "x", "tools": [5]}, "tools[0]", "an object"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type", "not null"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"input": "x", "tools": [{**F, "parameters": []}]}, "tools[0].parameters", "an array"),
        ({"input": "x", "tools": [F, F]}, "tools[1]", "two tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "tool_choice": "banana"}, "tool_choice", "banana"),
        (
            {"input": "x", "tools": [F], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
            "no tool called",
        ),
        (
            {"input": "x", "tools": [F], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "does not run",
        ),
        (
            {
                "input": "x",
                "tools": [F],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools",
            "no tool called",
        ),
        (
            {"input": "x", "tools": [F], "tool_choice": "required",
             "text": {"format": {"type": "json_object"}}},
            "tool_choice",
            "text.format",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "is required",
        ),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x", "max_output_tokens": 1.5}, "max_output_tokens", "an integer"),
        ({"input": "x", "max_output_tokens": True}, "max_output_tokens", "an integer"),
        ({"input": "x", "temperature": "hot"}, "temperature", "a number"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"input": "x", "include": "all"}, "include", "an array"),
        ({"input": "x", "metadata": {"a": 5}}, "metadata.a", "a number"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"input": "x", "metadata": {"k" * 65: ""}}, "metadata", "64"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"input": "x", "truncation": "middle"}, "truncation", "middle"),
        ({"input": "x", "store": "yes"}, "store", "true or false"),
        ({"input": "x", "stream": 1}, "stream", "true or false"),
        ({"input": "x", "stream_options": []}, "stream_options", "an object"),
        ({"input": "x", "instructions": 5}, "instructions", "a number"),
        ({"input": "x", "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_field_and_index(body: Any, param: str, says: str) -> None:
    error = refusal(body)
    assert (error.param, says in str(error)) == (param, True), error


@pytest.mark.parametrize("place", ["input", "stop", "model", "tools"])
def test_half_a_character_is_refused_in_words_wherever_it_is(place: str) -> None:
    half = '"x \\ud83d y"'
    values = {"input": half, "stop": half, "model": half, "tools": f'[{{"type": {half}}}]'}
    body = f'{{"input": "hi", "{place}": {values[place]}}}'
    if place == "input":
        body = f'{{"input": {half}}}'
    with pytest.raises(InvalidRequest) as caught:
        parse_responses_call(body.encode())
    str(caught.value).encode()


NAMES = [*sorted(known_fields()), "type", "role", "content", "call_id", "output", "id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["function", "message", "reasoning", "function_call", "item_reference"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_object_is_read_or_refused_in_words(body: Any) -> None:
    try:
        parse_responses_call(json.dumps({"input": "hi", **body}).encode(), ResponseStore().of(None))
    except InvalidRequest as error:
        str(error).encode()
