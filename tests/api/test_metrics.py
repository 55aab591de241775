"""``/metrics``: the page is well formed, its numbers are true, and nobody's words are in it but
the operator's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from dflash_trio.api.metrics import prefers_openmetrics
from tests.api.test_drafts_over_http import drafted_model
from tests.support.http_client import PATIENCE, connect, request
from tests.support.running import CHAT, RunningServer, chat_body, running
from tests.support.scripted import (
    BreaksDown,
    Gate,
    answer,
    endless_load,
    paced,
    scripted_config,
    scripted_load,
)

DOCS = Path(__file__).parent.parent.parent / "docs"
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
NOT_ON_THE_DASHBOARD = {
    "dflash_build_info",
    "dflash_model_info",
    "dflash_waiting_requests_limit",
    "dflash_preparing_requests",
    "dflash_prefixes_kept",
    "dflash_prefix_disk_entries",
}
"""Of interest when somebody asks, and no line to look at every day."""


async def page(port: int, accept: str = "", **headers: str) -> dict[str, Metric]:
    """The families of the page by name."""
    response = await request(port, "GET", "/metrics", accept=accept, **headers)
    assert response.status == 200
    kind = response.headers["content-type"].partition(";")[0]
    read = read_openmetrics if kind == "application/openmetrics-text" else read_text
    families = list(read(response.text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


async def value(port: int, sample: str, **labels: str) -> float:
    """One sample's value; 0 for a series that is not there yet."""
    for family in (await page(port)).values():
        for each in family.samples:
            if each.name == sample and labels.items() <= each.labels.items():
                return each.value
    return 0.0


async def until(port: int, wanted: float, sample: str, **labels: str) -> None:
    """Wait for a request that is over to be counted, which is after its client knows."""
    with trio.fail_after(PATIENCE):
        # It is behind a socket: nobody sets an event.
        while True:
            if await value(port, sample, **labels) == wanted:
                return
            await trio.sleep(0.005)


def one_model(name: str = "m", **fields: Any) -> tuple[Any, Any]:
    return scripted_config(name), scripted_load(**{"script": answer("four"), **fields})


@pytest.mark.parametrize("accept", ["", OPENMETRICS, "text/plain", "nonsense;;q=x,,;"])
async def test_the_page_is_what_its_own_parser_takes_also_under_load(accept: str) -> None:
    load = scripted_load(slots=2, script=answer("x" * 50), before_decode=paced(0.001))
    async with running((scripted_config("m"), load), one_model("m2")) as server:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(server.chat, "y" * number)
            for _ in range(10):
                families = await page(server.port, accept)
        await server.until_idle()
    for family in families.values():
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            assert sample.labels.get("model", "m") in ("m", "m2", "")


async def test_the_page_needs_the_key_and_has_both_paths() -> None:
    async with running(one_model(), api_keys=(b"k",)) as server:
        assert (await request(server.port, "GET", "/metrics")).status == 401
        for path in ("/metrics", "/v1/metrics"):
            assert (await request(server.port, "GET", path, **{"x-api-key": "k"})).status == 200


async def test_the_page_never_waits_for_an_engine_step() -> None:
    gate = Gate(open=False)
    async with running(one_model(before_decode=gate)) as server:
        async with server.chatting("x"):
            await trio.to_thread.run_sync(gate.reached.wait)
            assert await value(server.port, "dflash_slots_reserved", model="m") == 1
            assert await value(server.port, "dflash_reservations", phase="prefill") == 1
            assert await value(server.port, "dflash_kv_cells_committed") > 0
            gate.open()
        await server.until_idle()


async def test_tokens_waits_first_tokens_and_gaps_are_counted_exactly() -> None:
    async with running(one_model(before_decode=paced(0.001))) as server:
        port = server.port
        for _ in range(3):
            await server.chat("hi")
        await until(port, 3, "dflash_request_duration_seconds_count", model="m")
        # BOS, two bytes, a line end and ">"; four letters and the end of the turn.
        assert await value(port, "dflash_prompt_tokens_total") == 3 * 5
        assert await value(port, "dflash_completion_tokens_total") == 3 * 5
        assert await value(port, "dflash_queue_wait_seconds_count") == 3
        assert await value(port, "dflash_queue_wait_seconds_sum") == 0
        assert await value(port, "dflash_time_to_first_token_seconds_count") == 3
        assert await value(port, "dflash_inter_token_seconds_count") == 3 * 3
        steps = await value(port, "dflash_steps_total")
        for part in ("decode", "sample"):
            assert await value(port, "dflash_step_seconds_count", part=part) == steps
        assert await value(port, "dflash_step_seconds_sum", part="decode") >= steps * 0.001


async def test_cached_tokens_are_counted_apart_from_computed_ones() -> None:
    async with running(one_model(prefixes=4)) as server:
        for _ in range(2):
            await server.chat("hello there")
        cached = await value(server.port, "dflash_cached_tokens_total")
        assert cached > 0
        assert await value(server.port, "dflash_prompt_tokens_total") == 2 * 14 - cached


async def counted(server: RunningServer, outcome: str, route: str = CHAT, model: str = "") -> None:
    """Such a request, and only one, is counted in the end."""
    labels = {"route": route, "outcome": outcome, "model": model}
    await until(server.port, 1, "dflash_requests_total", **labels)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_each_way_to_end_is_its_own_outcome(stream: bool) -> None:
    async with running(one_model()) as server:
        assert (await server.chat("x", stream=stream)).status == 200
        await counted(server, "completed", model="m")
        assert (await server.chat("x" * 5000, stream=stream)).status == 400
        await counted(server, "refused")
    gate = Gate(open=False)

    # Long enough for the server to see that its client has left, which is told to nobody.
    async with running((scripted_config("m"), endless_load(gate)), routing_queue_limit=0) as server:
        async with server.chatting("x", stream=stream):
            await trio.to_thread.run_sync(gate.reached.wait)
            assert (await server.chat("x", stream=stream)).status == 503
            await counted(server, "unavailable")
        gate.open()
        await counted(server, "cancelled", model="m")
        await server.until_idle()


async def test_a_stream_that_fails_after_its_headers_has_failed_though_its_status_is_200() -> None:
    breaks = BreaksDown()
    async with running(one_model(script=answer("x" * 100), before_decode=breaks)) as server:
        async with server.streaming() as exchange:
            breaks.gate.open()
            assert "error" in (await exchange.read_rest()).text
        await counted(server, "failed", model="m")
        assert await value(server.port, "dflash_model_healthy", model="m") == 0


async def test_a_client_that_leaves_the_queue_is_cancelled_and_had_no_model() -> None:
    gate = Gate(open=False)
    async with running(one_model(before_decode=gate)) as server, server.chatting("x"):
        await trio.to_thread.run_sync(gate.reached.wait)
        async with server.chatting("y"):
            await server.until(lambda s: s["routing"]["waiting"] == 1)
            assert await value(server.port, "dflash_waiting_requests") == 1
        await counted(server, "cancelled")
        gate.open()


async def test_who_closes_at_the_last_event_of_its_stream_has_completed() -> None:
    async with running(one_model()) as server:
        async with connect(server.port) as exchange:
            body = json.dumps(chat_body("x", stream=True)).encode()
            await exchange.send("POST", CHAT, body)
            seen = b""
            while b"[DONE]" not in seen:
                seen += await exchange.read_some()
        await counted(server, "completed", model="m")


@pytest.mark.parametrize("how", ["stall", "RST"])
async def test_who_is_cut_off_in_the_only_write_of_its_answer_is_cancelled(how: str) -> None:
    """More than the kernel takes of a client that reads nothing: its send ends, but not well."""
    body = {"messages": [{"role": "user", "content": "x" * 8_000_000}]}
    async with running(one_model(max_ctx=2**18), client_stall_timeout=1) as server:
        async with connect(server.port, receive_buffer=4096) as exchange:
            await exchange.send("POST", "/apply-template", json.dumps(body).encode())
            # Its answer has begun, and cannot end while nobody reads it.
            await trio.lowlevel.wait_readable(exchange.stream.socket)
            if how == "RST":
                exchange.reset()
            await counted(server, "cancelled", "/apply-template")
        completed = {"route": "/apply-template", "outcome": "completed"}
        assert await value(server.port, "dflash_requests_total", **completed) == 0


async def test_what_drafts_guess_and_what_came_of_it_is_counted_for_models_that_have_one() -> None:
    async with running(drafted_model(), one_model("plain")) as server:
        port = server.port
        for family in ("steps", "runs", "proposed_tokens", "accepted_tokens", "seconds"):
            samples = (await page(port))[f"dflash_draft_{family}"].samples
            totals = [each for each in samples if each.name.endswith("_total")]
            assert [(each.labels, each.value) for each in totals] == [({"model": "drafted"}, 0)]
        assert (await server.chat("x", max_tokens=300)).status == 200
        status = await server.until_idle()
        draft = status["models"][0]["draft"]
        for name in ("proposed", "accepted"):
            assert await value(port, f"dflash_draft_{name}_tokens_total") == draft[name] > 0
        steps = await value(port, "dflash_draft_steps_total")
        assert steps == await value(port, "dflash_draft_runs_total") > 0
        assert 1 <= draft["committed_per_step"] <= 1 + draft["accepted"] / steps
        seconds = await value(port, "dflash_draft_seconds_total")
        assert seconds == draft["draft_seconds"]
        verifying = await value(port, "dflash_draft_verify_seconds_total")
        assert verifying == draft["verify_seconds"] > 0
        part = {"model": "drafted", "part": "draft"}
        assert await value(port, "dflash_step_seconds_count", **part) >= steps
        assert 0 < await value(port, "dflash_step_seconds_sum", **part) <= seconds
        families = await page(port)
    parts = {
        (each.labels["model"], each.labels["part"])
        for each in families["dflash_step_seconds"].samples
    }
    assert ("drafted", "draft") in parts
    assert ("plain", "draft") not in parts
    kinds = {e.labels["model"]: e.labels["draft"] for e in families["dflash_model_info"].samples}
    assert kinds == {"drafted": "scripted", "plain": ""}


async def test_a_wait_is_measured_and_fallbacks_say_what_kept_the_primary_from_it() -> None:
    gate = Gate(open=False)
    first = one_model("first", max_ctx=64, headroom=16, before_decode=gate)
    async with running(first, one_model("second")) as server:
        assert (await server.chat("x" * 200)).headers["x-dflash-model"] == "second"
        async with server.chatting("x"):
            await trio.to_thread.run_sync(gate.reached.wait)
            assert (await server.chat("x")).headers["x-dflash-model"] == "second"
            gate.open()
        for reason, wanted in (("room", 1), ("busy", 1), ("unhealthy", 0)):
            labels = {"model": "second", "reason": reason}
            assert await value(server.port, "dflash_fallbacks_total", **labels) == wanted
    gate = Gate(open=False)
    async with running(one_model(before_decode=gate)) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.chat, "x")
        await trio.to_thread.run_sync(gate.reached.wait)
        nursery.start_soon(server.chat, "y")
        await server.until(lambda s: s["routing"]["waiting"] == 1)
        gate.open()
        await until(server.port, 2, "dflash_queue_wait_seconds_count", model="m")
        assert await value(server.port, "dflash_queue_wait_seconds_sum", model="m") > 0


async def test_no_client_can_add_a_label() -> None:
    async with running(one_model()) as server:
        for path in ("/nothing", "/v1/nothing-else", "/v1/models/none", "/v1/responses/resp_1"):
            await request(server.port, "GET", path)
        await request(server.port, "MADEUP", "/health")
        await server.chat("x", model="mine")
        await until(server.port, 1, "dflash_requests_total", route=CHAT)
        families = await page(server.port)
    samples = families["dflash_requests"].samples
    assert {sample.labels["route"] for sample in samples} == {
        "other",
        "/health",
        "/metrics",
        "/v1/models/{name}",
        "/v1/responses/{response_id}",
        CHAT,
    }
    assert {sample.labels["model"] for sample in samples} == {"", "m"}


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("text/plain,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=many", False),
    ],
)
def test_openmetrics_is_for_those_who_ask_for_it(accept: str, wanted: bool) -> None:
    assert prefers_openmetrics(accept) is wanted


# ------------------------------------------------------------------------------ docs/


def expressions(node: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    if isinstance(node, dict):
        for key, inner in node.items():
            if key in ("expr", "query") and isinstance(inner, str):
                yield inner
            yield from expressions(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from expressions(inner)


async def test_the_dashboard_and_the_page_of_metrics_name_what_there_is_and_all_of_it() -> None:
    async with running(one_model(), drafted_model()) as server:
        await server.chat("x")
        families = await page(server.port)
    ours = {name for name in families if name.startswith("dflash_")}
    samples = {sample.name: family for family in families.values() for sample in family.samples}
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    used = set()
    for expression in expressions(dashboard):
        for name in re.findall(r"\b(?:dflash|process)_\w+", expression):
            assert name in samples, f"{name} in {expression}"
            used.add(samples[name].name)
    assert ours - used == NOT_ON_THE_DASHBOARD
    documented = set(re.findall(r"`(dflash_\w+?)`", (DOCS / "metrics.md").read_text("utf-8")))
    told = {f"{n}_total" if families[n].type == "counter" else n for n in ours}
    assert documented == told
