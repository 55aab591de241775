"""Pages of named origins may call and read; pages of others are told nothing that lets them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from werkzeug.datastructures import Headers

from dflash_trio.api.cors import CorsPolicy
from dflash_trio.cli import parse_command_line
from dflash_trio.cli.errors import UsageError
from tests.support.http_client import Answer, connect, request
from tests.support.running import CHAT, chat_body, running
from tests.support.scripted import Gate, answer, scripted_config, scripted_load

PAGE = "https://chat.example"
OTHER = "https://evil.example"
ALLOW = "access-control-allow-origin"


def serving(*origins: str, **listener: Any) -> Any:
    load = scripted_load(script=answer("1"))
    return running((scripted_config(), load), cors_origins=origins, **listener)


async def preflight(port: int, origin: str, path: str = CHAT, **headers: str) -> Answer:
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return await request(port, "OPTIONS", path, **asked)


async def test_a_preflight_needs_no_key_and_says_what_may_be_sent() -> None:
    async with serving(PAGE, api_keys=(b"k",)) as server:
        allowed = await preflight(
            server.port,
            PAGE,
            **{"access-control-request-headers": "authorization,content-type,x-stainless-os"},
        )
        assert (await request(server.port, "POST", CHAT, chat_body("x"))).status == 401
    assert (allowed.status, allowed.body) == (204, b"")
    assert allowed.headers[ALLOW] == PAGE
    assert allowed.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    wanted = "authorization,content-type,x-stainless-os"
    assert allowed.headers["access-control-allow-headers"] == wanted
    assert int(allowed.headers["access-control-max-age"]) > 0
    assert "Origin" in allowed.headers["vary"]
    assert "access-control-allow-credentials" not in allowed.headers


async def test_the_request_itself_may_follow_its_preflight_on_the_same_connection() -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    async with serving(PAGE) as server, connect(server.port) as exchange:
        assert (await exchange.request("OPTIONS", CHAT, **asked)).status == 204
        body = json.dumps(chat_body("x")).encode()
        assert (await exchange.request("POST", CHAT, body, origin=PAGE)).status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/health", "/no/such/route"])
async def test_a_preflight_is_answered_on_every_path(path: str) -> None:
    async with serving(PAGE) as server:
        assert (await preflight(server.port, PAGE, path)).status == 204


async def test_a_preflight_of_another_origin_gets_no_permission() -> None:
    async with serving(PAGE, api_keys=(b"k",)) as server:
        refused = await preflight(server.port, OTHER)
    assert [name for name in refused.headers if name.startswith("access-control")] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, chat_body("x"), 200),
        ("POST", CHAT, chat_body("x", stream=True), 200),
        ("POST", CHAT, {"messages": []}, 400),
        ("POST", CHAT, b"x" * 3000, 413),
        ("POST", "/v1/messages", {}, 400),
        ("GET", "/no/such/route", None, 404),
        ("DELETE", CHAT, None, 405),
        ("GET", "/health", None, 200),
    ],
)
async def test_every_answer_can_be_read_by_a_named_page_errors_and_streams_too(
    method: str, path: str, body: Any, status: int
) -> None:
    async with serving(PAGE, max_body_bytes=2000) as server:
        answered = await request(server.port, method, path, body, origin=PAGE)
    assert answered.status == status
    assert answered.headers[ALLOW] == PAGE
    assert answered.headers["vary"] == "Origin"
    exposed = answered.headers["access-control-expose-headers"]
    ours = {f"x-dflash-{name}" for name in ("model", "route", "waited", "fallback")}
    assert {"x-request-id", "request-id", "retry-after"} | ours == set(exposed.split(", "))


async def test_a_refused_key_can_be_read_too() -> None:
    async with serving(PAGE, api_keys=(b"k",)) as server:
        refused = await request(server.port, "POST", CHAT, chat_body("x"), origin=PAGE)
    assert (refused.status, refused.headers[ALLOW]) == (401, PAGE)


async def test_a_full_queue_can_be_read_too_with_when_to_come_back() -> None:
    gate = Gate(open=False)
    load = scripted_load(script=answer("1"), before_decode=gate)
    async with (
        running((scripted_config(), load), cors_origins=(PAGE,), routing_queue_limit=0) as server,
        server.chatting("x"),
    ):
        await trio.to_thread.run_sync(gate.reached.wait)
        refused = await request(server.port, "POST", CHAT, chat_body("x"), origin=PAGE)
        gate.open()
    assert (refused.status, refused.headers[ALLOW]) == (503, PAGE)
    assert refused.headers["retry-after"]
    assert "retry-after" in refused.headers["access-control-expose-headers"]


async def test_on_a_local_server_without_keys_an_origin_neither_local_nor_named_is_refused() -> (
    None
):
    async with serving(PAGE) as server:
        for origin in (OTHER, "null", f"{PAGE}.evil.example", "http://chat.example"):
            refused = await request(server.port, "POST", CHAT, chat_body("x"), origin=origin)
            assert (refused.status, refused.error["code"]) == (403, "forbidden")
            assert ALLOW not in refused.headers
            assert refused.headers["vary"] == "Origin"
            assert (await preflight(server.port, origin)).status == 403
        local = await request(
            server.port, "POST", CHAT, chat_body("x"), origin="http://localhost:3000"
        )
        assert local.status == 200
        # It may call, as any program here; to read, its page has to be named.
        assert ALLOW not in local.headers


async def test_a_named_origin_does_not_open_a_local_server_to_other_host_names() -> None:
    async with serving(PAGE) as server:
        refused = await request(
            server.port, "POST", CHAT, chat_body("x"), origin=PAGE, host="evil.example"
        )
    assert refused.status == 403


async def test_without_named_origins_nothing_is_said_of_any() -> None:
    async with serving() as server:
        answered = await request(server.port, "GET", "/health", origin="http://localhost")
    assert answered.status == 200
    assert [name for name in answered.headers if name.startswith(("access-", "vary"))] == []


async def test_a_star_lets_every_page_call_and_read() -> None:
    async with serving("*") as server:
        for origin in (OTHER, "null"):
            answered = await request(server.port, "POST", CHAT, chat_body("x"), origin=origin)
            assert (answered.status, answered.headers[ALLOW]) == (200, "*")
        assert (await preflight(server.port, OTHER)).headers[ALLOW] == "*"


@pytest.mark.parametrize("named", ["https://Chat.Example", "https://chat.example:443"])
def test_origins_are_compared_as_browsers_write_them(named: str) -> None:
    assert CorsPolicy((named,)).names(PAGE)
    assert not CorsPolicy((named,)).names("http://chat.example")
    assert not CorsPolicy((named,)).names("https://chat.example:8443")


def test_what_is_no_list_of_header_names_is_not_repeated() -> None:
    asked = Headers({"Origin": PAGE, "Access-Control-Request-Method": "POST"})
    asked["Access-Control-Request-Headers"] = "a: b\xe9"
    allowed = CorsPolicy((PAGE,)).headers("OPTIONS", asked)
    assert allowed[ALLOW] == PAGE
    assert "access-control-allow-headers" not in allowed


def test_the_origins_come_from_the_command_line() -> None:
    line = ["m.gguf", "--cors-origin", PAGE, "--cors-origin", "http://localhost:3000"]
    config = parse_command_line(line, {}).config
    assert config.listener.cors_origins == (PAGE, "http://localhost:3000")
    assert parse_command_line(["m.gguf", "--no-cors"], {}).config.listener.cors_origins == ()


def test_naming_origins_and_none_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="--no-cors contradicts --cors-origin"):
        parse_command_line(["m.gguf", "--no-cors", "--cors-origin", PAGE], {})
