"""What a signal does to each kind of client: real processes, real signals, scripted engines."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.http_client import PATIENCE, Answer, connect, request
from tests.support.running import (
    CHAT,
    DIGITS,
    ENDLESS,
    ENDLESS_DIGITS,
    LONG_WINDED,
    ServerProcess,
    poll_status,
    scripted_process,
    sse_events,
    streamed_text,
)
from tests.support.scripted import FileGate

WHOLE = "0123456789" * 30
BIG = {**ENDLESS_DIGITS, "slots": 4}
CUT_GRACE = "dflash_trio.routing.drain.CUT_GRACE"
NEVER = 3600.0
"""Seconds that no test waits: ``PATIENCE`` is over long before."""


@pytest.fixture
def gate(tmp_path: Path) -> FileGate:
    """In the middle of the answer."""
    return FileGate(tmp_path / "gate", position=100)


@pytest.fixture
def prefill_gate(tmp_path: Path) -> FileGate:
    """In the middle of a long prompt."""
    return FileGate(tmp_path / "gate", position=1000)


async def decoding(server: ServerProcess, count: int = 1) -> None:
    await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == count)


def refused(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stream", [True, False])
async def test_draining_finishes_an_active_answer_to_its_last_byte_and_exits_0(
    number: int, stream: bool, gate: FileGate
) -> None:
    answers: list[Answer] = []
    with scripted_process({"answer": WHOLE, **gate.fields}) as server:
        await server.until_ready()

        async def ask() -> None:
            answers.append(await server.chat("x", stream=stream))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await decoding(server)
            server.signal(number)
            await until(lambda: refused(server.port))
            gate.open()
            assert await server.exit_code() == 0
    assert answers[0].complete
    if stream:
        assert sse_events(answers[0].text)[-1] == "[DONE]"
        assert streamed_text(answers[0].text) == WHOLE
    else:
        assert answers[0].json()["choices"][0]["message"]["content"] == WHOLE
    assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
async def test_finalizing_ends_an_active_answer_now_and_properly(stream: bool) -> None:
    answers: list[Answer] = []
    with scripted_process(BIG) as server:
        await server.until_ready()

        async def ask() -> None:
            answers.append(
                await server.chat("x", stream=stream, stream_options={"include_usage": True})
            )

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await decoding(server, 4)
            server.signal()
            assert await server.exit_code() == 0
    for answer in answers:
        assert answer.complete
        if stream:
            *_, finish, usage, done = sse_events(answer.text)
            assert done == "[DONE]"
            assert finish["choices"][0]["finish_reason"] == "length"
            counts, text = usage["usage"], streamed_text(answer.text)
        else:
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "length"
            counts, text = answer.json()["usage"], choice["message"]["content"]
        assert counts["completion_tokens_details"]["ended_by"] == "server_shutdown"
        assert DIGITS.startswith(text)
        assert counts["completion_tokens"] == len(text) > 0
    assert "server_shutdown" in server.log


async def test_a_prefill_without_headers_gets_503_where_the_policy_is_to_finalize(
    prefill_gate: FileGate,
) -> None:
    answers: list[Answer] = []
    with scripted_process({"slots": 4, "answer": WHOLE, **prefill_gate.fields}) as server:
        await server.until_ready()

        async def ask() -> None:
            answers.append(await server.chat("x" * 1500, stream=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.until(lambda s: s["models"][0]["in_flight"]["prefill"] == 1)
            server.signal()
            await until(lambda: refused(server.port))
            prefill_gate.open()
            assert await server.exit_code() == 0
    assert answers[0].status == 503
    assert answers[0].error["code"] == "server_shutting_down"


async def test_a_prefill_runs_on_to_a_whole_answer_where_the_policy_is_to_drain(
    prefill_gate: FileGate,
) -> None:
    answers: list[Answer] = []
    with scripted_process({"answer": "whole", **prefill_gate.fields}) as server:
        await server.until_ready()

        async def ask() -> None:
            answers.append(await server.chat("x" * 1500, stream=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.until(lambda s: s["models"][0]["in_flight"]["prefill"] == 1)
            server.signal()
            await until(lambda: refused(server.port))
            prefill_gate.open()
            assert await server.exit_code() == 0
    assert streamed_text(answers[0].text) == "whole"


async def test_waiters_get_503_and_idle_connections_close_while_the_active_one_goes_on(
    gate: FileGate,
) -> None:
    answers: dict[str, Answer] = {}
    with scripted_process({"answer": WHOLE, **gate.fields}) as server:
        await server.until_ready()

        async def ask(name: str) -> None:
            answers[name] = await server.chat("x", stream=True)

        async with trio.open_nursery() as nursery, connect(server.port) as idle:
            assert (await idle.request("GET", "/health")).status == 200
            async with connect(server.port) as silent:
                nursery.start_soon(ask, "active")
                await decoding(server)
                nursery.start_soon(ask, "waiting")
                await server.until(lambda s: s["routing"]["waiting"] == 1)
                server.signal()
                with trio.fail_after(PATIENCE):
                    assert await idle.stream.receive_some() == b""
                    assert await silent.stream.receive_some() == b""
                assert refused(server.port)
                assert server.process.poll() is None
            gate.open()
            assert await server.exit_code() == 0
    assert answers["waiting"].status == 503
    assert answers["waiting"].headers["connection"] == "close"
    assert "retry-after" in answers["waiting"].headers
    assert streamed_text(answers["active"].text) == WHOLE


async def test_a_half_sent_body_delays_nothing() -> None:
    with scripted_process({}, client_stall_timeout=NEVER) as server:
        await server.until_ready()
        async with connect(server.port) as half:
            await half.stream.send_all(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{{".encode()
            )
            # Its connection is known to be served once a later one is.
            assert (await request(server.port, "GET", "/health")).status == 200
            server.signal()
            assert await server.exit_code() == 0
            data = await half.stream.receive_some()
            assert data.startswith((b"HTTP/1.1 503", b""))


async def test_a_client_that_leaves_while_draining_still_cancels() -> None:
    with scripted_process(ENDLESS) as server:
        await server.until_ready()
        async with server.streaming("x"):
            server.signal()
            await until(lambda: refused(server.port))
        assert await server.exit_code() == 0


async def test_a_second_signal_finalizes_everything_at_once() -> None:
    with scripted_process(ENDLESS, bounds={CUT_GRACE: NEVER}) as server:
        await server.until_ready()
        async with server.streaming("x") as exchange:
            server.signal()
            await wait_for_log(server, "shutting down")
            server.signal()
            answer = await exchange.read_rest()
        assert await server.exit_code() == 0
    assert answer.complete
    assert sse_events(answer.text)[-1] == "[DONE]"
    assert sse_events(answer.text)[-2]["choices"][0]["finish_reason"] == "length"


async def wait_for_log(server: ServerProcess, words: str) -> None:
    await until(lambda: words in server.log)


async def until(what: Callable[[], bool]) -> None:
    """Wait for something about another process, where nobody can set an event."""
    with trio.fail_after(PATIENCE):
        while not what():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_third_signal_exits_130_at_once() -> None:
    # The time after the second signal has no end, and a client that reads nothing keeps it open.
    with scripted_process({}, bounds={CUT_GRACE: NEVER}, client_stall_timeout=NEVER) as server:
        await server.until_ready()
        async with server.streaming("x", receive_buffer=4096, **LONG_WINDED):
            await server.until(lambda s: s["models"][0]["in_flight"]["draining"] == 1)
            server.signal()
            await wait_for_log(server, "shutting down")
            server.signal()
            await wait_for_log(server, "ending 1 requests now")
            server.signal()
            assert await server.exit_code() == 130


async def test_the_drain_timeout_finalizes_what_still_runs() -> None:
    with scripted_process(ENDLESS, bounds={CUT_GRACE: NEVER}, drain_timeout=0.3) as server:
        await server.until_ready()
        async with server.streaming("x") as exchange:
            server.signal()
            answer = await exchange.read_rest()
        assert await server.exit_code() == 0
    assert answer.complete
    assert sse_events(answer.text)[-1] == "[DONE]"


async def test_a_reader_that_takes_nothing_cannot_outlive_the_second_signal() -> None:
    with scripted_process({}, client_stall_timeout=NEVER) as server:
        await server.until_ready()
        async with server.streaming("x", receive_buffer=4096, **LONG_WINDED):
            await server.until(lambda s: s["models"][0]["in_flight"]["draining"] == 1)
            server.signal()
            await wait_for_log(server, "shutting down")
            assert server.process.poll() is None
            server.signal()
            assert await server.exit_code() == 0


async def test_a_signal_while_loading_stops_the_loading_and_exits_0(prefill_gate: FileGate) -> None:
    with scripted_process(prefill_gate.load_fields) as server:
        assert (await request(server.port, "GET", "/health")).json() == {"status": "loading"}
        server.signal()
        await until(lambda: refused(server.port))
        prefill_gate.open()
        assert await server.exit_code() == 0
        assert "Traceback" not in server.log


async def test_a_unix_socket_file_is_gone_after_the_end_and_can_be_bound_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        with scripted_unix(path) as server:
            with trio.fail_after(PATIENCE):
                while b'"ok"' not in await unix_request(path):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            server.signal()
            assert await server.exit_code() == 0
        assert not path.exists()


def scripted_unix(path: Path) -> Any:
    return scripted_process({}, host=f"unix:{path}")


async def unix_request(path: Path) -> bytes:
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        while part := await stream.receive_some():
            data += part
        return data


async def test_restarting_on_the_same_port_works_at_once_whatever_went_before() -> None:
    port = 0
    for number in range(6):
        with scripted_process(ENDLESS, port=port) as server:
            port = server.port
            await server.until_ready()
            async with server.chatting("x", stream=True):
                if number % 2:
                    await poll_status(port, lambda s: s["models"][0]["slots"]["reserved"] == 1)
                server.signal()
                if number % 3 == 0:
                    server.signal(signal.SIGINT)
            assert await server.exit_code() == 0
            assert "Traceback" not in server.log
