"""What bodies of the counting and tokenizing routes may say, and what each wrong one is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.api.messages_request import read_messages_conversation
from dflash_trio.api.responses_request import read_conversation_items
from dflash_trio.api.token_requests import (
    parse_apply_template,
    parse_detokenize,
    parse_messages_count,
    parse_responses_count,
    parse_tokenize,
)
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.text.messages import normalise

HI = [{"role": "user", "content": "hi"}]


def turns(messages: Any, **fields: Any) -> list[tuple[str, str]]:
    """The turns that a template sees of a Messages body."""
    conversation = read_messages_conversation({"messages": messages, **fields})
    return [(str(m["role"]), str(m["content"])) for m in normalise(conversation.messages)]


def response_turns(given_input: Any, **fields: Any) -> list[tuple[str, str]]:
    """The turns that a template sees of a Responses body."""
    conversation = read_conversation_items({"input": given_input, **fields}).conversation
    return [(str(m["role"]), str(m["content"])) for m in normalise(conversation.messages)]


def refusal(parse: Any, body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(json.dumps(body).encode())
    return error.value


# ------------------------------------------------------------------------------- messages


def test_a_text_block_list_is_the_same_as_a_string() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert turns([{"role": "user", "content": [block]}]) == turns(HI) == [("user", "hi")]


def test_system_is_a_string_or_blocks_and_comes_first() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert turns(HI, system="a") == [("system", "a"), ("user", "hi")]
    assert turns(HI, system=blocks) == [("system", "a\nb"), ("user", "hi")]


def test_the_billing_header_block_is_left_out_of_the_prompt_whatever_it_says() -> None:
    def with_header(version: str) -> list[tuple[str, str]]:
        header = f"x-anthropic-billing-header: cc_version={version}; cch=1"
        return turns(HI, system=[{"type": "text", "text": t} for t in (header, "Be brief.")])

    assert with_header("1") == with_header("2") == turns(HI, system="Be brief.")
    only = [{"type": "text", "text": "x-anthropic-billing-header: x"}]
    assert turns(HI, system=only) == turns(HI) == turns(HI, system="") == turns(HI, system=[])
    said = [{"role": "user", "content": "x-anthropic-billing-header: what is that?"}]
    assert turns(said) == [("user", said[0]["content"])]


def test_system_turns_may_stand_anywhere_and_join_the_leading_one() -> None:
    messages = [*HI, {"role": "system", "content": "b"}, {"role": "user", "content": "there"}]
    assert turns(messages, system="a") == [("system", "a\n\nb"), ("user", "hi\nthere")]
    last = [*HI, {"role": "system", "content": [{"type": "text", "text": "b"}]}]
    assert turns(last) == [("system", "b"), ("user", "hi")]


def test_two_turns_of_one_role_in_a_row_are_one() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert turns(messages) == [("user", "a\nb"), ("assistant", "c\nd"), ("user", "e")]


@pytest.mark.parametrize(
    ("messages", "continued"),
    [
        (HI, False),
        ([*HI, {"role": "assistant", "content": "{"}], True),
        ([*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "{"}], True),
        ([*HI, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}], False),
    ],
)
def test_an_assistant_turn_at_the_end_is_continued(messages: Any, continued: bool) -> None:
    assert read_messages_conversation({"messages": messages}).continue_final is continued


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_content_is_an_empty_turn(content: Any) -> None:
    assert turns([{"role": "user", "content": content}]) == [("user", "")]


def test_what_is_not_known_or_asks_for_nothing_is_ignored() -> None:
    extra = {
        "max_tokens": 5,
        "metadata": {"user_id": "x"},
        "context_management": {},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "stream": True,
    }
    assert turns([{**HI[0], "id": "m1"}], **extra) == turns(HI)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": None}, "messages", "an array, not null"),
        ({"messages": [None]}, "messages[0]", "an object, not null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "not null"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role", "developer"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[1].content[0].text",
            "a string, not a number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
            "not null",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
            '"image"; only text',
        ),
        ({"messages": HI, "system": 5}, "system", "a number"),
        ({"messages": HI, "system": [{"type": "image"}]}, "system[0]", "only text"),
        ({"messages": HI, "tools": {}}, "tools", "an array, not an object"),
        ({"messages": HI, "thinking": {"type": "maybe"}}, "thinking.type", "maybe"),
        ({"messages": HI, "model": 5}, "model", "a string, not a number"),
    ],
)
def test_a_wrong_messages_body_is_refused_by_field_and_index(
    body: Any, param: str, says: str
) -> None:
    error = refusal(parse_messages_count, body)
    assert (error.param, says in str(error)) == (param, True), error


# ------------------------------------------------------------------------------ responses


def test_the_input_is_a_string_or_items_with_or_without_a_type() -> None:
    expected = [("user", "hi")]
    assert response_turns("hi") == expected
    assert response_turns(HI) == expected
    assert response_turns([{"type": "message", "id": "m", "status": "completed", **HI[0]}]) == (
        expected
    )
    parts = [{"type": "input_text", "text": "hi"}]
    assert response_turns([{"role": "user", "content": parts}]) == expected


def test_instructions_come_first_then_developer_and_system_items_in_their_order() -> None:
    items = [
        {"role": "developer", "content": "b"},
        *HI,
        {"role": "system", "content": "c"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "logprobs": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        *HI,
    ]
    assert response_turns(items, instructions="a") == [
        ("system", "a\n\nb\n\nc"),
        ("user", "hi"),
        ("assistant", "yes\nno"),
        ("user", "hi"),
    ]


def test_a_final_assistant_item_is_answered_and_not_continued() -> None:
    items = [*HI, {"role": "assistant", "content": "yes"}]
    assert read_conversation_items({"input": items}).conversation.continue_final is False


def test_tools_that_a_provider_would_run_and_fields_of_no_weight_do_not_matter() -> None:
    hosted = ("web_search", "custom", "namespace", "image_generation", "local_shell")
    extra = {
        "tools": [{"type": kind, "name": "x"} for kind in hosted],
        "tool_choice": "auto",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "k",
        "client_metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "instructions": None,
    }
    assert response_turns("hi", **extra) == response_turns("hi")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "is required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "a number"),
        ({"input": [None]}, "input[0]", "an object, not null"),
        ({"input": [*HI, {"role": "banana", "content": "x"}]}, "input[1].role", "banana"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        ({"input": [{"type": 5}]}, "input[0].type", "a number"),
        ({"input": [{"type": "banana"}]}, "input[0]", "banana"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "only text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "not null",
        ),
        ({"input": "x", "instructions": 5}, "instructions", "a number"),
    ],
)
def test_a_wrong_responses_body_is_refused_by_field_and_index(
    body: Any, param: str, says: str
) -> None:
    error = refusal(parse_responses_count, body)
    assert (error.param, says in str(error)) == (param, True), error


# ----------------------------------------------------------------------------- the others


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_tokenize, {}, "content"),
        (parse_tokenize, {"content": None}, "content"),
        (parse_tokenize, {"content": "x", "add_special": 1}, "add_special"),
        (parse_detokenize, {}, "tokens"),
        (parse_detokenize, {"tokens": "x"}, "tokens"),
        (parse_detokenize, {"tokens": [1, True]}, "tokens[1]"),
        (parse_detokenize, {"tokens": [1.0]}, "tokens[0]"),
        (parse_apply_template, {}, "messages"),
        (parse_apply_template, {"messages": []}, "messages"),
        (
            parse_apply_template,
            {"messages": HI, "tools": [{"type": "function"}]},
            "tools[0].function",
        ),
    ],
)
def test_a_wrong_body_of_the_others_is_refused_by_field(parse: Any, body: Any, param: str) -> None:
    assert refusal(parse, body).param == param


NAMES = ["messages", "system", "input", "instructions", "role", "content", "type", "text", "tools"]
KEYS = st.sampled_from(NAMES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
PARSERS = [parse_messages_count, parse_responses_count, parse_tokenize, parse_detokenize]


@given(st.sampled_from(PARSERS), st.dictionaries(KEYS, JSON, max_size=6))
def test_any_object_is_read_or_refused_in_words(parse: Any, body: Any) -> None:
    try:
        parse(json.dumps(body).encode())
    except InvalidRequest as error:
        str(error).encode()
