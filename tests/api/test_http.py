"""The routes over real sockets, on scripted engines inside this process."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import trio
from quart_trio.asgi import TrioASGIHTTPConnection

from tests.support.http_client import PATIENCE, connect, request
from tests.support.running import CHAT, chat_body, poll_health, running, sse_events, streamed_text
from tests.support.scripted import BreaksDown, Gate, answer, scripted_config, scripted_load

ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"


async def test_stream_and_whole_answer_are_equal_byte_for_byte_and_split_naively_safe() -> None:
    async with running((scripted_config(), scripted_load(script=answer(ODD_TEXT)))) as server:
        whole = (await server.chat("x", temperature=0)).json()
        stream = await server.chat("x", temperature=0, stream=True)
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": ODD_TEXT,
        "refusal": None,
    }
    assert streamed_text(stream.text) == ODD_TEXT
    # Clients that split at any Unicode line end see the same events.
    lines = [line for line in stream.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert [json.loads(line[6:]) for line in lines[:-1]] == sse_events(stream.text)[:-1]


async def test_a_stream_is_role_then_deltas_then_finish_then_done_with_one_identity() -> None:
    async with running((scripted_config("m"), scripted_load(script=answer("abc")))) as server:
        stream = await server.chat("x", temperature=0, stream=True)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["x-dflash-model"] == "m"
    *chunks, done = sse_events(stream.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0}
    for field in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[field] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("limit", [1, 3, None])
async def test_usage_comes_once_right_before_done_and_equals_the_whole_answers(
    limit: int | None,
) -> None:
    async with running((scripted_config(), scripted_load(script=answer("abcdef")))) as server:
        whole = (await server.chat("x", max_tokens=limit)).json()
        options = {"include_usage": True}
        stream = await server.chat("x", max_tokens=limit, stream=True, stream_options=options)
    *chunks, _ = sse_events(stream.text)
    assert [chunk["choices"] for chunk in chunks if chunk["usage"] is not None] == [[]]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == (limit or len("abcdef") + 1)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["STOPPED"], "alpha", "stop"),
        (["STOPPER"], "alphaSTOPPEDbeta", "stop"),
        (["betaX"], "alphaSTOPPEDbeta", "stop"),
        (None, "alphaSTOPPEDbeta", "stop"),
    ],
)
async def test_nothing_of_a_stop_string_is_sent_and_nothing_of_a_false_one_is_lost(
    stop: Any, text: str, reason: str
) -> None:
    load = scripted_load(script=answer("alphaSTOPPEDbeta"))
    async with running((scripted_config(), load)) as server:
        whole = (await server.chat("x", stop=stop)).json()["choices"][0]
        stream = await server.chat("x", stop=stop, stream=True)
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, reason)
    assert streamed_text(stream.text) == text


async def test_the_models_field_never_selects_and_the_answer_names_who_answered() -> None:
    loads = [
        (scripted_config("first", aliases=("one",)), scripted_load(script=answer("1"))),
        (scripted_config("second"), scripted_load(script=answer("2"))),
    ]
    async with running(*loads) as server:
        for name in ("second", "one", "auto", "", "anything", None):
            response = await server.chat("x", model=name)
            assert response.json()["model"] == "first"
            assert response.headers["x-dflash-model"] == "first"
        assert (await server.chat("x", model=5)).error["param"] == "model"


async def test_a_name_that_no_header_can_carry_is_percent_encoded_there() -> None:
    async with running((scripted_config("模型"), scripted_load(script=answer("1")))) as server:
        response = await server.chat("x")
    assert response.headers["x-dflash-model"] == "%E6%A8%A1%E5%9E%8B"
    assert response.json()["model"] == "模型"


async def test_every_response_has_an_id_and_a_short_printable_one_of_the_client_is_kept() -> None:
    async with running((scripted_config(), scripted_load())) as server:
        port = server.port
        ids = {
            (await request(port, "GET", path)).headers["x-request-id"]
            for path in ("/health", "/nope", "/v1/models", "/status/json")
        }
        kept = await request(port, "GET", "/health", **{"x-request-id": "mine-1"})
        replaced = await request(port, "GET", "/health", **{"x-request-id": "x" * 200})
    assert len(ids) == 4
    assert kept.headers["x-request-id"] == "mine-1"
    assert replaced.headers["x-request-id"] != "x" * 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/chat/completionsx", 404, "not_found"),
        ("GET", "/v1/models/nope", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("BREW", "/health", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods_are_json_errors(
    method: str, path: str, status: int, code: str
) -> None:
    async with running((scripted_config(), scripted_load())) as server:
        response = await request(server.port, method, path)
    assert (response.status, response.error["code"]) == (status, code)


async def test_every_v1_route_answers_without_the_prefix_too_and_head_has_no_body() -> None:
    async with running((scripted_config("m"), scripted_load(script=answer("1")))) as server:
        port = server.port
        assert (await request(port, "GET", "/models")).json()["data"][0]["id"] == "m"
        assert (await request(port, "GET", "/models/m")).json()["context_length"] == 2048
        plain = await request(port, "POST", "/chat/completions", chat_body("x"))
        assert plain.json()["choices"][0]["message"]["content"] == "1"
        options = await request(port, "OPTIONS", CHAT)
        assert "POST" in options.headers["allow"]


async def test_a_body_over_the_limit_is_413_before_it_is_read_and_the_next_request_works() -> None:
    load = scripted_load(script=answer("1"))
    async with running((scripted_config(), load), max_body_bytes=1000) as server:
        body = chat_body("x" * 5000)
        refused = await request(server.port, "POST", CHAT, body)
        assert (refused.status, refused.error["code"]) == (413, "request_too_large")
        async with connect(server.port) as exchange:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            head = head.replace("Host: x", "Host: localhost")
            await exchange.stream.send_all(head.encode() + b"800\r\n" + b"x" * 0x800 + b"\r\n")
            data = b""
            while b"\r\n\r\n" not in data:
                data += await exchange.stream.receive_some()
            assert data.startswith(b"HTTP/1.1 413")
        assert (await server.chat("x")).status == 200
        await server.until_idle()


async def test_a_body_that_cannot_fit_any_room_is_refused_by_its_size_alone() -> None:
    async with running((scripted_config("m"), scripted_load(max_ctx=64))) as server:
        response = await server.chat("x" * 64 * 65)
        assert response.status == 400
        assert response.error["code"] == "context_length_exceeded"
        assert "room 64" in response.error["message"]
        assert "bytes" in response.error["message"]


async def test_a_body_that_cannot_fit_is_refused_before_it_is_read() -> None:
    async with running((scripted_config("m"), scripted_load(max_ctx=64))) as server:
        async with connect(server.port) as exchange:
            # Announced, and never sent.
            await exchange.stream.send_all(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n".encode()
            )
            data = await exchange.stream.receive_some()
        assert data.startswith(b"HTTP/1.1 400")
        assert (await server.chat("x" * 10)).status == 200


async def test_compressed_bodies_are_415_and_any_content_type_is_read_as_json() -> None:
    async with running((scripted_config(), scripted_load(script=answer("1")))) as server:
        packed = await request(
            server.port, "POST", CHAT, b"\x1f\x8b", **{"content-encoding": "gzip"}
        )
        assert (packed.status, packed.error["code"]) == (415, "unsupported_media_type")
        plain = await request(
            server.port, "POST", CHAT, chat_body("x"), **{"content-type": "text/plain"}
        )
        assert plain.status == 200


async def test_while_loading_all_routes_but_health_answer_503_with_retry_after() -> None:
    gate = Gate(open=False)
    load = scripted_load(on_runner=lambda _: gate([]), script=answer("1"))
    async with running((scripted_config(), load), wait_ready=False) as server:
        health = await request(server.port, "GET", "/health")
        assert (health.status, health.json()) == (503, {"status": "loading"})
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/status/json")):
            response = await request(server.port, method, path, b"{}")
            assert (response.status, response.error["code"]) == (503, "model_loading")
            assert response.headers["retry-after"] == "5"
        gate.open()
        await poll_health(server.port)
        assert (await server.chat("x")).status == 200


async def test_a_stream_without_a_token_gets_headers_after_patience_and_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_trio.server.FIRST_BYTE_PATIENCE", 0.05)
    monkeypatch.setattr("dflash_trio.server.KEEP_ALIVE_INTERVAL", 0.05)
    gate = Gate(open=False)
    load = scripted_load(script=answer("late"), before_decode=gate)
    async with (
        running((scripted_config(), load)) as server,
        server.chatting("x", stream=True) as exchange,
    ):
        await exchange.read_headers()
        assert exchange.status == 200
        seen = b""
        while seen.count(b": keep-alive\n\n") < 2:
            seen += await exchange.read_some()
        assert sse_events(seen.decode())[0]["choices"][0]["delta"]["role"] == "assistant"
        gate.open()
        rest = await exchange.read_rest()
        assert streamed_text(rest.text) == "late"


async def test_an_engine_that_fails_before_headers_is_a_500_and_after_them_an_error_event() -> None:
    breaks = BreaksDown()
    load = scripted_load(script=answer("abcdefghij"), before_decode=breaks)
    async with running((scripted_config("m"), load)) as server:
        async with server.streaming("x") as exchange:
            breaks.gate.open()
            answered = await exchange.read_rest()
        events = sse_events(answered.text)
        assert answered.status == 200
        assert "the device fell off" in events[-1]["error"]["message"]
        assert "[DONE]" not in events
        assert answered.complete
        health = await request(server.port, "GET", "/health")
        assert health.status == 503
        assert "the device fell off" in health.json()["unhealthy"]["m"]
        later = await server.chat("x")
        assert (later.status, later.error["code"]) == (503, "model_unhealthy")
        await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 0)
    load = scripted_load(script=answer("a"), before_decode=lambda _: 1 / 0)
    async with running((scripted_config("m"), load)) as server:
        for stream in (True, False):
            response = await server.chat("x", stream=stream)
            assert response.status in (500, 503)
            assert "Traceback" not in response.text


async def test_a_second_model_goes_on_when_the_first_is_dead() -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("gone")

    loads = [
        (scripted_config("first"), scripted_load(before_decode=fail)),
        (scripted_config("second"), scripted_load(script=answer("2"))),
    ]
    async with running(*loads) as server:
        assert (await server.chat("x")).status == 500
        health = await request(server.port, "GET", "/health")
        assert (health.status, health.json()["status"]) == (200, "degraded")
        assert (await server.chat("x")).json()["model"] == "second"


async def test_keys_are_wanted_everywhere_but_for_health_and_compared_as_bytes() -> None:
    load = scripted_load(script=answer("1"))
    async with running((scripted_config(), load), api_keys=(b"s3cret", b"caf\xe9")) as server:
        port = server.port
        assert (await request(port, "GET", "/health")).status == 200

        async def with_headers(**headers: str) -> int:
            response = await request(port, "POST", CHAT, chat_body("x"), **headers)
            if response.status == 401:
                assert response.error["code"] == "invalid_api_key"
                assert "s3cret" not in response.text
            return response.status

        assert await with_headers() == 401
        assert await with_headers(authorization="Bearer wrong") == 401
        assert await with_headers(authorization="Bearer") == 401
        assert await with_headers(authorization="Basic s3cret") == 401
        assert await with_headers(**{"x-api-key": "k" * 32_000}) == 401
        assert await with_headers(authorization="Bearer s3cret") == 200
        assert await with_headers(authorization="bearer s3cret") == 200
        assert await with_headers(**{"x-api-key": "s3cret"}) == 200
        assert await with_headers(**{"x-api-key": "s3cret", "authorization": "Bearer no"}) == 200
        async with connect(port) as exchange:
            await exchange.stream.send_all(
                b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
                b"Authorization: Bearer caf\xe9\r\nConnection: close\r\n\r\n"
            )
            data = await exchange.stream.receive_some()
            assert data.startswith(b"HTTP/1.1 200")


async def test_a_local_server_without_keys_answers_no_foreign_page() -> None:
    async with running((scripted_config(), scripted_load())) as server:
        for headers, status in (
            ({"host": "localhost:1"}, 200),
            ({"host": "[::1]:8080"}, 200),
            ({"host": "evil.example"}, 403),
            ({"host": "127.0.0.1.evil.example"}, 403),
            ({"origin": "http://localhost:3000"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
        ):
            response = await request(server.port, "GET", "/v1/models", **headers)
            assert response.status == status, headers


async def test_a_bias_or_template_refusal_is_a_400_that_tries_no_second_model() -> None:
    strict = "{{ raise_exception('no thanks') }}"
    loads = [
        (scripted_config("first"), scripted_load(template=strict)),
        (scripted_config("second"), scripted_load(script=answer("2"))),
    ]
    async with running(*loads) as server:
        response = await server.chat("x")
        assert response.status == 400
        assert "no thanks" in response.error["message"]
    async with running((scripted_config("m"), scripted_load())) as server:
        assert (await server.chat("x", logit_bias={"999": 1})).error["param"] == "logit_bias"


async def test_expect_100_continue_is_answered_when_the_body_is_wanted_and_not_before() -> None:
    load = scripted_load(script=answer("1"))
    async with running((scripted_config(), load), max_body_bytes=10_000) as server:
        body = json.dumps(chat_body("x")).encode()
        for length, first in ((len(body), b"HTTP/1.1 100"), (20_000, b"HTTP/1.1 413")):
            async with connect(server.port) as exchange:
                await exchange.stream.send_all(
                    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                    f"Content-Length: {length}\r\n\r\n".encode()
                )
                assert (await exchange.stream.receive_some()).startswith(first)
                if length == len(body):
                    await exchange.stream.send_all(body)
                    assert (await exchange.stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_a_body_that_stops_coming_is_given_up_and_held_nothing() -> None:
    async with running((scripted_config(), scripted_load()), client_stall_timeout=0.2) as server:
        async with connect(server.port) as exchange:
            await exchange.stream.send_all(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode()
            )
            data = await exchange.stream.receive_some()
            assert data.startswith(b"HTTP/1.1 408")
        await server.until_idle()
        assert server.server.status().router.waiting == 0


async def test_a_trailing_slash_changes_nothing_about_who_may_ask() -> None:
    async with running((scripted_config(), scripted_load()), api_keys=(b"k",)) as server:
        assert (await request(server.port, "GET", "/health/")).status == 200
        assert (await request(server.port, "GET", "/v1/models/")).status == 401


async def test_options_has_no_page() -> None:
    async with running((scripted_config(), scripted_load())) as server:
        answered = await request(server.port, "OPTIONS", "/health")
    assert (answered.status, answered.body) == (200, b"")
    assert "content-type" not in answered.headers


async def test_bodies_that_are_only_announced_lock_nobody_out() -> None:
    load = scripted_load(script=answer("1"), max_ctx=2**20)
    async with running((scripted_config(), load)) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            exchange = await stack.enter_async_context(connect(server.port))
            await exchange.stream.send_all(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {32 * 2**20}\r\n\r\n".encode()
            )
        assert (await server.chat("x")).status == 200


async def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long() -> None:
    async with running((scripted_config(), scripted_load(max_ctx=64))) as server:
        async with connect(server.port) as exchange:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            # More than the 4096 bytes that 64 tokens may take, and no end.
            await exchange.stream.send_all(head.encode() + b"1388\r\n" + b"x" * 5000 + b"\r\n")
            data = await exchange.stream.receive_some()
        assert data.startswith(b"HTTP/1.1 400")


async def test_doubled_slashes_are_one_and_never_a_page_that_redirects() -> None:
    async with running((scripted_config(), scripted_load(script=answer("1")))) as server:
        assert (await request(server.port, "GET", "/v1//models")).status == 200
        body = chat_body("x")
        assert (await request(server.port, "POST", "//v1//chat/completions", body)).status == 200


async def test_an_old_probe_without_a_host_is_answered() -> None:
    async with (
        running((scripted_config(), scripted_load())) as server,
        connect(server.port) as exchange,
    ):
        await exchange.stream.send_all(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await exchange.stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_a_503_of_health_says_when_to_ask_again() -> None:
    gate = Gate(open=False)
    load = scripted_load(on_runner=lambda _: gate([]))
    async with running((scripted_config(), load), wait_ready=False) as server:
        health = await request(server.port, "GET", "/health")
        assert (health.status, health.headers["retry-after"]) == (503, "5")
        gate.open()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not(chunked: bool) -> None:
    limit = 1000
    body = json.dumps(chat_body("x")).encode()
    load = scripted_load(script=answer("1"))
    async with running((scripted_config(), load), max_body_bytes=limit) as server:
        for size, status in ((limit, b"HTTP/1.1 200"), (limit + 1, b"HTTP/1.1 413")):
            raw = body.ljust(size)
            framing = f"Content-Length: {size}".encode()
            if chunked:
                framing, raw = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (size, raw)
            async with connect(server.port) as exchange:
                await exchange.stream.send_all(
                    b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n%s"
                    % (CHAT.encode(), framing, raw)
                )
                assert (await exchange.stream.receive_some()).startswith(status)


async def test_a_body_that_never_begins_is_given_up_too() -> None:
    async with (
        running((scripted_config(), scripted_load()), client_stall_timeout=0.2) as server,
        connect(server.port) as exchange,
    ):
        await exchange.stream.send_all(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n".encode()
        )
        with trio.fail_after(PATIENCE):
            assert (await exchange.stream.receive_some()).startswith(b"HTTP/1.1 408")


async def test_a_body_that_trickles_is_given_up_although_it_never_stops() -> None:
    async with (
        running((scripted_config(), scripted_load()), client_stall_timeout=0.2) as server,
        connect(server.port) as exchange,
        trio.open_nursery() as nursery,
    ):
        await exchange.stream.send_all(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n".encode()
        )

        async def trickle() -> None:
            while True:
                await trio.sleep(0.02)
                with contextlib.suppress(trio.BrokenResourceError):
                    await exchange.stream.send_all(b"{")

        nursery.start_soon(trickle)
        with trio.fail_after(PATIENCE):
            assert (await exchange.stream.receive_some()).startswith(b"HTTP/1.1 408")
        nursery.cancel_scope.cancel()


async def test_once_it_drains_good_answers_close_their_connections_too() -> None:
    gate = Gate(open=False)
    load = scripted_load(script=answer("1"), before_decode=gate)
    async with (
        running((scripted_config(), load)) as server,
        server.chatting("x") as whole,
        connect(server.port) as kept,
    ):
        assert "connection" not in (await kept.request("GET", "/health")).headers
        await trio.to_thread.run_sync(gate.reached.wait)
        await server.server._router.drain()
        health = await kept.request("GET", "/health")
        assert (health.status, health.headers["connection"]) == (200, "close")
        gate.open()
        answered = await whole.read_rest()
        assert (answered.status, answered.headers["connection"]) == (200, "close")


async def test_usage_counts_the_prompt_with_its_template_and_adds_up() -> None:
    async with running((scripted_config(), scripted_load(script=answer("abc")))) as server:
        usage = (await server.chat("x")).json()["usage"]
    # BOS, a byte, a line end and ">"; three bytes and the end of the turn.
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 4, 8)


async def test_the_slot_is_back_with_the_last_byte_however_long_the_framework_takes_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framework_may_end = trio.Event()
    original = TrioASGIHTTPConnection.__call__

    async def dawdle(self: Any, receive: Any, send: Any) -> None:
        await original(self, receive, send)
        if self.scope["path"] == CHAT:
            await framework_may_end.wait()

    monkeypatch.setattr(TrioASGIHTTPConnection, "__call__", dawdle)
    async with (
        running((scripted_config(), scripted_load(script=answer("1")))) as server,
        server.chatting("x", stream=True) as exchange,
    ):
        assert streamed_text((await exchange.read_rest()).text) == "1"
        with trio.fail_after(PATIENCE):
            await server.until_idle()
        framework_may_end.set()


async def test_a_model_is_found_by_its_alias_and_shown_by_its_name() -> None:
    async with running((scripted_config("first", aliases=("one",)), scripted_load())) as server:
        by_name = await request(server.port, "GET", "/v1/models/first")
        by_alias = await request(server.port, "GET", "/v1/models/one")
    assert by_name.json()["id"] == "first"
    assert by_alias.json() == by_name.json()
