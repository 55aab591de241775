"""``/status/stream``: what changes is told, no sooner and no later than promised, and nobody who
watches, or has stopped to, costs anybody anything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dflash_trio.api.status_stream import DRAINING, MAX_STREAMS, StatusStreams
from dflash_trio.routing.router import Router
from tests.support.http_client import PATIENCE, Exchange, connect, request
from tests.support.running import running, scripted_process
from tests.support.scripted import Gate, answer, scripted_config, scripted_load

STREAM = "/status/stream"


class Source:
    """A status that counts how often it is looked at. ``value`` is all there is to it."""

    def __init__(self) -> None:
        self.looks = 0
        self.value = 0

    def take(self) -> dict[str, Any]:
        self.looks += 1
        return {"value": self.value}


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def router() -> Router:
    return Router(queue_limit=0)


@pytest.fixture
def streams(source: Source, router: Router) -> StatusStreams:
    return StatusStreams(router, source.take, stall_timeout=60)


async def hear(stream: AsyncIterator[bytes], into: list[tuple[float, int]]) -> None:
    """Note when each event came, and what it said."""
    async for event in stream:
        name, data = event.decode().rstrip("\n").split("\n")
        assert name == "event: status"
        into.append((trio.current_time(), json.loads(data.removeprefix("data: "))["value"]))


# ------------------------------------------------------------------------- when, in virtual time


async def test_a_status_that_does_not_change_is_told_once_and_then_every_15_seconds(
    streams: StatusStreams, autojump_clock: trio.testing.MockClock
) -> None:
    events: list[tuple[float, int]] = []
    began = trio.current_time()
    with trio.move_on_after(61):
        await hear(streams.events(lambda: False), events)
    times = [at - began for at, _ in events]
    assert times[0] == 0
    gaps = [b - a for a, b in pairwise(times)]
    assert len(gaps) == 4
    assert all(14 < gap <= 15 for gap in gaps)


async def test_one_that_changes_all_the_time_is_told_four_times_a_second_and_lastly_as_it_is(
    streams: StatusStreams, source: Source, autojump_clock: trio.testing.MockClock
) -> None:
    events: list[tuple[float, int]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear, streams.events(lambda: False), events)
        for _ in range(1000):
            source.value += 1
            await trio.sleep(0.01)
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    times = [at for at, _ in events]
    assert 35 <= len(times) <= 42
    assert all(b - a >= 0.25 - 1e-9 for a, b in pairwise(times))
    assert events[-1][1] == 1000


async def test_many_listeners_share_their_looks_and_nobody_looks_when_they_have_left(
    streams: StatusStreams, source: Source, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(hear, streams.events(lambda: False), [])
            await trio.sleep(0.017)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert source.looks <= 43
    looks = source.looks
    await trio.sleep(3600)
    assert source.looks == looks


async def test_a_listener_that_takes_nothing_is_sent_nothing_more_and_loses_its_place(
    streams: StatusStreams, source: Source, autojump_clock: trio.testing.MockClock
) -> None:
    began = trio.current_time()
    with trio.fail_after(100):
        # It has left the third event untaken.
        async for _ in streams.events(lambda: source.value == 3):
            source.value += 1
    assert source.value == 3
    assert 60 <= trio.current_time() - began <= 62


async def test_a_drain_ends_a_stream_at_once_even_one_whose_client_takes_nothing(
    streams: StatusStreams, router: Router, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[float] = []

    async def listen(pending: bool) -> None:
        events = [event async for event in streams.events(lambda: pending)]
        assert [event == DRAINING for event in events] == [False] * (len(events) - 1) + [True]
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen, False)
        nursery.start_soon(listen, True)
        await trio.sleep(7.1)
        await router.drain()
        drained = trio.current_time()
    assert ended == [drained, drained]


# ------------------------------------------------------------------------------- over HTTP


async def next_event(exchange: Exchange) -> tuple[str, Any]:
    """The next event: its name and data. Each is one write, and read as one chunk."""
    text = (await exchange.read_some()).decode()
    name, data = text.removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def listen(exchange: Exchange, **headers: str) -> dict[str, Any]:
    """Open a stream; the status that it begins with."""
    await exchange.send("GET", STREAM, headers=headers)
    await exchange.read_headers()
    assert exchange.status == 200, await exchange.read_rest()
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert exchange.headers["cache-control"] == "no-cache"
    name, status = await next_event(exchange)
    assert name == "status"
    return dict(status)


def one_model(**fields: Any) -> tuple[Any, Any]:
    return scripted_config("m"), scripted_load(**{"script": answer("four"), **fields})


async def test_a_stream_begins_with_the_status_and_tells_what_becomes_of_it() -> None:
    gate = Gate(open=False)
    async with running(one_model(before_decode=gate)) as server, connect(server.port) as exchange:
        first = await listen(exchange)
        status = await server.status()
        assert {**first, "taken_at": 0} == {**status, "taken_at": 0}

        async def until(reserved: int) -> dict[str, Any]:
            while True:
                name, status = await next_event(exchange)
                assert name == "status"
                if status["models"][0]["slots"]["reserved"] == reserved:
                    return dict(status)

        async with server.chatting("x"):
            await until(1)
            gate.open()
            status = await until(0)
        while not status["recent_requests"]:
            _, status = await next_event(exchange)
        assert status["taken_at"] > first["taken_at"]


async def test_it_wants_a_key_where_there_are_keys() -> None:
    async with running(one_model(), api_keys=(b"k",)) as server, connect(server.port) as exchange:
        refused = await request(server.port, "GET", STREAM)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert (await listen(exchange, authorization="Bearer k"))["state"] == "ready"


async def test_asking_for_its_headers_only_has_an_end_and_takes_no_place() -> None:
    async with running(one_model()) as server:
        for _ in range(MAX_STREAMS + 1):
            head = await request(server.port, "HEAD", STREAM)
            assert (head.status, head.body) == (200, b"")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
async def test_a_body_that_comes_with_the_request_is_kept_nowhere() -> None:
    def resident(pid: int) -> int:
        """Bytes of memory that a process has."""
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 24 * 2**20
    head = f"GET {STREAM} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size + 1}\r\n\r\n"
    with scripted_process({}) as server:
        await server.until_ready()
        async with contextlib.AsyncExitStack() as stack:
            before = resident(server.process.pid)
            for _ in range(4):
                exchange = await stack.enter_async_context(connect(server.port))
                with trio.fail_after(PATIENCE):
                    await exchange.stream.send_all(head.encode() + b"x" * size)
                    answered = await exchange.stream.receive_some()
                assert answered.startswith(b"HTTP/1.1 200")
            # The sockets' buffers, which are not the process's, hold some of it, but not most.
            assert resident(server.process.pid) - before < 2 * size


async def test_a_body_that_nobody_wants_does_not_end_the_connection() -> None:
    async with running(one_model()) as server, connect(server.port) as exchange:
        for method in ("GET", "HEAD", "OPTIONS", "GET"):
            answered = await exchange.request(method, "/status/json", b"hello")
            assert (answered.status, answered.complete) == (200, True)
        unasked = await exchange.request("HEAD", STREAM, b"{}", expect="100-continue")
        assert unasked.status == 200


async def test_there_are_only_so_many_and_who_leaves_makes_room() -> None:
    async with running(one_model()) as server, trio.open_nursery() as nursery:
        leave = [trio.Event() for _ in range(MAX_STREAMS)]

        async def watch(left: trio.Event, *, task_status: trio.TaskStatus[None]) -> None:
            async with connect(server.port) as exchange:
                await listen(exchange)
                task_status.started()
                await left.wait()

        for left in leave:
            await nursery.start(watch, left)
        refused = await request(server.port, "GET", STREAM)
        assert (refused.status, refused.error["code"]) == (503, "too_many_status_streams")
        assert refused.headers["retry-after"] == "5"
        # Everything else goes on: a stream costs no slot and no place in line.
        assert (await server.chat("x")).status == 200
        leave[0].set()
        with trio.fail_after(PATIENCE):
            # That a client has left is seen behind a socket: nobody sets an event.
            while True:
                async with connect(server.port) as exchange:
                    await exchange.send("GET", STREAM)
                    await exchange.read_headers()
                    if exchange.status == 200:
                        break
                await trio.sleep(0.01)
        for left in leave:
            left.set()


async def test_a_shutdown_tells_each_stream_once_ends_it_and_does_not_wait_for_it() -> None:
    slow = {"step_seconds": 0.02, "max_ctx": 4096}
    # Who reads nothing is not given up while the test lasts.
    with scripted_process(slow, {"name": "other"}, client_stall_timeout=2 * PATIENCE) as server:
        await server.until_ready()
        async with (
            server.streaming("x", ignore_eos=True, max_tokens=100) as chat,
            connect(server.port) as exchange,
            connect(server.port, receive_buffer=2048) as deaf,
        ):
            await listen(exchange)
            await deaf.send("GET", STREAM)
            server.signal()
            names = []
            while event := await exchange.read_some():
                names.append(event.partition(b"\n")[0].removeprefix(b"event: ").decode())
            assert exchange.ended
            assert names[-1] == "draining"
            assert names.count("draining") == 1
            # The answer that has begun is finished; nobody reads the other stream at all.
            whole = await chat.read_rest()
            assert whole.complete
            assert await server.exit_code() == 0
        assert "Traceback" not in server.log


async def test_a_shutdown_of_a_server_that_only_streams_its_status_ends_at_once() -> None:
    with scripted_process({}, client_stall_timeout=2 * PATIENCE) as server:
        await server.until_ready()
        async with connect(server.port) as exchange:
            await listen(exchange)
            server.signal()
            rest = await exchange.read_rest()
            assert rest.complete
            assert rest.body.endswith(DRAINING)
            assert await server.exit_code() == 0
