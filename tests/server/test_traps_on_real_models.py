"""What servers like this one are reported to get wrong, asked of two real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.http_client import request
from tests.support.models import GEMMA, SMOLLM2
from tests.support.running import CHAT, ServerProcess, chat_body, server_process, sse_events

pytestmark = pytest.mark.real

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ROOM, BATCH = 256, 64
ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π \u2028\u2029\x85 a\r\nb"
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def server(models: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    arguments = [str(models[request.param]), "--model-name=m", "--port=0", "--threads=1"]
    arguments += [f"--max-ctx={ROOM}", f"--chunk={BATCH}", "--max-concurrency=2"]
    arguments += ["--prefix-cache-slots=0"]
    with server_process(arguments) as process:
        trio.run(process.until_ready)
        yield process


async def post(server: ServerProcess, path: str, **body: Any) -> Any:
    answer = await request(server.port, "POST", path, body)
    assert answer.status == 200, answer.text
    return sse_events(answer.text) if body.get("stream") else answer.json()


def only(text: str) -> dict[str, Any]:
    """A schema that makes any model say this text."""
    return {
        "type": "object",
        "properties": {"x": {"const": text}},
        "required": ["x"],
        "additionalProperties": False,
    }


def joined(events: list[Any]) -> str:
    """The text that any API's stream adds up to."""
    text = ""
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
        if event.get("type") == "content_block_delta":
            text += event["delta"].get("text", "")
        if event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return text


def forced_chat(text: str, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": only(text)}}
    return chat_body("x", response_format=form, max_tokens=150, temperature=0, **fields)


async def test_odd_characters_arrive_whole_and_streamed_alike_on_every_api(
    server: ServerProcess,
) -> None:
    form = {"type": "json_schema", "name": "n", "schema": only(ODD_TEXT)}
    messages = chat_body("x", max_tokens=150, temperature=0, output_config={"format": form})
    responses: dict[str, Any] = {"input": "x", "max_output_tokens": 150, "temperature": 0}
    responses["text"] = {"format": form}
    chat = forced_chat(ODD_TEXT)
    whole = (await post(server, CHAT, **chat))["choices"][0]["message"]["content"]
    assert json.loads(whole) == {"x": ODD_TEXT}
    assert joined(await post(server, CHAT, **chat, stream=True)) == whole
    block = (await post(server, MESSAGES, **messages))["content"][0]["text"]
    assert json.loads(block) == {"x": ODD_TEXT}
    assert joined(await post(server, MESSAGES, **messages, stream=True)) == block
    output = (await post(server, RESPONSES, **responses))["output"][-1]["content"][0]["text"]
    assert json.loads(output) == {"x": ODD_TEXT}
    assert joined(await post(server, RESPONSES, **responses, stream=True)) == output


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("alphaSTOPPEDbeta", '{"x": "alpha'),
        ("alphaSTOPPERbeta", '{"x": "alphaSTOPPERbeta"}'),
        ("alphaSTOP", '{"x": "alphaSTOP"}'),
    ],
)
async def test_nothing_of_a_stop_string_is_sent_and_all_of_what_only_began_like_one(
    server: ServerProcess, said: str, expected: str
) -> None:
    body = forced_chat(said, stop=["STOPPED"])
    (choice,) = (await post(server, CHAT, **body))["choices"]
    assert choice["message"]["content"] == expected
    assert choice["finish_reason"] == "stop"
    assert joined(await post(server, CHAT, **body, stream=True)) == expected


async def test_a_stop_sequence_is_named_and_cut_off_whole_and_streamed(
    server: ServerProcess,
) -> None:
    body = chat_body("Tell me a story.", max_tokens=30, temperature=0)
    text = (await post(server, MESSAGES, **body))["content"][0]["text"]
    stop = text[8:14]
    body["stop_sequences"] = [stop]
    answer = await post(server, MESSAGES, **body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]
    events = await post(server, MESSAGES, **body, stream=True)
    assert joined(events) == answer["content"][0]["text"]
    (delta,) = [e["delta"] for e in events if e["type"] == "message_delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", stop)


async def test_a_call_that_is_demanded_is_made_on_every_api(server: ServerProcess) -> None:
    function = {"name": "f", "description": "Does it.", "parameters": ARGUMENTS}
    chat = chat_body("Hello!", max_tokens=120, temperature=0)
    tool: dict[str, Any] = {"type": "function", "function": function}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        answer = await post(server, CHAT, **chat, tools=[tool], tool_choice=choice)
        calls = answer["choices"][0]["message"]["tool_calls"]
        assert calls[0]["function"]["name"] == "f"
        if answer["choices"][0]["finish_reason"] == "tool_calls":
            assert isinstance(json.loads(calls[0]["function"]["arguments"])["a"], int)
    given = {"name": "f", "input_schema": ARGUMENTS}
    for kind in ({"type": "any"}, {"type": "tool", "name": "f"}):
        answer = await post(server, MESSAGES, **chat, tools=[given], tool_choice=kind)
        assert [block["name"] for block in answer["content"]][:1] == ["f"]
    body = {"input": "Hello!", "max_output_tokens": 120, "temperature": 0}
    answer = await post(
        server, RESPONSES, **body, tools=[{"type": "function", **function}], tool_choice="required"
    )
    assert [item["name"] for item in answer["output"]][:1] == ["f"]


async def test_a_call_and_its_result_are_seen_by_a_template_that_knows_no_tools(
    server: ServerProcess,
) -> None:
    async def count(*turns: dict[str, Any]) -> int:
        answer = await post(server, CHAT, messages=turns, max_tokens=1)
        return int(answer["usage"]["prompt_tokens"])

    question = {"role": "user", "content": "What is it?"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    alone = await count(question)
    counts = {
        await count(question, {"role": "assistant", "tool_calls": [call], **content}, result)
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
    }
    assert len(counts) == 1
    assert counts.pop() > alone + 5


async def test_developer_and_system_texts_cost_the_same_wherever_they_come_from(
    server: ServerProcess,
) -> None:
    user = {"role": "user", "content": "hi"}

    async def count(*turns: dict[str, Any]) -> int:
        answer = await post(server, CHAT, messages=[*turns, user], max_tokens=1)
        return int(answer["usage"]["prompt_tokens"])

    system = await count({"role": "system", "content": "A.\nB."})
    assert await count({"role": "developer", "content": "A.\nB."}) == system
    parts = [{"role": "developer", "content": "A."}, {"role": "system", "content": "B."}]
    several = await count(*parts)
    answer = await post(
        server, RESPONSES, instructions="A.", input=[parts[1], user], max_output_tokens=1
    )
    assert answer["usage"]["input_tokens"] == several


async def test_a_seed_repeats_its_answer_and_none_does_not(server: ServerProcess) -> None:
    async def say(**fields: Any) -> str:
        body = chat_body("Say something odd.", max_tokens=16, temperature=1, **fields)
        return str((await post(server, CHAT, **body))["choices"][0]["message"]["content"])

    seeded = await say(seed=7)
    assert await say(seed=7) == seeded
    assert await say(seed=8) != seeded
    assert len({await say() for _ in range(3)}) > 1


async def test_a_prompt_fits_if_one_token_is_left_and_no_other_does_on_every_api(
    server: ServerProcess,
) -> None:
    async def sized(tokens: int) -> str:
        """A text whose prompt has exactly so many tokens."""
        counted = await post(server, f"{MESSAGES}/count_tokens", **chat_body("a" + " a" * 99))
        return "a" + " a" * (99 + tokens - int(counted["input_tokens"]))

    fits, full = await sized(ROOM - 1), await sized(ROOM)
    for text, status in ((fits, 200), (full, 400)):
        counted = await post(server, f"{MESSAGES}/count_tokens", **chat_body(text))
        assert counted["input_tokens"] == (ROOM - 1 if status == 200 else ROOM)
        body = chat_body(text, ignore_eos=True)
        chat = await request(server.port, "POST", CHAT, body)
        unbounded = await request(server.port, "POST", CHAT, {**body, "max_tokens": 10**12})
        messages = await request(server.port, "POST", MESSAGES, {**body, "max_tokens": 100})
        responses = await request(server.port, "POST", RESPONSES, {"input": text})
        answers = (chat, unbounded, messages, responses)
        assert [answer.status for answer in answers] == [status] * 4
        if status == 200:
            assert chat.json()["choices"][0]["finish_reason"] == "length"
            assert chat.json()["usage"]["total_tokens"] == ROOM
        else:
            for answer in answers:
                assert f"{ROOM}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_a_prompt_around_the_size_of_a_batch_is_answered(
    server: ServerProcess, more: int
) -> None:
    counted = await post(server, f"{MESSAGES}/count_tokens", **chat_body("a" + " a" * 10))
    for batches, stream in ((1, False), (2, True)):
        tokens = batches * BATCH + more
        text = "a" + " a" * (10 + tokens - int(counted["input_tokens"]))
        body = chat_body(text, max_tokens=2, ignore_eos=True)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await post(server, CHAT, **body)
        usage = answer[-2]["usage"] if stream else answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 2)


async def test_afterwards_nothing_is_held_and_nothing_was_logged_as_an_error(
    server: ServerProcess,
) -> None:
    await server.until_idle()
    assert (await server.chat("hi", max_tokens=2)).status == 200
    assert "Traceback" not in server.log
    assert " ERROR " not in server.log
