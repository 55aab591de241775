"""What OpenAI's client may ask two real models for: tools, thoughts, limits, stops, chances."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.models import SMOLLM2
from tests.support.real_models import (
    ALARM,
    COLOURS,
    COUNT,
    FORECAST,
    THINK_MAX,
    openai_client,
    stops_within,
)
from tests.support.running import ServerProcess

pytestmark = pytest.mark.real

NO_THINKING: Any = {"chat_template_kwargs": {"enable_thinking": False}}
NO_EFFORT: Any = {"effort": "none"}
CHAT: dict[str, Any] = {
    "model": "anything",
    "messages": COLOURS,
    "temperature": 0,
    "extra_body": NO_THINKING,
}
RESPONSE: dict[str, Any] = {
    "model": "anything",
    "input": COLOURS,
    "temperature": 0,
    "reasoning": NO_EFFORT,
}
SCHEMAS = {"forecast": FORECAST, "alarm": ALARM}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT_TOOLS: Any = [{"type": "function", **function} for function in FUNCTIONS]
smollm2_first = pytest.mark.parametrize("first_model", [SMOLLM2], indirect=True)


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def content(chat: Any) -> str:
    return str(chat.choices[0].message.content)


def content_of(chunks: Iterable[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks)


@pytest.mark.parametrize("demanded", ["required", "forecast"])
def test_a_chat_makes_the_call_that_is_demanded_and_streams_it_alike(
    real_server: ServerProcess, demanded: str
) -> None:
    named = {"type": "function", "function": {"name": demanded}}
    asked: dict[str, Any] = {
        **CHAT,
        "tools": TOOLS,
        "tool_choice": demanded if demanded == "required" else named,
        "parallel_tool_calls": False,
        "max_tokens": 80,
    }
    with openai_client(real_server) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
    calls: Any = whole.message.tool_calls
    (call,) = calls
    assert whole.finish_reason == final.finish_reason == "tool_calls"
    assert not whole.message.content
    assert call.type == "function"
    assert call.function.name in (SCHEMAS if demanded == "required" else {demanded})
    check_call(call.function.name, call.function.arguments)
    streamed_calls: Any = final.message.tool_calls
    (streamed,) = streamed_calls
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    deltas: list[Any] = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == call.function.arguments


def test_a_response_makes_the_call_that_is_demanded_and_streams_it_alike(
    real_server: ServerProcess,
) -> None:
    asked: dict[str, Any] = {
        **RESPONSE,
        "tools": FLAT_TOOLS,
        "tool_choice": {"type": "function", "name": "alarm"},
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
    }
    with openai_client(real_server) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    assert whole.status == final.status == "completed"
    assert not whole.output_text
    assert call.name == "alarm"
    check_call(call.name, call.arguments)
    (streamed,) = [item for item in final.output if item.type == "function_call"]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    deltas: list[Any] = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments


def test_tools_that_may_not_be_called_are_not_shown(real_server: ServerProcess) -> None:
    chat = {**CHAT, "max_tokens": 5}
    response = {**RESPONSE, "max_output_tokens": 5}
    with openai_client(real_server) as client:
        plain = client.chat.completions.create(**chat)
        none = client.chat.completions.create(**chat, tools=TOOLS, tool_choice="none")
        answered = client.responses.create(**response)
        unoffered = client.responses.create(**response, tools=FLAT_TOOLS, tool_choice="none")
    assert none.choices[0].message == plain.choices[0].message
    assert none.usage == plain.usage
    assert unoffered.output_text == answered.output_text
    assert unoffered.usage == answered.usage


@smollm2_first
def test_a_call_that_a_limit_cuts_in_its_closing_mark_leaves_no_scraps_of_it_as_text(
    real_server: ServerProcess,
) -> None:
    asked: dict[str, Any] = {**CHAT, "tools": TOOLS[1:], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    with openai_client(real_server) as client:
        made = client.chat.completions.create(**asked, max_tokens=80)
        assert made.usage is not None
        for short_of_it in (1, 3, 5):
            limit = made.usage.completion_tokens - short_of_it
            cut = client.chat.completions.create(**asked, max_tokens=limit).choices[0]
            assert cut.finish_reason in ("length", "tool_calls")
            assert not cut.message.content


@smollm2_first
def test_a_model_thinks_unless_told_not_to_and_never_beyond_its_budget(
    real_server: ServerProcess,
) -> None:
    chat: dict[str, Any] = {"model": "m", "messages": COUNT, "temperature": 0, "max_tokens": 60}
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "low": {"reasoning_effort": "low"},
        "budget": {"thinking": {"type": "enabled", "budget_tokens": 5}},
        "none": {"reasoning_effort": "none"},
        "disabled": {"thinking": {"type": "disabled"}},
    }
    most = {"default": THINK_MAX, "low": THINK_MAX // 8, "budget": 5, "none": 0, "disabled": 0}
    with openai_client(real_server) as client:
        for way, fields in ways.items():
            asked: dict[str, Any] = {**chat, "extra_body": {**fields, "ignore_eos": True}}
            whole: Any = client.chat.completions.create(**asked)
            chunks = list(client.chat.completions.create(**asked, stream=True))
            message, details = whole.choices[0].message, whole.usage.completion_tokens_details
            thought = getattr(message, "reasoning_content", None) or ""
            streamed = "".join(
                getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks
            )
            assert streamed == thought
            assert content_of(chunks) == message.content
            # A mark that the model writes once more in its answer is text.
            assert "think>" not in thought
            assert not message.content.lstrip().startswith("</think>")
            if most[way]:
                # What closes the block counts too.
                assert most[way] <= details.reasoning_tokens <= most[way] + 6
                assert details.thinking_closed_by == "budget"
                assert thought
            else:
                assert (thought, details.reasoning_tokens) == ("", 0)


@smollm2_first
def test_a_response_has_its_thoughts_in_an_item_of_their_own(real_server: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": "m", "input": COUNT, "temperature": 0}
    with openai_client(real_server) as client:
        whole = client.responses.create(**asked, reasoning={"effort": "low"}, max_output_tokens=20)
        events = list(
            client.responses.create(
                **asked, reasoning={"effort": "low"}, max_output_tokens=20, stream=True
            )
        )
        unthinking = client.responses.create(
            **asked, reasoning={"effort": "minimal"}, max_output_tokens=5
        )
    thoughts, answer = whole.output
    assert thoughts.type == "reasoning"
    assert thoughts.content
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thoughts.content[0].text
    assert answer.type == "message"
    assert whole.output_text
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= THINK_MAX // 8 + 6
    assert [item.type for item in unthinking.output] == ["message"]


def test_log_probabilities_are_of_the_tokens_that_make_up_the_text(
    real_server: ServerProcess,
) -> None:
    chat: dict[str, Any] = {**CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    with openai_client(real_server) as client:
        whole: Any = client.chat.completions.create(**chat).choices[0]
        chunks: list[Any] = list(client.chat.completions.create(**chat, stream=True))
        completion: Any = client.completions.create(
            model="m", prompt="One two", max_tokens=12, temperature=0, logprobs=2
        ).choices[0]
        response: Any = client.responses.create(
            **RESPONSE, include=include, max_output_tokens=12, top_logprobs=2
        )
    entries = whole.logprobs.content
    logged = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for each in logged if each for entry in each.content] == entries
    part = response.output[0].content[0]
    for text, found in ((content_of(chunks), entries), (part.text, part.logprobs)):
        assert text
        assert b"".join(bytes(entry.bytes) for entry in found).decode() == text
        # Greedy: the likeliest was taken.
        for entry in found:
            assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
            assert len(entry.top_logprobs) == 2
    assert "".join(completion.logprobs.tokens) == completion.text
    offsets = completion.logprobs.text_offset
    for token, offset in zip(completion.logprobs.tokens, offsets, strict=True):
        assert completion.text.startswith(token, offset)


def test_a_seed_repeats_an_answer(real_server: ServerProcess) -> None:
    """Of a server that is idle otherwise: with neighbours, see ``test_cross_talk``."""
    chat: dict[str, Any] = {**CHAT, "messages": COUNT, "max_tokens": 12, "temperature": 1.5}
    # What is kept of earlier prompts changes the last bits of logits.
    chat["extra_body"] = {**NO_THINKING, "cache_prompt": False}
    with openai_client(real_server) as client:

        def say(seed: int | None) -> str:
            return content(client.chat.completions.create(**chat, seed=seed))

        once = say(7)
        assert say(7) == once
        assert len({once, say(8), say(2**32 - 1), say(2**63)}) > 1
        assert len({say(None) for _ in range(4)}) > 1


def test_two_answers_to_one_prompt_are_whole_and_streamed_alike(
    real_server: ServerProcess,
) -> None:
    chat: dict[str, Any] = {**CHAT, "messages": COUNT, "max_tokens": 12, "temperature": 1.5}
    chat |= {"n": 2, "seed": 7}
    with openai_client(real_server) as client:
        whole = client.chat.completions.create(**chat)
        chunks = list(client.chat.completions.create(**chat, stream=True))
        alone = client.chat.completions.create(**{**chat, "n": 1})
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts[0] != texts[1]
    streamed = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert whole.usage is not None
    assert alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.completion_tokens > alone.usage.completion_tokens


def test_a_stop_string_ends_the_text_in_front_of_it_wherever_tokens_meet(
    real_server: ServerProcess,
) -> None:
    chat: dict[str, Any] = {**CHAT, "messages": COUNT, "max_tokens": 24}
    response = {**RESPONSE, "input": COUNT, "max_output_tokens": 24}
    with openai_client(real_server) as client:
        golden = client.chat.completions.create(**chat, logprobs=True).choices[0]
        text = str(golden.message.content)
        assert golden.logprobs is not None
        tokens = [entry.token for entry in golden.logprobs.content or ()]
        for stop in stops_within(text, tokens):
            before = text[: text.index(stop)]
            whole = client.chat.completions.create(**chat, stop=stop).choices[0]
            chunks = list(client.chat.completions.create(**chat, stop=[stop, "§"], stream=True))
            answer = client.responses.create(**response, extra_body={"stop": [stop]})
            assert (whole.message.content, whole.finish_reason) == (before, "stop")
            assert (content_of(chunks), chunks[-1].choices[0].finish_reason) == (before, "stop")
            assert (answer.output_text, answer.status) == (before, "completed")


@pytest.mark.parametrize("limit", [1, 5])
def test_a_limit_of_so_many_tokens_gives_exactly_so_many_on_every_route(
    real_server: ServerProcess, limit: int
) -> None:
    thinking: dict[str, Any] = {"model": "m", "messages": COUNT, "temperature": 0}
    with openai_client(real_server) as client:
        for chat in (thinking, {**CHAT, "messages": COUNT}):
            for field in ("max_tokens", "max_completion_tokens"):
                asked: dict[str, Any] = {**chat, field: limit}
                whole = client.chat.completions.create(**asked)
                assert whole.usage is not None
                assert whole.usage.completion_tokens == limit
                assert whole.choices[0].finish_reason == "length"
        continued = client.completions.create(model="m", prompt="One two three", max_tokens=limit)
        answer = client.responses.create(model="m", input=COUNT, max_output_tokens=limit)
    assert continued.usage is not None
    assert continued.usage.completion_tokens == limit
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.status) == (limit, "incomplete")


@smollm2_first
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("stop", ""),
        ("stop", [1]),
        ("n", 3),
        ("temperature", -1),
        ("tool_choice", "required"),
        ("tools", [TOOLS[0], TOOLS[0]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_field_is_a_bad_request_that_names_it_streamed_or_not(
    real_server: ServerProcess, field: str, value: Any, stream: bool
) -> None:
    with openai_client(real_server) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**CHAT, field: value}, stream=stream)
    assert field in str(refused.value.param)
    assert refused.value.type == "invalid_request_error"
