"""POST /v1/messages as Anthropic's own client sees it, checking strictly what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anthropic
import pytest
import trio

from dflash_trio.engine.scripted_runner import EOG, Script
from tests.support.running import running
from tests.support.scripted import (
    PLAIN_TEMPLATE,
    BreaksDown,
    Gate,
    answer,
    scripted_config,
    scripted_load,
)

T = TypeVar("T")

ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"q": {}}}}
# Its comment is all that makes it a template of a model that thinks and calls tools.
TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(">", "SAY:") + "{# <think> </think> <tool_call> #}"


def saying(text: str) -> Script:
    """As ``answer``, for texts with brackets in them."""

    def script(history: bytes, _: int) -> int | None:
        said = history.rpartition(b"SAY:")[2]
        wanted = text.encode()
        return wanted[len(said)] if len(said) < len(wanted) else EOG

    return script


async def with_sdk(port: int, use: Callable[[anthropic.Anthropic], T], key: str = "none") -> T:
    """Run something with the official client on a thread, which checks what it is told."""

    def work() -> T:
        with anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{port}",
            api_key=key,
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        ) as client:
            return use(client)

    return await trio.to_thread.run_sync(work)


async def test_the_official_client_reads_an_answer_whole_and_streamed_alike() -> None:
    def use(client: anthropic.Anthropic) -> tuple[Any, list[str], Any]:
        whole = client.messages.create(model="claude-x", max_tokens=100, messages=HI)
        with client.messages.stream(model="claude-x", max_tokens=100, messages=HI) as stream:
            pieces = list(stream.text_stream)
            return whole, pieces, stream.get_final_message()

    async with running((scripted_config("m"), scripted_load(script=answer(ODD_TEXT)))) as server:
        whole, pieces, final = await with_sdk(server.port, use)
    (block,) = whole.content
    assert (block.type, block.text) == ("text", ODD_TEXT)
    assert "".join(pieces) == ODD_TEXT == final.content[0].text
    for message in (whole, final):
        assert (message.model, message.role, message.type) == ("m", "assistant", "message")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.id.startswith("msg_")
    assert final.usage.input_tokens == whole.usage.input_tokens == len("Bhi\n>")
    assert final.usage.output_tokens == whole.usage.output_tokens == len(ODD_TEXT.encode()) + 1
    assert (whole.usage.cache_creation_input_tokens, whole.usage.cache_read_input_tokens) == (0, 0)


async def test_the_official_asynchronous_client_streams_too() -> None:
    async with (
        running((scripted_config("m"), scripted_load(script=answer("abc")))) as server,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{server.port}",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        ) as client,
    ):
        whole = await client.messages.create(model="m", max_tokens=100, messages=HI)
        raw = await client.messages.create(model="m", max_tokens=100, messages=HI, stream=True)
        types = [event.type async for event in raw]
        async with client.messages.stream(model="m", max_tokens=100, messages=HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        counted = await client.messages.count_tokens(model="m", messages=HI)
    assert types[0] == "message_start"
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert whole.content[0].text == text == "abc"
    assert counted.input_tokens == whole.usage.input_tokens


async def test_the_official_client_reads_thinking_and_calls_and_sends_them_back() -> None:
    said = (
        "<think>\nHm, é.\n</think>\n\nLet me see."
        '<tool_call>\n{"name": "f", "arguments": {"q": "歪"}}\n</tool_call>'
    )

    def use(client: anthropic.Anthropic) -> tuple[Any, Any, Any]:
        asked: Any = {"model": "m", "max_tokens": 1500, "messages": HI, "tools": [TOOL]}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        asked["messages"] = [
            *HI,
            {"role": "assistant", "content": final.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "42"}
                ],
            },
        ]
        return (
            whole,
            final,
            client.messages.count_tokens(model="m", messages=asked["messages"], tools=[TOOL]),
        )

    load = scripted_load(script=saying(said), template=TOOL_TEMPLATE)
    async with running((scripted_config("m"), load)) as server:
        whole, final, counted = await with_sdk(server.port, use)
    for message in (whole, final):
        thinking, text, call = message.content
        assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm, é.")
        assert thinking.signature
        assert text.text.strip() == "Let me see."
        assert (call.type, call.name, call.input) == ("tool_use", "f", {"q": "歪"})
        assert call.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details.thinking_tokens > 0
    assert counted.input_tokens > whole.usage.input_tokens


async def test_each_refusal_is_the_error_class_that_clients_catch() -> None:
    def caught(port: int, key: str = "none", **fields: Any) -> Any:
        def use(client: anthropic.Anthropic) -> anthropic.APIStatusError:
            with pytest.raises(anthropic.APIStatusError) as error:
                client.messages.create(
                    **{"model": "m", "max_tokens": 5, "messages": HI, **fields}  # type: ignore[call-overload]
                )
            return error.value

        return with_sdk(port, use, key)

    load = scripted_load(script=answer("1"))
    keyed = {"api_keys": (b"k",), "max_body_bytes": 10_000, "routing_queue_limit": 0}
    async with running((scripted_config("m"), load), **keyed) as server:
        wrong_key = await caught(server.port)
        wrong_field = await caught(server.port, "k", max_tokens=0)
        too_large = await caught(server.port, "k", system="x" * 10_001)
    assert isinstance(wrong_key, anthropic.AuthenticationError)
    assert wrong_key.type == "authentication_error"
    assert isinstance(wrong_field, anthropic.BadRequestError)
    assert wrong_field.type == "invalid_request_error"
    assert "max_tokens" in str(wrong_field.api_message)
    assert (too_large.status_code, too_large.type) == (413, "request_too_large")
    for error in (wrong_key, wrong_field, too_large):
        assert error.request_id

    gate = Gate(open=False)
    load = scripted_load(script=answer("1"), before_decode=gate)
    async with (
        running((scripted_config("m"), load), routing_queue_limit=0) as server,
        server.chatting("x"),
    ):
        await trio.to_thread.run_sync(gate.reached.wait)
        for stream in (False, True):
            full = await caught(server.port, stream=stream)
            assert isinstance(full, anthropic.InternalServerError)
            assert (full.status_code, full.type) == (503, "overloaded_error")
            assert int(full.response.headers["retry-after"]) >= 1
        gate.open()

    load = scripted_load(before_decode=lambda _: 1 / 0)
    async with running((scripted_config("m"), load)) as server:
        failed = await caught(server.port)
    assert isinstance(failed, anthropic.InternalServerError)
    assert (failed.status_code, failed.type) == (500, "api_error")


async def test_counting_for_a_model_that_is_not_there_is_a_not_found_error() -> None:
    def use(client: anthropic.Anthropic) -> Any:
        with pytest.raises(anthropic.NotFoundError) as error:
            client.messages.count_tokens(model="claude-x", messages=HI)
        answered = client.messages.create(model="claude-x", max_tokens=5, messages=HI)
        return error.value, answered

    loads = [(scripted_config(name), scripted_load(script=answer("1"))) for name in ("a", "b")]
    async with running(*loads) as server:
        error, answered = await with_sdk(server.port, use)
    assert error.type == "not_found_error"
    # Counting wants a name of ours; answering takes whoever comes first.
    assert answered.model == "a"


async def test_a_failure_in_mid_stream_raises_in_the_official_client() -> None:
    breaks = BreaksDown()

    def use(client: anthropic.Anthropic) -> tuple[list[str], anthropic.APIStatusError]:
        seen: list[str] = []

        def read(stream: Any) -> None:
            for event in stream:
                seen.append(event.type)
                breaks.gate.open()

        asked: Any = {"model": "m", "max_tokens": 99, "messages": HI, "stream": True}
        with (
            client.messages.create(**asked) as stream,
            pytest.raises(anthropic.APIStatusError) as error,
        ):
            read(stream)
        return seen, error.value

    load = scripted_load(script=answer("abcdefghij"), before_decode=breaks)
    async with running((scripted_config("m"), load)) as server:
        seen, error = await with_sdk(server.port, use)
    assert seen[0] == "message_start"
    assert "message_stop" not in seen
    assert "message_delta" not in seen
    assert error.type == "api_error"
    assert "the device fell off" in str(error.api_message)
