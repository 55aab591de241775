"""Anthropic's official client, strict, on two real models."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from pydantic import BaseModel

from tests.support.models import SMOLLM2
from tests.support.real_models import (
    ALARM,
    COLOURS,
    COUNT,
    FORECAST,
    NAMES,
    ODD_TEXT,
    SAY_IT,
    THINK_MAX,
    anthropic_client,
    async_anthropic_client,
    openai_client,
    stops_within,
)
from tests.support.running import ServerProcess

pytestmark = pytest.mark.real

# The client has no temperature any more; the API has.
GREEDY: Any = {"temperature": 0}
OFF: Any = {"type": "disabled"}
ASKED: dict[str, Any] = {
    "model": "anything",
    "messages": COUNT,
    "max_tokens": 8,
    "thinking": OFF,
    "extra_body": GREEDY,
}
SCHEMAS = {"forecast": FORECAST, "alarm": ALARM}
TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
smollm2_first = pytest.mark.parametrize("first_model", [SMOLLM2], indirect=True)


class Mood(BaseModel):
    """Few values, so that the smallest model gets to the end of one."""

    colour: Literal["red", "blue"]
    loud: bool


def check_events(events: list[Any]) -> None:
    """A start with the prompt's tokens, blocks numbered from 0 one after the other, an end."""
    types = [event.type for event in events if event.type != "ping"]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0].message.usage.input_tokens > 0
    assert events[0].message.content == []
    wanted = {"text": {"text_delta"}, "tool_use": {"input_json_delta"}}
    wanted["thinking"] = {"thinking_delta", "signature_delta"}
    begun = -1
    kind: str | None = None
    for event in events[1:-2]:
        match event.type:
            case "content_block_start":
                begun += 1
                assert (kind, event.index) == (None, begun)
                kind = event.content_block.type
            case "content_block_delta":
                assert kind is not None
                assert event.index == begun
                assert event.delta.type in wanted[kind]
            case "content_block_stop":
                assert kind is not None
                assert event.index == begun
                kind = None
    assert (kind, begun >= 0) == (None, True)


OF_THE_HELPER = {"text", "thinking", "signature", "input_json", "citation"}
"""Events that only the client knows, beside the server's."""


def raw(events: list[Any]) -> list[Any]:
    return [event for event in events if event.type not in OF_THE_HELPER]


def blocks(message: Any) -> list[dict[str, Any]]:
    """A message's content without what is new in every answer."""
    return [
        {key: value for key, value in block.to_dict().items() if key != "id"}
        for block in message.content
    ]


def test_a_message_is_the_same_whole_in_events_through_the_helper_and_asynchronously(
    real_server: ServerProcess, first_model: str
) -> None:
    with anthropic_client(real_server) as client:
        whole = client.messages.create(**ASKED)
        events = list(client.messages.create(**ASKED, stream=True))
        with client.messages.stream(**ASKED) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()

    async def use_it_later() -> tuple[Any, ...]:
        async with async_anthropic_client(real_server) as later:
            again = await later.messages.create(**ASKED)
            read = [event async for event in await later.messages.create(**ASKED, stream=True)]
            async with later.messages.stream(**ASKED) as waited:
                text = "".join([piece async for piece in waited.text_stream])
                awaited = await waited.get_final_message()
            counted = await later.messages.count_tokens(
                model=NAMES[first_model], messages=COUNT, thinking=OFF
            )
        return again, read, text, awaited, counted

    again, read, text, awaited, counted = asyncio.run(use_it_later())
    (block,) = whole.content
    assert block.type == "text"
    assert "".join(pieces) == text == block.text != ""
    for each in (events, read):
        check_events(each)
        assert each[0].message.usage.input_tokens == whole.usage.input_tokens
        assert each[-2].usage.output_tokens == whole.usage.output_tokens == 8
        assert each[-2].delta.stop_reason == "max_tokens"
    for message in (final, again, awaited):
        assert message.model == whole.model == NAMES[first_model]
        assert blocks(message) == blocks(whole)
        assert message.usage.output_tokens == whole.usage.output_tokens
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert counted.input_tokens == whole.usage.input_tokens


@smollm2_first
def test_an_answer_that_ends_by_itself_says_so(real_server: ServerProcess) -> None:
    asked = {**ASKED, "messages": COLOURS, "max_tokens": 60}
    with anthropic_client(real_server) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


@smollm2_first
def test_thinking_comes_in_a_signed_block_and_ends_at_its_budget(
    real_server: ServerProcess,
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "enabled": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "adaptive": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        "disabled": {"thinking": OFF},
    }
    most = {"default": THINK_MAX, "enabled": THINK_MAX, "adaptive": THINK_MAX // 8, "disabled": 0}
    asked: dict[str, Any] = {"model": "m", "messages": COUNT, "extra_body": GREEDY}
    # Nobody may ask for a budget of less than 1024, nor for one that is not less than the answer.
    asked |= {"max_tokens": 1100, "stop_sequences": ["3"]}
    with anthropic_client(real_server) as client:
        for way, fields in ways.items():
            whole = client.messages.create(**asked, **fields)
            with client.messages.stream(**asked, **fields) as stream:
                events = list(stream)
                final = stream.get_final_message()
            check_events(raw(events))
            assert blocks(final) == blocks(whole)
            assert whole.usage.output_tokens_details is not None
            spent = whole.usage.output_tokens_details.thinking_tokens
            if most[way]:
                assert whole.content[0].type == "thinking"
                assert whole.content[0].thinking
                assert whole.content[0].signature
                # What closes the block counts too.
                assert 0 < spent <= most[way] + 6
            else:
                assert [block.type for block in whole.content] == ["text"]
                assert spent == 0


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "forecast"}], ids=lambda c: c["type"]
)
def test_a_call_that_is_demanded_fits_its_schema_and_is_streamed_alike(
    real_server: ServerProcess, choice: dict[str, Any]
) -> None:
    demanded: Any = {**choice, "disable_parallel_tool_use": True}
    asked = {**ASKED, "tools": TOOLS, "tool_choice": demanded, "max_tokens": 80}
    with anthropic_client(real_server) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            events = raw(list(stream))
            final = stream.get_final_message()
    check_events(events)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert call.name in ({"forecast"} if "name" in choice else SCHEMAS)
    jsonschema.validate(call.input, SCHEMAS[call.name])
    assert blocks(final) == blocks(whole)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(d.partial_json for d in deltas if d.type == "input_json_delta")) == (
        call.input
    )


def test_a_call_its_result_and_the_answer_go_back_and_forth_and_are_counted_alike(
    real_server: ServerProcess, first_model: str
) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS[:1], "system": "Be brief. 歪😀<|im_end|>"}
    demanded: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic_client(real_server) as client:
        called = client.messages.create(**{**asked, "max_tokens": 80}, tool_choice=demanded)
        (call,) = called.content
        assert call.type == "tool_use"
        turns: list[Any] = [
            *COUNT,
            {"role": "assistant", "content": called.content},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain 😀."}],
            },
        ]
        answered = client.messages.create(**{**asked, "messages": turns, "max_tokens": 2})
        for messages, usage in ((COUNT, called.usage), (turns, answered.usage)):
            counted = client.messages.count_tokens(
                model=NAMES[first_model],
                messages=messages,
                tools=TOOLS[:1],
                system=asked["system"],
                thinking=OFF,
            )
            read = usage.cache_read_input_tokens or 0
            assert counted.input_tokens == usage.input_tokens + read
    assert answered.usage.input_tokens > called.usage.input_tokens


def test_tools_that_may_not_be_called_are_not_shown(real_server: ServerProcess) -> None:
    with anthropic_client(real_server) as client:
        plain = client.messages.create(**{**ASKED, "max_tokens": 5})
        none = client.messages.create(
            **{**ASKED, "max_tokens": 5}, tools=TOOLS, tool_choice={"type": "none"}
        )
    assert blocks(none) == blocks(plain)
    assert none.usage == plain.usage


def test_three_turns_with_a_system_text_are_counted_as_they_are_answered(
    real_server: ServerProcess, first_model: str
) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "Hi 😀, I am <end_of_turn>."},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "歪"}],
        },
    ]
    asked: dict[str, Any] = {"model": NAMES[first_model], "messages": turns, "thinking": OFF}
    asked["system"] = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "é"}]
    with anthropic_client(real_server) as client:
        counted = client.messages.count_tokens(**asked)
        answered = client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == answered.usage.input_tokens
    assert answered.usage.output_tokens == 1


def test_forced_odd_characters_are_the_same_bytes_whole_and_streamed(
    real_server: ServerProcess,
) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SAY_IT}}
    asked = {**ASKED, "output_config": form, "max_tokens": 250}
    with anthropic_client(real_server) as client:
        (block,) = client.messages.create(**asked).content
        with client.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
    assert block.type == "text"
    assert json.loads(block.text) == {"said": ODD_TEXT}
    assert streamed == block.text


def test_answers_are_parsed_into_models(real_server: ServerProcess) -> None:
    asked = {**ASKED, "max_tokens": 60, "output_format": Mood}
    with anthropic_client(real_server) as client:
        parsed = client.messages.parse(**asked).parsed_output
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message().parsed_output

    async def parse_later() -> Any:
        async with async_anthropic_client(real_server) as later:
            return (await later.messages.parse(**asked)).parsed_output

    waited = asyncio.run(parse_later())
    assert isinstance(parsed, Mood)
    assert parsed == streamed == waited


def test_a_stop_sequence_ends_the_text_in_front_of_it_and_is_named(
    real_server: ServerProcess,
) -> None:
    no_thinking: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    with openai_client(real_server) as other:
        golden = other.chat.completions.create(
            model="m",
            messages=COUNT,
            max_tokens=24,
            temperature=0,
            logprobs=True,
            extra_body=no_thinking,
        ).choices[0]
    text = str(golden.message.content)
    assert golden.logprobs is not None
    tokens = [entry.token for entry in golden.logprobs.content or ()]
    with anthropic_client(real_server) as client:
        for stop in stops_within(text, tokens):
            asked = {**ASKED, "max_tokens": 24, "stop_sequences": [stop, "§"]}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = "".join(stream.text_stream)
                final = stream.get_final_message()
            (block,) = whole.content
            assert block.type == "text"
            assert block.text == streamed == text[: text.index(stop)]
            for message in (whole, final):
                assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("limit", [1, 5])
def test_a_limit_of_so_many_tokens_gives_exactly_so_many(
    real_server: ServerProcess, limit: int
) -> None:
    with anthropic_client(real_server) as client:
        for thinking in (OFF, {"type": "adaptive"}):
            whole = client.messages.create(**{**ASKED, "max_tokens": limit, "thinking": thinking})
            assert whole.usage.output_tokens == limit
            assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)


@smollm2_first
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("max_tokens", 0),
        ("stop_sequences", [""]),
        ("tool_choice", {"type": "any"}),
        ("tools", [TOOLS[0], TOOLS[0]]),
        ("thinking", {"type": "enabled", "budget_tokens": 1}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_field_is_a_bad_request_that_names_it_streamed_or_not(
    real_server: ServerProcess, field: str, value: Any, stream: bool
) -> None:
    with (
        anthropic_client(real_server) as client,
        pytest.raises(anthropic.BadRequestError, match=field) as refused,
    ):
        client.messages.create(**{**ASKED, field: value}, stream=stream)
    error: Any = refused.value.body
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == refused.value.request_id


def test_a_count_for_a_model_that_is_not_there_is_a_404(real_server: ServerProcess) -> None:
    with anthropic_client(real_server) as client, pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude-sonnet", messages=COUNT)
