"""Clients that leave, at each phase of each route that generates, and what is free afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import trio

from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.scripted_runner import ScriptedRunner
from tests.support.http_client import PATIENCE, Exchange, connect, request
from tests.support.running import RunningServer, running
from tests.support.scripted import Gate, endless, paced, scripted_config, scripted_load
from tests.support.speaking import ROUTES, Route

EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
Leaving = Literal["FIN", "RST"]
# Steps take a millisecond and more: the whole of either would keep the only slot for a long time.
LONG_PROMPT = 20_000
LONG_ANSWER = 50_000


def slow_load() -> Any:
    """One slot, of which a whole prompt or answer as above would not be done within the test."""
    load = scripted_load(max_ctx=80_000, chunk=4, script=endless, before_decode=paced(0.001))
    return scripted_config("m"), load


def load_held_in_prefill(gate: Gate) -> Any:
    """One slot, whose engine stands still at the gate in the middle of a long prompt, until it is
    told to cut the step short."""

    def step(batch: Sequence[BatchSlice]) -> None:
        if any(item.position >= LONG_PROMPT // 20 for item in batch):
            gate(batch)

    def open_on_abort(runner: ScriptedRunner) -> None:
        abort = runner.abort

        def abort_and_open() -> None:
            abort()
            gate.open()

        runner.abort = abort_and_open  # type: ignore[method-assign]

    load = scripted_load(max_ctx=80_000, before_decode=step, on_runner=open_on_abort)
    return scripted_config("m"), load


async def leave(exchange: Exchange, how: Leaving) -> None:
    if how == "RST":
        exchange.reset()
    else:
        await exchange.stream.aclose()


def long_answer(route: Route, **fields: Any) -> bytes:
    return route.raw(limit=LONG_ANSWER, ignore_eos=True, **fields)


async def check_free(server: RunningServer, route: Route) -> dict[str, Any]:
    """Everything is zero, and a small request is answered; the status before that."""
    with trio.fail_after(PATIENCE):
        status = await server.until_idle()
        body = route.body(limit=1)
        answered = await request(server.port, "POST", route.path, body)
    assert answered.status == 200
    return status


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_who_leaves_before_its_body_is_whole_has_taken_nothing(
    route: Route, stream: bool
) -> None:
    raw = route.raw("x" * 1000, stream=stream)
    head = (
        f"POST {route.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode()
    async with running(slow_load()) as server:
        for how in ("FIN", "RST"):
            for part in (head, head + raw[:500]):
                async with connect(server.port) as exchange:
                    await exchange.stream.send_all(part)
                    # A connection that came later was served: so the server knows of this one.
                    await server.status()
                    await leave(exchange, how)
        status = await check_free(server, route)
        assert status["models"][0]["engine"]["steps"] == 0


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_who_leaves_the_queue_is_gone_at_once_and_its_place_is_free(
    route: Route, stream: bool
) -> None:
    gate = Gate(open=False)
    load = scripted_load(before_decode=gate)
    async with running((scripted_config("m"), load), routing_queue_limit=1) as server:
        async with server.chatting("hold", max_tokens=1):
            await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 1)
            for how in ("FIN", "RST"):
                async with connect(server.port) as exchange:
                    await exchange.send("POST", route.path, route.raw(stream=stream))
                    await server.until(lambda s: s["routing"]["waiting"] == 1)
                    body = route.body(stream=stream)
                    assert (await request(server.port, "POST", route.path, body)).status == 503
                    await leave(exchange, how)
                    await server.until(lambda s: s["routing"]["waiting"] == 0)
            gate.open()
        await check_free(server, route)


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_who_leaves_in_its_prefill_ends_it_there(route: Route, stream: bool) -> None:
    gate = Gate(open=False)
    async with running(load_held_in_prefill(gate)) as server:
        for how in ("FIN", "RST"):
            gate.close()
            gate.reached.clear()
            async with connect(server.port) as exchange:
                await exchange.send("POST", route.path, route.raw("x" * LONG_PROMPT, stream=stream))
                assert await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)
                assert (await server.status())["models"][0]["in_flight"]["prefill"] == 1
                # That it is gone opens the gate.
                await leave(exchange, how)
            status = await check_free(server, route)
        assert status["models"][0]["engine"]["prompt_tokens"] < LONG_PROMPT


@EVERY_ROUTE
async def test_who_leaves_after_its_first_delta_ends_its_answer_there(route: Route) -> None:
    async with running(slow_load()) as server:
        for how in ("FIN", "RST"):
            async with connect(server.port) as exchange:
                await exchange.send("POST", route.path, long_answer(route, stream=True))
                seen = b""
                while not route.dialect.read(seen, stream=True).text:
                    seen += await exchange.read_some()
                await leave(exchange, how)
            status = await check_free(server, route)
        assert 0 < status["models"][0]["engine"]["completion_tokens"] < LONG_ANSWER


@EVERY_ROUTE
async def test_who_leaves_while_its_whole_answer_is_made_ends_it_there(route: Route) -> None:
    async with running(slow_load()) as server:
        for how in ("FIN", "RST"):
            async with connect(server.port) as exchange:
                await exchange.send("POST", route.path, long_answer(route))
                await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
                await leave(exchange, how)
            status = await check_free(server, route)
        assert 0 < status["models"][0]["engine"]["completion_tokens"] < LONG_ANSWER


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_ending_the_sending_side_is_leaving_and_sending_ahead_is_not(
    route: Route, stream: bool
) -> None:
    async with running(slow_load()) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", route.path, long_answer(route, stream=stream))
            await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
            # The next request, sent too early, is not a goodbye...
            await exchange.stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            made = (await server.status())["models"][0]["engine"]["completion_tokens"]
            await server.until(lambda s: s["models"][0]["engine"]["completion_tokens"] > made + 20)
            # ...but this is.
            await exchange.stream.send_eof()
            status = await check_free(server, route)
        assert status["models"][0]["engine"]["completion_tokens"] < LONG_ANSWER


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.name in ("chat", "completions")],
    ids=lambda route: route.name,
)
@STREAM_OR_NOT
async def test_who_leaves_several_answers_leaves_all_their_slots(
    route: Route, stream: bool
) -> None:
    load = scripted_load(slots=3, max_ctx=60_000, script=endless, before_decode=paced(0.001))
    async with running((scripted_config("m"), load)) as server:
        async with contextlib.AsyncExitStack() as stack:
            exchange = await stack.enter_async_context(connect(server.port))
            await exchange.send("POST", route.path, long_answer(route, stream=stream, n=3))
            await server.until(
                lambda s: (
                    s["models"][0]["slots"]["reserved"] == 3
                    and s["models"][0]["engine"]["sequences_decoding"] == 3
                )
            )
        await check_free(server, route)
