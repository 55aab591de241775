"""OpenAI's official client, strict, on two real models: every way it has of reading an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.models import SMOLLM2
from tests.support.real_models import (
    COLOURS,
    COUNT,
    NAMES,
    ODD_TEXT,
    SAY_IT,
    async_openai_client,
    openai_client,
)
from tests.support.running import ServerProcess

pytestmark = pytest.mark.real

NO_THINKING: Any = {"chat_template_kwargs": {"enable_thinking": False}}
CHAT: dict[str, Any] = {
    "model": "anything",
    "messages": COLOURS,
    "max_tokens": 30,
    "temperature": 0,
    "stop": "\n",
    "extra_body": NO_THINKING,
}
COMPLETION: dict[str, Any] = {
    "model": "anything",
    "prompt": "One two three",
    "max_tokens": 12,
    "temperature": 0,
}
RESPONSE: dict[str, Any] = {
    "model": "anything",
    "input": "Name three colours.",
    "max_output_tokens": 30,
    "temperature": 0,
    "reasoning": {"effort": "none"},
    "extra_body": {"stop": "\n"},
}
USAGE: Any = {"include_usage": True}


class Mood(BaseModel):
    """Few values, so that the smallest model gets to the end of one."""

    colour: Literal["red", "blue"]
    loud: bool


def chat_text(chunks: Iterable[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def check_chat_chunks(chunks: list[Any], model: str) -> None:
    """One id, time and model; a role first, a finish last, usage after it."""
    assert {chunk.model for chunk in chunks} == {model}
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert {choice.index for choice in choices} == {0}
    assert choices[0].delta.role == "assistant"
    assert choices[0].delta.content is None
    assert {choice.delta.role for choice in choices[1:]} == {None}
    assert {choice.finish_reason for choice in choices[:-1]} == {None}
    assert choices[-1].finish_reason is not None
    assert choices[-1].delta.content is None
    assert (chunks[-1].choices, {chunk.usage for chunk in chunks[:-1]}) == ([], {None})


def check_response_events(events: list[Any]) -> None:
    """Numbered from 0, opened and closed in order, deltas joined are what is said to be done."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type.removeprefix("response.") for event in events]
    assert types[:2] == ["created", "in_progress"]
    assert types[-1] in ("completed", "incomplete")
    deltas: dict[str, str] = {}
    items: list[Any] = []
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        match kind:
            case "output_item.added":
                assert event.output_index == len(items)
                items.append(event.item)
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event.item_id == items[event.output_index].id
                deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == deltas.get(event.item_id, "")
            case "function_call_arguments.done":
                assert event.arguments == deltas.get(event.item_id, "")
            case "output_item.done":
                items[event.output_index] = event.item
    assert items == events[-1].response.output


def test_a_chat_is_the_same_whole_in_chunks_through_the_helper_and_asynchronously(
    real_server: ServerProcess, first_model: str
) -> None:
    with openai_client(real_server) as client:
        whole = client.chat.completions.create(**CHAT)
        chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=USAGE))
        with client.chat.completions.stream(**CHAT, stream_options=USAGE) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_completion()

    async def use_it_later() -> tuple[Any, ...]:
        async with async_openai_client(real_server) as later:
            again = await later.chat.completions.create(**CHAT)
            raw = await later.chat.completions.create(**CHAT, stream=True, stream_options=USAGE)
            read = [chunk async for chunk in raw]
            async with later.chat.completions.stream(**CHAT, stream_options=USAGE) as waited:
                await waited.until_done()
                return again, read, await waited.get_final_completion()

    again, read, awaited = asyncio.run(use_it_later())
    text = whole.choices[0].message.content
    assert text
    for chat in (final, again, awaited):
        assert chat.choices[0].message.content == text
        assert chat.choices[0].finish_reason == whole.choices[0].finish_reason
        assert (chat.usage, chat.model) == (whole.usage, NAMES[first_model])
    for each in (chunks, read):
        check_chat_chunks(each, NAMES[first_model])
        assert chat_text(each) == text
        assert each[-1].usage == whole.usage
        assert each[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert types.count("content.done") == 1
    assert "content.delta" in types


def text_of_completion(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_a_completion_is_the_same_whole_in_chunks_and_asynchronously(
    real_server: ServerProcess, first_model: str
) -> None:
    with openai_client(real_server) as client:
        whole = client.completions.create(**COMPLETION)
    # OpenAI streams a null finish_reason until the end, which its client's type does not know.
    with openai_client(real_server, strict=False) as client:
        chunks = list(client.completions.create(**COMPLETION, stream=True, stream_options=USAGE))

    async def use_it_later() -> tuple[Any, ...]:
        async with async_openai_client(real_server, strict=False) as later:
            raw = await later.completions.create(**COMPLETION, stream=True)
            return await later.completions.create(**COMPLETION), [chunk async for chunk in raw]

    again, read = asyncio.run(use_it_later())
    text = whole.choices[0].text
    assert text
    assert again.choices[0].text == text
    for each in (chunks[:-1], read):
        assert text_of_completion(each) == text
        assert [chunk.choices[0].finish_reason for chunk in each][-1] == "length"
        assert {chunk.model for chunk in each} == {NAMES[first_model]}
        assert len({chunk.id for chunk in each}) == 1
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert read[-1].usage is None


def test_a_response_is_the_same_whole_in_events_through_the_helper_and_asynchronously(
    real_server: ServerProcess, first_model: str
) -> None:
    with openai_client(real_server) as client:
        whole = client.responses.create(**RESPONSE)
        events = list(client.responses.create(**RESPONSE, stream=True))
        with client.responses.stream(**RESPONSE) as stream:
            helped = list(stream)
            final = stream.get_final_response()
        kept = client.responses.retrieve(whole.id)

    async def use_it_later() -> tuple[Any, ...]:
        async with async_openai_client(real_server) as later:
            again = await later.responses.create(**RESPONSE)
            raw = await later.responses.create(**RESPONSE, stream=True)
            read = [event async for event in raw]
            async with later.responses.stream(**RESPONSE) as waited:
                return again, read, await waited.get_final_response()

    again, read, awaited = asyncio.run(use_it_later())
    assert whole.output_text
    assert kept == whole
    for each in (events, read):
        check_response_events(each)
        assert each[-1].response.output_text == whole.output_text
        assert each[-1].response.usage == whole.usage
    assert [event.type for event in helped] == [event.type for event in events]
    for response in (final, again, awaited):
        assert response.output_text == whole.output_text
        assert (response.usage, response.status) == (whole.usage, whole.status)
        assert response.model == NAMES[first_model]
    assert [item.type for item in whole.output] == ["message"]


def test_a_limit_makes_a_response_incomplete_in_every_way_of_reading_it(
    real_server: ServerProcess,
) -> None:
    asked = {**RESPONSE, "input": COUNT, "max_output_tokens": 3, "extra_body": {}}
    with openai_client(real_server) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        with client.responses.stream(**asked) as stream:
            final: Any = list(stream)[-1]
    check_response_events(events)
    assert events[-1].type == final.type == "response.incomplete"
    for response in (whole, events[-1].response, final.response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 3
        assert response.output[-1].status == "incomplete"


def test_answers_are_parsed_into_models_on_chats_and_responses(
    real_server: ServerProcess,
) -> None:
    chat = {**CHAT, "response_format": Mood, "max_tokens": 60}
    response = {**RESPONSE, "text_format": Mood, "max_output_tokens": 60}
    with openai_client(real_server) as client:
        parsed = client.chat.completions.parse(**chat).choices[0].message.parsed
        with client.chat.completions.stream(**chat) as stream:
            streamed = stream.get_final_completion().choices[0].message.parsed
        answered = client.responses.parse(**response).output_parsed
        with client.responses.stream(**response) as events:
            evented = events.get_final_response().output_parsed

    async def use_it_later() -> tuple[Any, ...]:
        async with async_openai_client(real_server) as later:
            waited = (await later.chat.completions.parse(**chat)).choices[0].message.parsed
            return waited, (await later.responses.parse(**response)).output_parsed

    waited, awaited = asyncio.run(use_it_later())
    assert parsed == streamed == waited
    assert answered == evented == awaited
    assert isinstance(parsed, Mood)
    assert isinstance(answered, Mood)


def test_an_answer_that_a_limit_cut_is_not_parsed(real_server: ServerProcess) -> None:
    with openai_client(real_server) as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**CHAT, "max_tokens": 3}, response_format=Mood)


def test_forced_odd_characters_are_the_same_bytes_whole_and_streamed(
    real_server: ServerProcess,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SAY_IT}}
    chat = {**CHAT, "response_format": form, "max_tokens": 250}
    text_format = {"type": "json_schema", "name": "x", "schema": SAY_IT}
    response = {**RESPONSE, "text": {"format": text_format}, "max_output_tokens": 250}
    with openai_client(real_server) as client:
        said = client.chat.completions.create(**chat).choices[0].message.content
        chats = [said, chat_text(client.chat.completions.create(**chat, stream=True))]
        events = list(client.responses.create(**response, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        responses = [client.responses.create(**response).output_text, "".join(deltas)]
    check_response_events(events)
    for whole, streamed in (chats, responses):
        assert json.loads(whole or "") == {"said": ODD_TEXT}
        assert streamed == whole


@pytest.mark.parametrize("first_model", [SMOLLM2], indirect=True)
def test_forced_odd_characters_are_the_same_bytes_whole_and_streamed_in_completions(
    real_server: ServerProcess,
) -> None:
    asked = {**COMPLETION, "max_tokens": 250, "extra_body": {"guided_json": SAY_IT}}
    with openai_client(real_server) as client:
        whole = client.completions.create(**asked).choices[0].text
    with openai_client(real_server, strict=False) as client:
        streamed = text_of_completion(client.completions.create(**asked, stream=True))
    assert json.loads(whole) == {"said": ODD_TEXT}
    assert streamed == whole


@pytest.mark.parametrize("first_model", [SMOLLM2], indirect=True)
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_reader_that_takes_every_unicode_line_end_for_one_still_reads_a_stream(
    real_server: ServerProcess, route: str
) -> None:
    if route == "chat":
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SAY_IT}}
        path, body = "/chat/completions", {"messages": COLOURS, "response_format": form}
    else:
        form = {"type": "json_schema", "name": "x", "schema": SAY_IT}
        path, body = "/responses", {"input": COLOURS, "text": {"format": form}}
    with openai_client(real_server) as client:
        raw: Any = client.post(path, cast_to=str, body={**body, "stream": True, "temperature": 0})
    said = ""
    for line in raw.splitlines():
        name, _, value = line.partition(": ")
        assert name in ("", "data", "event"), line
        if name == "data" and value != "[DONE]":
            event = json.loads(value)
            if route == "chat":
                said += event["choices"][0]["delta"].get("content") or ""
            elif event["type"] == "response.output_text.delta":
                said += event["delta"]
    assert json.loads(said) == {"said": ODD_TEXT}


def test_the_client_lists_the_models_and_counts_a_responses_tokens(
    real_server: ServerProcess, first_model: str
) -> None:
    first = NAMES[first_model]
    with openai_client(real_server) as client:
        listed = [model.id for model in client.models.list()]
        assert client.models.retrieve(first).id == first
        counted = client.responses.input_tokens.count(
            model=first,
            input=RESPONSE["input"],
            instructions="Be brief.",
            reasoning={"effort": "none"},
        )
        answered = client.responses.create(**RESPONSE, instructions="Be brief.")
    assert listed == [first, *(name for name in NAMES.values() if name != first)]
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_a_busy_first_model_is_answered_for_by_the_second_on_every_route(
    real_server: ServerProcess, first_model: str, api: str
) -> None:
    endless: Any = {**CHAT, "stop": None, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    with openai_client(real_server) as client:
        held = [client.chat.completions.create(**endless, stream=True) for _ in range(2)]
        for stream in held:
            assert next(iter(stream)).model == NAMES[first_model]
        models = {
            "chat": lambda: client.chat.completions.create(**{**CHAT, "max_tokens": 2}).model,
            "completions": lambda: client.completions.create(**{**COMPLETION, "max_tokens": 2}),
            "responses": lambda: client.responses.create(**{**RESPONSE, "max_output_tokens": 2}),
        }
        answer: Any = models[api]()
        for stream in held:
            stream.close()
    model = answer if isinstance(answer, str) else answer.model
    assert model in set(NAMES.values()) - {NAMES[first_model]}
