"""Bodies of the Responses API: what they mean, and how a wrong one is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from dflash_trio.api.response_store import KeptResponse, OwnedResponses, ResponseStore
from dflash_trio.api.responses_call import known_fields, parse_responses_call
from dflash_trio.api.responses_items import HOSTED_ITEMS, read_item
from dflash_trio.api.responses_request import read_conversation_items
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import GenerationRequest, ThinkingRequest, Tool, ToolChoice
from dflash_trio.text.messages import normalise

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"
HI = [{"role": "user", "content": "hi"}]
A_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
ITS_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
G = {"type": "function", "name": "g"}


def call(body: Any, responses: OwnedResponses | None = None) -> Any:
    return parse_responses_call(json.dumps(body).encode(), responses)


def request(given_input: Any = "hi", **fields: Any) -> GenerationRequest:
    parsed: GenerationRequest = call({"input": given_input, **fields}).request
    return parsed


def settings(**fields: Any) -> Any:
    return call({"input": "hi", **fields}).settings


def turns(items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in request(items, **fields).messages]


def refusal(body: Any, responses: OwnedResponses | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(body, responses)
    caught.value.args[0].encode()
    return caught.value


# ---------------------------------------------------------------------------------- items


def test_a_call_and_its_output_become_turns_that_templates_know() -> None:
    assert turns([*HI, A_CALL, ITS_OUTPUT]) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]


def test_thinking_words_and_calls_in_a_row_are_one_turn() -> None:
    items = [
        *HI,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "short"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": "abc",
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        A_CALL,
        {**A_CALL, "call_id": "c2", "name": "g"},
        ITS_OUTPUT,
    ]
    _, said, result = turns(items)
    assert (said["content"], said["reasoning_content"]) == ("I look.", "hm")
    assert [called["function"]["name"] for called in said["tool_calls"]] == ["f", "g"]
    assert result["role"] == "tool"


@pytest.mark.parametrize(
    "after", [[], [{"role": "user", "content": "next"}], [{"role": "system", "content": "s"}]]
)
def test_thinking_that_led_to_nothing_is_left_out(after: list[Any]) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "hm"}]}
    assert turns([*HI, thought, *after]) == turns([*HI, *after])


@pytest.mark.parametrize("content", [None, [], [{"type": "reasoning_text", "text": ""}]])
def test_thinking_without_its_text_is_left_out(content: Any) -> None:
    thought = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": "x"}
    said = {"role": "assistant", "content": "yes"}
    assert turns([*HI, thought, said]) == turns([*HI, said])


@pytest.mark.parametrize(
    "output",
    [
        "4\n2",
        [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}],
    ],
)
def test_an_output_is_a_string_or_parts(output: Any) -> None:
    assert turns([A_CALL, {**ITS_OUTPUT, "output": output}])[-1]["content"] == "4\n2"


def test_a_custom_tools_call_shows_its_text_as_an_argument() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    called, result = normalise(request([custom, output]).messages)
    calls: Any = called["tool_calls"]
    assert calls[0]["function"] == {"name": "patch", "arguments": {"input": 'a "b"\n'}}
    assert result["content"] == "done"


@pytest.mark.parametrize("kind", sorted(HOSTED_ITEMS))
def test_what_a_provider_did_is_left_out(kind: str) -> None:
    assert turns([*HI, {"type": kind, "id": "x", "action": {}}]) == turns(HI)


def test_ids_and_states_of_items_change_nothing() -> None:
    marked = [{"id": f"i{n}", "status": "completed", **item} for n, item in enumerate(HI)]
    assert turns(marked) == turns(HI)


def test_system_texts_cost_what_they_cost_in_one_turn_with_instructions_first() -> None:
    items = [{"role": "developer", "content": "b"}, *HI, {"role": "system", "content": "c"}]
    assert normalise(request(items, instructions="a").messages) == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        *HI,
    ]


# ----------------------------------------------------------------------------- the fields


def test_function_tools_are_offered_and_a_providers_are_not() -> None:
    hosted = ("web_search", "custom", "namespace", "image_generation", "local_shell", "mcp")
    offered = request(tools=[F, G, *({"type": kind} for kind in hosted)])
    assert offered.tools == (Tool("f", None, {"type": "object"}, strict=True), Tool("g"))
    assert offered.tool_choice == ToolChoice()


def test_a_request_with_a_providers_tools_alone_has_none() -> None:
    assert request(tools=[{"type": "web_search"}]).tools == ()
    assert request(tools=[]).tools == ()


@pytest.mark.parametrize(
    ("given_choice", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "g"}, ToolChoice("named", "g")),
    ],
)
def test_a_choice_among_tools_is_kept(given_choice: Any, choice: ToolChoice) -> None:
    assert request(tools=[F, G], tool_choice=given_choice).tool_choice == choice


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_only_these_are_offered(mode: str) -> None:
    allowed = [{"type": "function", "name": "g"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    offered = request(tools=[F, G], tool_choice=choice)
    assert [tool.name for tool in offered.tools] == ["g"]
    assert offered.tool_choice.mode == mode


def test_one_call_at_a_time_where_parallel_ones_are_not_wanted() -> None:
    assert request(tools=[F], parallel_tool_calls=False).tool_choice.parallel is False
    assert request(tools=[F], parallel_tool_calls=None).tool_choice.parallel is True


@pytest.mark.parametrize(
    ("effort", "thinking"),
    [
        (None, ThinkingRequest()),
        ("none", ThinkingRequest(enabled=False)),
        ("minimal", ThinkingRequest(enabled=False)),
        ("low", ThinkingRequest(enabled=True, effort="low")),
        ("xhigh", ThinkingRequest(enabled=True, effort="x-high")),
        ("max", ThinkingRequest(enabled=True, effort="max")),
    ],
)
def test_an_effort_is_understood(effort: Any, thinking: ThinkingRequest) -> None:
    assert request(reasoning={"effort": effort, "summary": "auto"}).thinking == thinking


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
    ],
)
def test_log_probabilities_are_made_where_they_are_asked_for(fields: Any, wanted: Any) -> None:
    assert request(**fields).logprobs == wanted


def test_a_format_constrains_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = request(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert wanted.constraint is not None
    assert (wanted.constraint.kind, wanted.constraint.source) == ("json_schema", schema)
    wanted = request(text={"format": {"type": "json_object"}})
    assert wanted.constraint is not None
    assert wanted.constraint.kind == "json_object"
    for plain in ({"format": {"type": "text"}}, {"format": None, "verbosity": "low"}, None):
        assert request(text=plain).constraint is None


def test_sampling_fields_are_those_of_chat() -> None:
    asked = request(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=7,
        stop=["a"],
        logit_bias={"5": -100},
        max_output_tokens=1,
        cache_prompt=False,
    )
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed) == (0.5, 3, 7)
    assert asked.sampling.logit_bias == ((5, -100.0),)
    assert (asked.stop, asked.max_tokens, asked.cache_prompt) == (("a",), 1, False)


def test_what_codex_sends_is_understood_and_its_settings_are_told_back() -> None:
    body = {
        "model": "gpt-5-codex",
        "input": [
            {"type": "message", "role": "developer", "id": "a", "content": [
                {"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "id": "b", "content": [
                {"type": "input_text", "text": "hi"}]},
        ],
        "tools": [F, {"type": "namespace", "name": "n", "tools": [G]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
    }  # fmt: skip
    parsed = call(body)
    assert parsed.stream
    assert [tool.name for tool in parsed.request.tools] == ["f"]
    assert parsed.settings["tools"] == body["tools"]
    assert parsed.settings["prompt_cache_key"] == "k"
    assert parsed.settings["store"] is False
    assert parsed.settings["reasoning"] == {"effort": None, "summary": "auto"}


def test_settings_are_told_back_as_they_were_given() -> None:
    told = settings(
        instructions="be brief",
        metadata={"a": "b"},
        max_output_tokens=5,
        tools=[G],
        tool_choice={"type": "function", "name": "g"},
        text={"verbosity": "low"},
        truncation="auto",
        user="u",
    )
    assert told["instructions"] == "be brief"
    assert told["metadata"] == {"a": "b"}
    assert told["max_output_tokens"] == 5
    assert told["tools"] == [{**G, "parameters": None, "strict": None}]
    assert told["tool_choice"] == {"type": "function", "name": "g"}
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (told["truncation"], told["user"]) == ("auto", "u")


@pytest.mark.parametrize("value", ["auto", "flex", "priority", "banana"])
def test_there_is_one_service_tier_whatever_is_asked_for(value: str) -> None:
    assert settings(service_tier=value)["service_tier"] == "default"


@pytest.mark.parametrize("name", sorted(known_fields() - {"input"}))
def test_null_means_not_given(name: str) -> None:
    null = request(**{name: None})
    assert null == attrs.evolve(request(), body_bytes=null.body_bytes)


# ---------------------------------------------------------------------- what was kept


def kept_answer(responses: OwnedResponses) -> None:
    """``resp_1``: a question with a call for an answer."""
    question = read_item({"type": "message", "role": "user", "content": "hi", "id": "msg_1"})
    answer = read_item({**A_CALL, "id": "fc_1"})
    responses.keep(KeptResponse("resp_1", b"{}", (question,), (answer,), 100))


def test_an_earlier_answer_is_carried_on_without_its_instructions() -> None:
    responses = ResponseStore().of(None)
    kept_answer(responses)
    body = {"input": [ITS_OUTPUT], "previous_response_id": "resp_1", "instructions": "new"}
    parsed = call(body, responses)
    whole = call({"input": [*HI, A_CALL, ITS_OUTPUT], "instructions": "new"})
    assert parsed.request.messages == whole.request.messages
    assert [item.id for item in parsed.keeping.items[:2]] == ["msg_1", "fc_1"]
    assert parsed.settings["previous_response_id"] == "resp_1"


def test_an_item_that_is_kept_can_be_referred_to() -> None:
    responses = ResponseStore().of(None)
    kept_answer(responses)
    items = [*HI, {"type": "item_reference", "id": "fc_1"}, ITS_OUTPUT]
    assert call({"input": items}, responses).request.messages == (
        request([*HI, A_CALL, ITS_OUTPUT]).messages
    )


def test_an_item_is_referred_to_once_so_that_small_bodies_stay_small() -> None:
    responses = ResponseStore().of(None)
    kept_answer(responses)
    reference = {"type": "item_reference", "id": "fc_1"}
    error = refusal({"input": [reference, reference]}, responses)
    assert (error.param, "twice" in str(error)) == ("input[1].id", True)


def test_what_kept_answers_bring_counts_as_if_it_had_been_sent() -> None:
    responses = ResponseStore().of(None)
    kept_answer(responses)
    body = {"input": "x", "previous_response_id": "resp_1"}
    brought = len("hi") + len(A_CALL["arguments"])
    assert call(body, responses).request.body_bytes == len(json.dumps(body)) + brought


def test_an_answer_that_is_not_kept_is_a_clear_refusal() -> None:
    error = refusal({"input": "x", "previous_response_id": "resp_2"}, ResponseStore().of(None))
    assert (error.param, error.code) == ("previous_response_id", "previous_response_not_found")
    assert "bounded memory of this process" in str(error)


def test_an_output_is_counted_from_its_own_input_where_there_is_earlier() -> None:
    responses = ResponseStore().of(None)
    kept_answer(responses)
    lost = {**ITS_OUTPUT, "call_id": "c9"}
    error = refusal({"input": [ITS_OUTPUT, lost], "previous_response_id": "resp_1"}, responses)
    assert error.param == "input[1].call_id"


def test_what_is_not_to_be_kept_holds_no_items() -> None:
    parsed = call({"input": "hi", "store": False}, ResponseStore().of(None))
    assert (parsed.keeping.kept, parsed.keeping.items) == (False, ())


def test_counting_reads_the_same_conversation() -> None:
    body = {"input": [*HI, A_CALL, ITS_OUTPUT], "instructions": "a", "tools": [F]}
    counted = read_conversation_items(body).conversation.for_counting(0)
    asked = call(body).request
    assert (counted.messages, counted.tools) == (asked.messages, asked.tools)
    assert (counted.tool_choice, counted.thinking) == (asked.tool_choice, asked.thinking)


@pytest.mark.parametrize("name", sorted(known_fields()))
def test_every_field_is_on_the_api_page(name: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Responses\n")[2]
    section = section.partition("\n## ")[0]
    assert re.search(rf"`{name}[`.]", section)
