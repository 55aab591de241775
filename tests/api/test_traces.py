"""Traces of served requests, as a collector gets them: what they say, and what they never say."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import trio

from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.generation.request import GenerationRequest
from dflash_trio.traces import Traces
from tests.api.test_drafts_over_http import drafted_model
from tests.support.collector import Collector, Span, collector
from tests.support.http_client import PATIENCE, connect, request
from tests.support.running import CHAT, RunningServer, chat_body, running
from tests.support.scripted import (
    BreaksDown,
    Gate,
    answer,
    endless_load,
    scripted_config,
    scripted_load,
)
from tests.support.speaking import ROUTES, Route

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as collected:
        for name, value in collected.environ.items():
            monkeypatch.setenv(name, value)
        # The flush at a server's end has all the time that it takes.
        monkeypatch.setattr("dflash_trio.traces.FLUSH_BOUND", PATIENCE)
        yield collected


@contextlib.asynccontextmanager
async def tracing(*loads: Any, **fields: Any) -> AsyncIterator[RunningServer]:
    traces = Traces()
    try:
        async with running(*loads, traces=traces, **fields) as server:
            yield server
    finally:
        with trio.CancelScope(shield=True):
            await traces.flush(trio.Event())


def one_model(name: str = "m", **fields: Any) -> tuple[Any, Any]:
    return scripted_config(name), scripted_load(**{"script": answer("four"), **fields})


def check_order(server: Span, parts: dict[str, Span], *names: str) -> None:
    """The children lie one after the other, inside their parent."""
    assert set(parts) == set(names)
    moments = [server.began]
    for name in names:
        moments += [parts[name].began, parts[name].ended]
    moments.append(server.ended)
    assert moments == sorted(moments)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_is_a_span_with_what_it_took_and_nothing_of_what_was_said(
    route: Route, stream: bool, collected: Collector
) -> None:
    gate = Gate(open=False)

    def step(batch: Sequence[BatchSlice]) -> None:
        # What comes behind the prompt, which is one step here.
        if any(item.position for item in batch):
            gate(batch)

    load = scripted_load(script=answer("unspeakable"), before_decode=step)
    before = time.time_ns()
    async with (
        tracing((scripted_config("mine"), load)) as server,
        connect(server.port) as exchange,
    ):
        raw = route.raw("secret words", stream=stream, temperature=0.25, model="theirs")
        await exchange.send("POST", route.path, raw, {"x-request-id": "r1"})
        await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
        decoding_since = trio.current_time()
        await trio.sleep(0.01)
        decoded = trio.current_time() - decoding_since
        gate.open()
        answered = await exchange.read_rest()
        route.read(answered, stream=stream)
        assert "unspeakable" in "".join(answered.text.split()) or stream
        (span,) = await collected.until(1)
    # It ends when a clock says that nobody sets; the other one may be slewed meanwhile.
    assert before <= span.began < span.ended <= time.time_ns() + 10**9
    assert (span.name, span.parent_id, span.status) == (f"POST {route.path}", "", 0)
    said = dict(span.attributes)
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk", 1) < 60
    assert said.pop("gen_ai.request.max_tokens", 100) == 100
    prompt = said.pop("gen_ai.usage.input_tokens")
    assert prompt > 12
    assert said == {
        "http.request.method": "POST",
        "http.route": route.path,
        "url.path": route.path,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "http.response.status_code": 200,
        "dflash.outcome": "completed",
        "dflash.request_id": "r1",
        "dflash.queue_wait": 0.0,
        "gen_ai.operation.name": "text_completion" if route.name == "completions" else "chat",
        "gen_ai.provider.name": "dflash",
        "gen_ai.request.model": "theirs",
        "gen_ai.request.stream": stream,
        "gen_ai.request.temperature": 0.25,
        "gen_ai.response.model": "mine",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 12,
    }
    parts = collected.parts(span)
    check_order(span, parts, "prefill", "decode", "drain")
    assert parts["prefill"].attributes == {
        "dflash.prompt_tokens": prompt,
        "dflash.cached_tokens": 0,
    }
    assert parts["decode"].attributes == {"dflash.completion_tokens": 12}
    assert parts["drain"].attributes == {"dflash.body_bytes": len(answered.body)}
    # All of the time in which it certainly was decoding, but for what rounding takes.
    assert parts["decode"].ended - parts["decode"].began >= decoded * 1e9 - 1000
    assert {each.trace_id for each in parts.values()} == {span.trace_id}
    assert collected.resource["service.name"] == "dflash-server"
    sent = b"".join(collected.raw)
    for word in (b"secret", b"words", b"unspeakable", b"unspeak"):
        assert word not in sent


async def test_the_callers_trace_goes_on_with_its_state(collected: Collector) -> None:
    async with tracing(one_model()) as server:
        headers = {"traceparent": SAMPLED, "tracestate": "a=1,b=2"}
        await request(server.port, "POST", CHAT, chat_body("x"), **headers)
        (span,) = await collected.until(1)
    assert (span.trace_id, span.parent_id, span.trace_state) == (TRACE, PARENT, "a=1,b=2")


async def test_what_the_caller_does_not_sample_is_not_sent_but_named_in_the_log(
    collected: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dflash_trio.requests")
    async with tracing(one_model()) as server:
        await request(server.port, "POST", CHAT, chat_body("x"), traceparent=UNSAMPLED)
        await server.chat("y")
        (span,) = await collected.until(1)
        await server.until_idle()
    assert span.trace_id != TRACE
    lines = [record.msg for record in caplog.records if record.name == "dflash_trio.requests"]
    told = [line["trace_id"] for line in lines if isinstance(line, dict)]
    assert told[:2] == [TRACE, span.trace_id]


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", SAMPLED.upper())],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", f"ff-{TRACE}-{PARENT}-01")],
        [("traceparent", f"{SAMPLED}-more")],
        [("traceparent", SAMPLED), ("traceparent", UNSAMPLED)],
        [("traceparent", "\xff" * 20)],
        [("tracestate", "a=1")],
        [("baggage", "secret=1,;;=")],
    ],
)
async def test_a_parent_that_is_malformed_is_ignored_without_a_word(
    headers: list[tuple[str, str]], collected: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    async with tracing(one_model()) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with stream:
            asked = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n"
            await stream.send_all(asked.encode("latin-1"))
            assert b"200" in await stream.receive_some(100)
            (span,) = await collected.until(1)
    assert span.parent_id == ""
    assert span.trace_id != TRACE
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


async def test_a_state_that_is_malformed_is_dropped_and_its_parent_kept_and_nobody_quotes_it(
    collected: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with tracing(one_model()) as server:
        headers = {"traceparent": SAMPLED, "tracestate": "SECRET !!"}
        await request(server.port, "GET", "/v1/models", **headers)
        (span,) = await collected.until(1)
    assert (span.parent_id, span.trace_state) == (PARENT, "")
    assert "SECRET" not in caplog.text


async def test_a_wait_and_a_fallback_are_told_with_their_reason(collected: Collector) -> None:
    gate = Gate(open=False)
    first = one_model("first", before_decode=gate)
    second = one_model("second", before_decode=gate)
    async with tracing(first, second) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.chat, "1")
        await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 1)
        nursery.start_soon(server.chat, "2")
        await server.until(lambda s: s["models"][1]["slots"]["reserved"] == 1)
        nursery.start_soon(server.chat, "3")
        await server.until(lambda s: s["routing"]["waiting"] == 1)
        gate.open()
        primary, fallback, waited = await collected.until(3)
    assert "dflash.fallback" not in primary.attributes
    assert fallback.attributes["dflash.fallback"] == "busy"
    assert fallback.attributes["gen_ai.response.model"] == "second"
    assert "queue" not in collected.parts(fallback)
    parts = collected.parts(waited)
    check_order(waited, parts, "queue", "prefill", "decode", "drain")
    seconds = (parts["queue"].ended - parts["queue"].began) / 1e9
    # The router's clock, and the trace's: other code runs in between.
    assert waited.attributes["dflash.queue_wait"] > 0
    assert seconds == pytest.approx(waited.attributes["dflash.queue_wait"], abs=0.25)


async def test_a_client_that_leaves_makes_a_cancelled_request_and_no_error(
    collected: Collector,
) -> None:
    async with tracing((scripted_config("m"), endless_load())) as server:
        async with server.streaming():
            async with server.chatting("waits"):
                await server.until(lambda s: s["routing"]["waiting"] == 1)
            await server.until(lambda s: s["routing"]["waiting"] == 0)
        decoding, waiting = await collected.until(2)
    for span in (decoding, waiting):
        assert (span.attributes["dflash.outcome"], span.status) == ("cancelled", 0)
        assert "error.type" not in span.attributes
    assert decoding.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert decoding.attributes["gen_ai.usage.output_tokens"] > 0
    assert "http.response.status_code" not in waiting.attributes
    assert set(collected.parts(waiting)) == {"queue"}


@pytest.mark.parametrize(
    ("body", "status", "outcome", "error"),
    [
        (b"{", 400, "refused", None),
        (json.dumps(chat_body("x" * 5000)).encode(), 400, "refused", None),
        (json.dumps(chat_body("busy")).encode(), 503, "unavailable", "503"),
    ],
)
async def test_what_is_refused_is_no_error_of_the_server_and_what_is_unavailable_is(
    body: bytes, status: int, outcome: str, error: str | None, collected: Collector
) -> None:
    gate = Gate(open=False)
    async with (
        tracing(one_model(before_decode=gate), routing_queue_limit=0) as server,
        server.chatting("hold"),
    ):
        await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 1)
        assert (await request(server.port, "POST", CHAT, body)).status == status
        (span,) = await collected.until(1)
        gate.open()
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["dflash.outcome"] == outcome
    assert span.attributes.get("error.type") == error
    assert span.status == (2 if error else 0)
    assert collected.parts(span) == {}


async def test_an_answer_that_fails_half_way_is_an_error_although_its_status_was_good(
    collected: Collector,
) -> None:
    breaks = BreaksDown("secret reason")
    async with tracing((scripted_config("m"), scripted_load(before_decode=breaks))) as server:
        async with server.streaming() as exchange:
            breaks.gate.open()
            await exchange.read_rest()
        (span,) = await collected.until(1)
    assert span.attributes["http.response.status_code"] == 200
    assert (span.attributes["dflash.outcome"], span.status) == ("failed", 2)
    assert span.attributes["error.type"] == "engine_failed"
    assert b"secret" not in b"".join(collected.raw)


async def test_a_trace_keeps_no_request_in_memory_while_it_is_answered(
    collected: Collector,
) -> None:
    def held() -> list[GenerationRequest]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, GenerationRequest)]

    others = held()  # of tests' own tables

    def is_known(request: GenerationRequest) -> bool:
        return any(request is other for other in others)

    async with tracing((scripted_config("m"), endless_load())) as server, server.streaming():
        with trio.fail_after(PATIENCE):
            # Whoever handed it on may still be about to let go of it.
            while not all(map(is_known, held())):  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_drafts_are_totalled_over_all_answers_of_a_request(collected: Collector) -> None:
    async with tracing(drafted_model()) as server:
        answered = await server.chat("abcabcabcabc", temperature=0)
        (span,) = await collected.until(1)
    details = answered.json()["usage"]["completion_tokens_details"]
    decode = collected.parts(span)["decode"].attributes
    assert decode["dflash.draft.accepted_tokens"] == details["accepted_prediction_tokens"]
    assert decode["dflash.draft.rejected_tokens"] == details["rejected_prediction_tokens"]


async def test_paths_that_lead_nowhere_and_names_in_paths_are_not_told(
    collected: Collector,
) -> None:
    async with tracing(one_model()) as server:
        await request(server.port, "GET", "/secret/path?secret=1")
        await request(server.port, "GET", "/v1/models/secret?secret=1")
        nowhere, model = await collected.until(2)
    assert nowhere.name == "GET"
    assert model.name == "GET /v1/models/{name}"
    assert b"secret" not in b"".join(collected.raw)


async def test_what_is_polled_has_a_span_only_for_those_who_trace_it_themselves(
    collected: Collector,
) -> None:
    async with tracing(one_model()) as server:
        for _ in range(3):
            await request(server.port, "GET", "/health")
        await request(server.port, "GET", "/health", traceparent=SAMPLED)
        await server.chat("x")
        spans = await collected.until(2)
    assert [span.name for span in spans] == ["GET /health", f"POST {CHAT}"]


async def test_text_that_cannot_be_spelled_and_numbers_that_do_not_fit_cost_no_span(
    collected: Collector,
) -> None:
    async with tracing(one_model("a\udc80b")) as server:
        await server.chat("x", model="m" * 500, seed=2**64 - 1)
        (span,) = await collected.until(1)
    assert span.attributes["gen_ai.request.model"] == "m" * 128
    assert span.attributes["gen_ai.response.model"] == "a?b"
    assert span.attributes["gen_ai.request.seed"] == str(2**64 - 1)


@pytest.mark.parametrize(
    ("environ", "sampled"),
    [({"OTEL_TRACES_SAMPLER": "always_off"}, 0), ({"OTEL_TRACES_SAMPLER_ARG": "0"}, 0), ({}, 3)],
)
async def test_the_samplers_own_variables_count(
    environ: dict[str, str],
    sampled: int,
    collected: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "OTEL_TRACES_SAMPLER_ARG" in environ:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-box")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with tracing(one_model()) as server:
        for _ in range(3):
            await server.chat("x")
    # The flush at its end has sent all that there is.
    assert len(collected.servers()) == sampled
    if sampled:
        assert collected.resource["service.name"] == "chat-box"
        assert collected.resource["deployment.environment.name"] == "test"
