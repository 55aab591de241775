"""What a body of POST /v1/messages may say, what becomes of it, and what each wrong one is told."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.api import messages_call
from dflash_trio.api.messages_call import MessagesCall, parse_messages_call
from dflash_trio.api.token_requests import parse_messages_count
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import (
    GenerationRequest,
    OutputConstraint,
    ThinkingRequest,
    Tool,
    ToolChoice,
)
from dflash_trio.text.messages import normalise

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
CALL_2 = {"type": "tool_use", "id": "t2", "name": "g", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
RESULT_2 = {"type": "tool_result", "tool_use_id": "t2", "content": "43"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def parse(body: dict[str, Any]) -> MessagesCall:
    return parse_messages_call(json.dumps(body).encode())


def asked(messages: Any = HI, **fields: Any) -> GenerationRequest:
    return parse({"max_tokens": 4096, "messages": messages, **fields}).request


def turns(messages: Any) -> list[Any]:
    return normalise(asked(messages).messages)


# ---------------------------------------------------------------------------- conversations


def test_a_call_and_its_result_become_the_turns_that_templates_know() -> None:
    messages = [*HI, assistant(text("Let me see."), CALL), user(RESULT)]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert list(asked(messages).messages) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
    ]


def test_several_calls_of_one_turn_keep_their_order_and_each_gets_its_result() -> None:
    messages = [*HI, assistant(CALL), assistant(CALL_2), user(RESULT_2), user(RESULT)]
    _, called, first, second = turns(messages)
    assert [call["id"] for call in called["tool_calls"]] == ["t1", "t2"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("t2", "t1")


def test_text_around_results_is_the_users_and_stays_where_it_was() -> None:
    content = (text("a"), RESULT, text(""), text("b"), text("c"), RESULT_2, text("d"))
    said = turns([*HI, assistant(CALL, CALL_2), user(*content)])[2:]
    assert [(turn["role"], turn["content"]) for turn in said] == [
        ("user", "a"),
        ("tool", "42"),
        ("user", "b\nc"),
        ("tool", "43"),
        ("user", "d"),
    ]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"content": "42"}, "42"),
        ({"content": [text("4"), text("2")]}, "4\n2"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"is_error": True}, "Error: "),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": "fine", "is_error": None}, "fine"),
    ],
)
def test_a_result_is_text_in_whatever_form_and_says_so_if_it_is_an_error(
    fields: dict[str, Any], shown: str
) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", **fields}
    assert turns([*HI, assistant(CALL), user(result)])[-1]["content"] == shown


def test_thinking_of_earlier_turns_is_kept_apart_from_their_text_and_redacted_is_dropped() -> None:
    blocks = (
        {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "aha"},
        {"type": "thinking", "thinking": "", "signature": ""},
        text("yes"),
    )
    said = turns([*HI, assistant(*blocks), user(text("why?"))])[1]
    assert said == {"role": "assistant", "content": "yes", "reasoning_content": "hm\naha"}
    only = turns([*HI, assistant(blocks[1]), user(text("why?"))])[1]
    assert only == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("content", ["", [], [text("")]])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_empty_content_is_tolerated(role: str, content: Any) -> None:
    messages = [*HI, {"role": role, "content": content}]
    assert asked(messages).continue_final is (role == "assistant")


def test_a_final_assistant_turn_is_continued_and_no_other() -> None:
    assert asked([*HI, assistant(text("{"))]).continue_final
    assert not asked([*HI, assistant(text("{")), *HI]).continue_final


def test_a_call_whose_result_was_lost_does_not_end_the_conversation() -> None:
    assert len(turns([*HI, assistant(CALL, CALL_2), user(RESULT, text("go on"))])) == 4


# -------------------------------------------------------------------------------- the rest


def test_the_fields_of_the_answer_arrive_and_what_is_left_out_is_left_to_the_model() -> None:
    request = asked(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END", "\n\n"]
    )
    assert (request.max_tokens, request.stop) == (7, ("END", "\n\n"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    left = dict.fromkeys(("temperature", "top_p", "top_k", "stop_sequences", "stream", "system"))
    left |= dict.fromkeys(("tools", "tool_choice", "thinking", "output_config", "model"))
    for fields in ({}, left):
        plain = parse({"max_tokens": 4096, "messages": HI, **fields})
        assert plain.request.sampling.temperature is plain.request.sampling.top_k is None
        assert (plain.request.stop, plain.request.tools, plain.stream) == ((), (), False)
    assert parse({"max_tokens": 1, "messages": HI, "stream": True}).stream is True


def test_tools_arrive_with_and_without_their_type_and_those_of_servers_do_not() -> None:
    tools = [
        {**TOOL, "description": "d", "strict": True, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "name": "g", "input_schema": SCHEMA},
        {"type": "bash_20250124", "name": "bash"},
        {"type": None, "name": "h", "input_schema": {}},
    ]
    assert asked(tools=tools).tools == (
        Tool("f", "d", {"type": "object"}, strict=True),
        Tool("g", None, SCHEMA),
        Tool("h"),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", parallel=False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required")),
        ({"type": "tool", "name": "f"}, ToolChoice("named", "f")),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            ToolChoice("named", "f", parallel=False),
        ),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_the_choice_of_a_tool_arrives(choice: Any, expected: ToolChoice) -> None:
    assert asked(tools=[TOOL], tool_choice=choice).tool_choice == expected


ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, ThinkingRequest()),
        ({"type": "adaptive"}, None, ThinkingRequest()),
        ({"type": "adaptive", "display": "omitted"}, "high", ThinkingRequest(effort="high")),
        ({"type": "between_tools"}, None, ThinkingRequest()),
        (ENABLED, None, ThinkingRequest(enabled=True, budget_tokens=1024)),
        (ENABLED, "low", ThinkingRequest(enabled=True, budget_tokens=1024, effort="low")),
        (ENABLED, "none", ThinkingRequest(enabled=True, budget_tokens=1024)),
        ({"type": "disabled"}, "max", ThinkingRequest(enabled=False)),
        (None, "medium", ThinkingRequest(effort="medium")),
        (None, "xhigh", ThinkingRequest(effort="x-high")),
        (None, "x-high", ThinkingRequest(effort="x-high")),
        (None, "max", ThinkingRequest(effort="max")),
        (None, "none", ThinkingRequest(enabled=False)),
        ({"type": "adaptive"}, "minimal", ThinkingRequest(enabled=False)),
    ],
)
def test_thinking_and_effort_come_to_one_wish(
    thinking: Any, effort: str | None, expected: ThinkingRequest
) -> None:
    assert asked(thinking=thinking, output_config={"effort": effort}).thinking == expected


def test_an_output_format_is_a_constraint_in_its_new_place_and_in_its_old_one() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    expected = OutputConstraint("json_schema", SCHEMA)
    assert asked(output_config={"format": wanted}).constraint == expected
    assert asked(output_format=wanted).constraint == expected
    other = {"type": "json_schema", "schema": {"type": "string"}}
    assert asked(output_config={"format": wanted}, output_format=other).constraint == expected
    assert asked(output_config={"format": None, "effort": None}).constraint is None
    assert asked(output_config={}, output_format=None).constraint is None


def test_what_is_not_for_this_server_is_ignored_whatever_it_holds() -> None:
    names = (
        "metadata",
        "service_tier",
        "container",
        "context_management",
        "mcp_servers",
        "cache_control",
        "betas",
        "anything",
    )
    for value in ({}, [], 5, "x", {"edits": [{"type": "clear_tool_uses_20250919"}]}):
        request = asked(**dict.fromkeys(names, value))
        assert request.messages == asked().messages


def test_a_count_is_of_the_same_prompt_as_the_answer() -> None:
    body = {
        "max_tokens": 4096,
        "system": [text("Be brief."), text("x-anthropic-billing-header: v=1")],
        "messages": [
            *HI,
            assistant({"type": "thinking", "thinking": "hm"}, CALL),
            user({**RESULT, "is_error": True}, text("so?")),
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "thinking": ENABLED,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "temperature": 0,
        "stop_sequences": ["x"],
    }
    counted = parse_messages_count(json.dumps(body).encode()).request
    answered = parse(body).request
    for part in ("messages", "continue_final", "tools", "tool_choice", "thinking", "body_bytes"):
        assert getattr(counted, part) == getattr(answered, part), part


_NAMES = ["type", "role", "content", "text", "id", "name", "input", "tool_use_id", "thinking"]
_WORDS = ["user", "assistant", "text", "tool_use", "tool_result", "thinking", "t1", "enabled"]
_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2000)
    | st.sampled_from(_WORDS)
    | st.text("a\u2028"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
_FIELDS = sorted(messages_call.known_fields())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _ANYTHING, max_size=4), st.booleans())
def test_no_body_does_anything_but_parse_or_be_refused(
    fields: dict[str, Any], complete: bool
) -> None:
    base: dict[str, Any] = {"max_tokens": 9, "messages": HI} if complete else {}
    with contextlib.suppress(InvalidRequest):
        assert normalise(parse({**base, **fields}).request.messages)


def test_every_field_is_on_the_api_page() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs/http-api.md").read_text("utf-8")
    (section,) = re.findall(r"^## Messages\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    missing = [name for name in _FIELDS if not re.search(rf"`{name}[`.]", section)]
    assert missing == []
