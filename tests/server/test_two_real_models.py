"""Two real models behind one address, as a real process, through the official SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.support.http_client import Answer
from tests.support.running import (
    LONG_WINDED,
    ServerProcess,
    is_idle,
    server_process,
    sse_events,
    streamed_text,
)

pytestmark = pytest.mark.real

LONG = "Count from 1 to 500, one number a line."
MANY = 800
"""Tokens that take seconds, while a client that leaves is noticed in milliseconds."""


def two_models(smollm2: Path, gemma: Path, *more: str) -> list[str]:
    return [
        "--load-balancing",
        "--port=0",
        *more,
        *("--model", str(smollm2), "--model-name", "smollm2", "--target-device", "cpu:0"),
        *("--max-ctx", "2048", "--prefix-cache-slots", "0", "--threads=1"),
        *("--model", str(gemma), "--model-name", "gemma", "--target-device", "cpu:1"),
        *("--max-ctx", "1024", "--prefix-cache-slots", "0", "--threads=1"),
    ]


@pytest.fixture(scope="module")
def both(smollm2: Path, gemma: Path) -> Iterator[ServerProcess]:
    """One server for the whole module; whatever it went through, it ends properly."""
    arguments = two_models(smollm2, gemma, "--routing-queue-limit", "1")
    with server_process(arguments) as process:
        trio.run(process.until_ready)
        yield process
        process.signal()
        assert trio.run(process.exit_code) == 0
    assert "Traceback" not in process.log


@pytest.fixture
def server(both: ServerProcess) -> Iterator[ServerProcess]:
    """It is idle before and after each test."""
    yield both
    trio.run(both.until_idle)


def sdk(server: ServerProcess) -> openai.OpenAI:
    """The official client, strict about what it is sent. Blocking: use it on a thread."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    )


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_the_sdk_streams_and_the_joined_deltas_equal_the_whole_answer(
    server: ServerProcess,
) -> None:
    def use_sdk() -> None:
        with sdk(server) as client:
            arguments: dict[str, Any] = {
                "model": "anything",
                "messages": say("Name three colours."),
                "max_tokens": 40,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**arguments)
            with client.chat.completions.create(
                **arguments, stream=True, stream_options={"include_usage": True}
            ) as stream:
                chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert text
        assert {chunk.model for chunk in chunks} == {whole.model} == {"smollm2"}
        assert chunks[-1].usage == whole.usage
        assert whole.usage is not None
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
            whole.choices[0].finish_reason
        )

    await trio.to_thread.run_sync(use_sdk)


async def test_a_busy_primary_is_answered_for_by_the_next_model_which_says_so(
    server: ServerProcess,
) -> None:
    def use_sdk() -> None:
        with sdk(server) as client:
            response = client.chat.completions.with_raw_response.create(
                model="smollm2", messages=say("The sky is"), max_tokens=5, temperature=0
            )
            assert response.headers["x-dflash-model"] == "gemma"
            assert response.parse().model == "gemma"

    async with server.held_slot(LONG):
        await trio.to_thread.run_sync(use_sdk)
    await server.until(is_idle)


async def test_with_both_busy_one_waits_and_is_served_on_release_the_next_gets_503(
    server: ServerProcess,
) -> None:
    answers: list[Any] = []

    def wait_for_it() -> None:
        with sdk(server) as client:
            answers.append(
                client.chat.completions.create(model="auto", messages=say("Say hi."), max_tokens=5)
            )

    def be_refused() -> None:
        with sdk(server) as client, pytest.raises(openai.InternalServerError) as full:
            client.chat.completions.create(model="auto", messages=say("Me too."))
        assert full.value.status_code == 503
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"

    async with (
        trio.open_nursery() as nursery,
        server.held_slot(LONG),
        server.held_slot(LONG),
    ):
        nursery.start_soon(trio.to_thread.run_sync, wait_for_it)
        await server.until(lambda s: s["routing"]["waiting"] == 1)
        await trio.to_thread.run_sync(be_refused)
        assert not answers
    assert answers[0].choices[0].message.content is not None
    await server.until(is_idle)


async def test_a_prompt_too_long_for_both_is_a_400_that_names_both_rooms(
    server: ServerProcess,
) -> None:
    def use_sdk() -> None:
        with sdk(server) as client, pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="auto", messages=say("word " * 3000))
        assert error.value.code == "context_length_exceeded"
        for part in ("smollm2", "room 2048", "gemma", "room 1024"):
            assert part in error.value.message

    await trio.to_thread.run_sync(use_sdk)


async def leave(server: ServerProcess, moment: str) -> None:
    """Start a request and hang up at a moment of its life."""
    content = "word " * 1000 if moment == "in prefill" else LONG
    stream = moment == "after the first delta"
    async with server.chatting(
        content, max_tokens=MANY, ignore_eos=True, stream=stream
    ) as exchange:
        match moment:
            case "in the queue":
                await server.until(lambda s: s["routing"]["waiting"] == 1)
            case "in prefill":
                # It is in its prefill for a second; if nobody looked for so long, it is decoding.
                await server.until(
                    lambda s: (
                        s["models"][0]["in_flight"]["prefill"] == 1
                        or s["models"][0]["in_flight"]["decode"] == 1
                    )
                )
            case "after the first delta":
                await exchange.read_some()
            case "in a non-streaming decode":
                await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)


def tokens_made(status: dict[str, Any]) -> int:
    return sum(model["engine"]["completion_tokens"] for model in status["models"])


@pytest.mark.parametrize(
    "moment",
    ["in the queue", "in prefill", "after the first delta", "in a non-streaming decode"],
)
async def test_a_client_that_leaves_gives_its_slot_back_at_once_ten_times_in_a_row(
    server: ServerProcess, moment: str
) -> None:
    async with contextlib.AsyncExitStack() as held:
        queued = moment == "in the queue"
        for _ in range(2 if queued else 0):
            await held.enter_async_context(server.held_slot(LONG))
        for _ in range(10):
            before = tokens_made(await server.status())
            await leave(server, moment)
            after = await server.until(
                lambda s: s["routing"]["waiting"] == 0 if queued else is_idle(s)
            )
            # Nobody went on generating its many tokens for a client that was gone.
            if not queued:
                assert tokens_made(after) - before < MANY


async def test_sigterm_lets_a_single_slot_model_finish_its_answer_to_the_last_byte(
    smollm2: Path,
) -> None:
    arguments = [
        str(smollm2),
        "--model-name=m",
        "--port=0",
        "--max-ctx=2048",
        "--threads=1",
        "--prefix-cache-slots=0",
    ]
    arguments += ["--cache-type-k=q8_0", "--cache-type-v=q8_0", "--flash-attn=on"]
    fields: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with server_process(arguments) as server:
        await server.until_ready()
        golden = (await server.chat(LONG, **fields)).json()
        refused: list[Answer] = []

        async def wait_in_vain() -> None:
            refused.append(await server.chat("hi"))

        async with trio.open_nursery() as nursery:
            usage = {"include_usage": True}
            # It is not over before it is read.
            unread = {**fields, **LONG_WINDED, "stream_options": usage}
            async with server.streaming(LONG, receive_buffer=4096, **unread) as exchange:
                nursery.start_soon(wait_in_vain)
                await server.until(lambda s: s["routing"]["waiting"] == 1)
                server.signal()
                answer = await exchange.read_rest()
        assert await server.exit_code() == 0
    events = sse_events(answer.text)
    assert answer.complete
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 400
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert streamed_text(answer.text) == golden["choices"][0]["message"]["content"]
    assert refused[0].status == 503
    assert refused[0].headers["connection"] == "close"
    assert int(refused[0].headers["retry-after"]) >= 1


async def test_sigterm_ends_the_streams_of_a_batched_model_at_once_and_properly(
    smollm2: Path,
) -> None:
    arguments = [
        str(smollm2),
        "--model-name=m",
        "--port=0",
        "--max-ctx=2048",
        "--threads=1",
        "--prefix-cache-slots=0",
    ]
    with server_process([*arguments, "--max-concurrency=4"]) as server:
        await server.until_ready()
        ends: list[Answer] = []

        async def read_stream() -> None:
            usage = {"include_usage": True}
            async with server.chatting(
                LONG, max_tokens=1500, stream=True, ignore_eos=True, stream_options=usage
            ) as exchange:
                ends.append(await exchange.read_rest())

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read_stream)
            await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 4)
            server.signal()
        assert await server.exit_code() == 0
    for answer in ends:
        events = sse_events(answer.text)
        assert answer.complete
        assert events[-1] == "[DONE]"
        usage = events[-2]["usage"]
        assert usage["completion_tokens_details"]["ended_by"] == "server_shutdown"
        assert usage["completion_tokens"] < 1500
        assert events[-3]["choices"][0]["finish_reason"] == "length"
