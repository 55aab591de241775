"""The status shows the latest requests for an answer: how they ended, never what they said."""

from __future__ import annotations

from typing import Any

from dflash_trio.api.openapi import OPERATIONS
from dflash_trio.api.recent_requests import GENERATING, KEPT, SHOWN, RecentRequests
from tests.support.http_client import request
from tests.support.running import RunningServer, running
from tests.support.scripted import answer, scripted_config, scripted_load
from tests.support.speaking import ROUTES


def one_model() -> tuple[Any, Any]:
    return scripted_config("m"), scripted_load(script=answer("four"), max_ctx=256)


async def recent(server: RunningServer, wanted: int) -> list[dict[str, Any]]:
    """Once there are as many: a request is shown when it is over, after its client knows."""
    status = await server.until(lambda s: len(s["recent_requests"]) >= wanted)
    return list(status["recent_requests"])


async def test_requests_of_all_dialects_are_shown_newest_first_with_what_they_took() -> None:
    async with running(one_model()) as server:
        for number, route in enumerate(ROUTES, 1):
            await request(server.port, "POST", route.path, route.body("secret words"))
            await recent(server, number)
        refused = await request(server.port, "POST", "/v1/messages", {"messages": []})
        shown = await recent(server, len(ROUTES) + 1)
        status = await server.status()
    assert [each["route"] for each in shown] == ["/v1/messages", *[r.path for r in ROUTES][::-1]]
    first, *others = shown
    assert (first["outcome"], first["status"], first["model"]) == ("refused", 400, None)
    assert first["request_id"] == refused.headers["x-request-id"]
    for each in others:
        assert (each["outcome"], each["status"], each["model"]) == ("completed", 200, "m")
        assert each["completion_tokens"] == 5
        assert each["prompt_tokens"] == 15
        assert 0 <= each["ttft_s"] <= each["total_s"]
        assert each["queue_s"] == 0
        assert each["ended_at"] <= status["taken_at"]
        assert each.keys() == {*SHOWN, "ended_at"}
    assert "secret" not in str(status)


async def test_requests_for_anything_else_are_not_among_them() -> None:
    async with running(one_model()) as server:
        for path in ("/", "/health", "/nothing", "/v1/models", "/metrics"):
            await request(server.port, "GET", path)
        await request(server.port, "POST", "/tokenize", {"content": "x"})
        await server.chat("x")
        (only,) = await recent(server, 1)
    assert only["route"] == "/v1/chat/completions"


def test_no_more_are_kept_than_a_page_holds_and_the_oldest_go() -> None:
    requests = RecentRequests(clock=lambda: 1.5)
    for number in range(KEPT + 5):
        requests.add({**dict.fromkeys(SHOWN), "request_id": str(number), "prompt": "never"})
    kept = requests.newest_first()
    assert [each["request_id"] for each in kept] == [str(n) for n in range(KEPT + 4, 4, -1)]
    assert all("prompt" not in each and each["ended_at"] == 1.5 for each in kept)


def test_what_is_kept_is_what_generates() -> None:
    described = {each.path for each in OPERATIONS if each.streams and each.method == "POST"}
    assert described == GENERATING
