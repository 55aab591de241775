"""How answers end before their time, on every route that generates: failures, shutdowns, silence.

Real sockets, engines that fail or are held at a gate.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from dflash_trio.testing.dialects import events
from tests.support.http_client import Answer, Exchange, connect, request
from tests.support.running import RunningServer, running
from tests.support.scripted import PLAIN_TEMPLATE, Gate, answer, scripted_config, scripted_load
from tests.support.speaking import ROUTES, Route

EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SAID = "0123456789" * 5


class HeldAfter:
    """Lets a sequence get some tokens beyond its prompt, and holds the step that follows.

    ``fails``: the step does not come back, once the gate is open.
    """

    def __init__(self, prompt: int, tokens: int, *, fails: bool = False) -> None:
        self.gate = Gate(open=False)
        self._last = prompt + tokens
        self._fails = fails

    def __call__(self, batch: Any) -> None:
        if any(item.position >= self._last for item in batch):
            self.gate(batch)
            if self._fails:
                raise RuntimeError("the device fell off")


def held(route: Route, *, fails: bool = False) -> tuple[HeldAfter, Any]:
    """A model that says ``SAID``, of which the first five characters come."""
    hold = HeldAfter(len("Bhi\n>"), 5, fails=fails)
    return hold, (scripted_config("m"), scripted_load(script=answer(SAID), before_decode=hold))


@contextlib.asynccontextmanager
async def asked(server: RunningServer, route: Route, **fields: Any) -> AsyncIterator[Exchange]:
    async with connect(server.port) as exchange:
        await exchange.send("POST", route.path, route.raw(**fields))
        yield exchange


async def text_begun(exchange: Exchange, route: Route) -> bytes:
    """A stream's bytes until some of its text has come."""
    seen = b""
    while not route.dialect.read(seen, stream=True).text:
        part = await exchange.read_some()
        assert part, f"no text in {seen!r}"
        seen += part
    return seen


def whole_of(seen: bytes, rest: Answer) -> Answer:
    return Answer(rest.status, rest.headers, seen + rest.body, rest.complete)


# --------------------------------------------------------------------------------- failures


@EVERY_ROUTE
async def test_an_engine_that_fails_in_mid_stream_is_an_error_event_and_the_end_at_once(
    route: Route,
) -> None:
    hold, load = held(route, fails=True)
    async with running(load) as server:
        async with asked(server, route, stream=True) as exchange:
            seen = await text_begun(exchange, route)
            hold.gate.open()
            failed = whole_of(seen, await exchange.read_rest())
        assert failed.status == 200
        assert failed.complete
        read = route.dialect.read(failed.body, stream=True)
        assert read.problem is not None
        assert read.problem.startswith("an error inside the stream")
        assert (read.terminal, read.finish) == (False, None)
        assert SAID.startswith(read.text)
        *_, (name, data) = events(failed.body)
        last = json.loads(data)
        match route.name:
            case "messages":
                assert (name, last["type"]) == ("error", "error")
                assert last["error"]["type"] == "api_error"
                error = last["error"]
            case "responses":
                assert name == last["type"] == "response.failed"
                assert last["response"]["status"] == "failed"
                error = last["response"]["error"]
            case _:
                assert set(last["error"]) == {"message", "type", "param", "code"}
                assert last["error"]["code"] == "engine_failed"
                error = last["error"]
        assert "the device fell off" in error["message"]
        assert b"[DONE]" not in failed.body
        later = await request(server.port, "POST", route.path, route.body(stream=True))
        assert (later.status, route.error(later)) == (503, route.word("model_unhealthy"))
        assert later.headers["retry-after"].isdigit()
        await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 0)


@EVERY_ROUTE
async def test_an_engine_that_fails_under_a_whole_answer_is_a_500(route: Route) -> None:
    hold, load = held(route, fails=True)
    async with running(load) as server, asked(server, route) as exchange:
        await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
        hold.gate.open()
        failed = await exchange.read_rest()
        assert (failed.status, route.error(failed)) == (500, route.word("engine_failed"))


# ------------------------------------------------------------------------------ keep-alives


@EVERY_ROUTE
async def test_silence_before_and_within_an_answer_is_broken_in_the_routes_own_words(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trio.server.FIRST_BYTE_PATIENCE", 0.02)
    monkeypatch.setattr("dflash_trio.server.KEEP_ALIVE_INTERVAL", 0.02)
    sign = {
        "messages": b'event: ping\ndata: {"type":"ping"}\n\n',
        "responses": b"event: response.in_progress\n",
    }.get(route.name, b": keep-alive\n\n")
    before, (hold, _) = Gate(open=False), held(route)

    def steps(batch: Any) -> None:
        before(batch)
        hold(batch)

    load = scripted_load(script=answer(SAID), before_decode=steps)
    async with (
        running((scripted_config(), load)) as server,
        asked(server, route, stream=True) as exchange,
    ):
        await exchange.read_headers()
        assert exchange.status == 200
        seen = b""
        while seen.count(sign) < 3:  # one of these is a response's beginning
            seen += await exchange.read_some()
        assert route.dialect.read(seen, stream=True).text == ""
        before.open()
        seen += await text_begun(exchange, route)
        so_far = seen.count(sign)
        while seen.count(sign) < so_far + 2:
            seen += await exchange.read_some()
        hold.gate.open()
        answered = whole_of(seen, await exchange.read_rest())
    assert route.read(answered, stream=True).text == SAID


# --------------------------------------------------------------------------------- shutdown


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_while_draining_new_and_waiting_requests_get_a_503_that_closes(
    route: Route, stream: bool
) -> None:
    hold, load = held(route)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(load))
        active = await stack.enter_async_context(asked(server, route, stream=stream))
        await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
        waiting = await stack.enter_async_context(asked(server, route, stream=stream))
        await server.until(lambda s: s["routing"]["waiting"] == 1)
        kept = await stack.enter_async_context(connect(server.port))
        await kept.request("GET", "/health")
        await server.server._router.drain()
        late = await kept.request("POST", route.path, route.raw(stream=stream))
        for refused in (await waiting.read_rest(), late):
            assert (refused.status, route.error(refused)) == (
                503,
                route.word("server_shutting_down"),
            )
            assert refused.headers["connection"] == "close"
            assert refused.headers["retry-after"].isdigit()
        hold.gate.open()
        assert route.read(await active.read_rest(), stream=stream).text == SAID


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_finalizing_ends_an_answer_as_a_limit_does_and_says_why(
    route: Route, stream: bool
) -> None:
    hold, load = held(route)
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    async with (
        running(load) as server,
        asked(server, route, stream=stream, **usage) as exchange,
    ):
        await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
        await trio.to_thread.run_sync(hold.gate.reached.wait)
        server.server._router.models[0].client.finalize_all()
        hold.gate.open()
        ended = await exchange.read_rest()
        read = route.read(ended, stream=stream)
        assert read.finish == route.dialect.finalized
        assert SAID.startswith(read.text)
        assert read.tokens == len(read.text) < len(SAID)
        assert b'"ended_by":"server_shutdown"' in ended.body.replace(b": ", b":")
        await server.until_idle()


@EVERY_ROUTE
@STREAM_OR_NOT
async def test_finalizing_before_the_first_token_is_a_503(route: Route, stream: bool) -> None:
    gate = Gate(open=False)
    load = scripted_load(script=answer(SAID), before_decode=gate)
    async with (
        running((scripted_config(), load)) as server,
        asked(server, route, stream=stream) as exchange,
    ):
        await trio.to_thread.run_sync(gate.reached.wait)
        server.server._router.models[0].client.finalize_all()
        gate.open()
        refused = await exchange.read_rest()
        assert (refused.status, route.error(refused)) == (503, route.word("server_shutting_down"))


# Its comment is all that makes it a template of a model that calls tools.
TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(">", "SAY:") + "{# <tool_call> #}"
CALL = '<tool_call>{"name": "f", "arguments": {"word": "' + "la" * 80


@pytest.mark.parametrize("route", ROUTES[:3], ids=lambda route: route.name)
async def test_finalizing_within_a_call_closes_it_as_it_stands(route: Route) -> None:
    gate = Gate()
    half_said = threading.Event()

    def script(history: bytes, _: int) -> int | None:
        said = history.rpartition(b"SAY:")[2]
        if len(said) == 80:  # well within the arguments, and the tokens that may be had
            gate.close()
            gate.reached.clear()
            half_said.set()
        return CALL.encode()[len(said)]

    load = scripted_load(script=script, template=TOOL_TEMPLATE, before_decode=gate)
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    tool: dict[str, Any] = {"name": "f", "parameters": schema}
    match route.name:
        case "chat":
            tool = {"type": "function", "function": tool}
        case "messages":
            tool = {"name": "f", "input_schema": schema}
        case "responses":
            tool["type"] = "function"
    async with (
        running((scripted_config(), load)) as server,
        asked(server, route, stream=True, tools=[tool]) as exchange,
    ):
        await trio.to_thread.run_sync(half_said.wait)
        await trio.to_thread.run_sync(gate.reached.wait)
        server.server._router.models[0].client.finalize_all()
        gate.open()
        ended = await exchange.read_rest()
    assert route.read(ended, stream=True).finish == route.dialect.finalized
    parsed = [json.loads(data) for _, data in events(ended.body) if data != "[DONE]"]
    match route.name:
        case "chat":
            calls = [
                call["function"]["arguments"]
                for event in parsed
                for choice in event["choices"]
                for call in choice["delta"].get("tool_calls", ())
            ]
        case "messages":
            calls = [e["delta"].get("partial_json", "") for e in parsed if "delta" in e]
            stops = [e for e in parsed if e["type"] == "content_block_stop"]
            starts = [e for e in parsed if e["type"] == "content_block_start"]
            assert [e["index"] for e in stops] == [e["index"] for e in starts]
        case _:
            kind = "response.function_call_arguments"
            calls = [e["delta"] for e in parsed if e["type"] == f"{kind}.delta"]
            (done,) = (e for e in parsed if e["type"] == f"{kind}.done")
            assert done["arguments"] == "".join(calls)
            item = parsed[-1]["response"]["output"][-1]
            assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert '{"word": "lala' in "".join(calls)
