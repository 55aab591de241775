"""Ordinary HTTP/1.1, and the application's own mistakes."""

from __future__ import annotations

import logging

import pytest
import trio

from dflash_trio.net import h11_protocol
from tests.net.net_helpers import NEVER, PLAIN_REQUEST, linger_at_most, running_server
from tests.support.http_client import PATIENCE

POST = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n"
EXPECT = b"Expect: 100-continue\r\n"


async def test_a_connection_serves_many_requests_and_closes_when_asked() -> None:
    async with running_server() as server, await server.connect() as client:
        for _ in range(5):
            await client.send(POST % (b"/echo", 4, b"") + b"four")
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"4 bytes")
            assert "connection" not in answer.headers
            assert "server" not in answer.headers
            assert "date" in answer.headers
        await client.send(POST % (b"/echo", 4, b"Connection: close\r\n") + b"four\r\n")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.until_closed() == b""
        assert server.server.statistics().total == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    paths = [b"/a", b"/b", b"/c"]
    data = b"".join(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path for path in paths)
    async with running_server() as server, await server.connect() as client:
        await client.send(data + POST % (b"/echo", 3, b"") + b"abc")
        bodies = [(await client.answer()).body for _ in range(4)]
        assert bodies == [b"ok /a", b"ok /b", b"ok /c", b"3 bytes"]


async def test_a_long_pipeline_is_read_only_as_far_as_it_is_served() -> None:
    count = 500
    request = PLAIN_REQUEST.replace(b"\r\n\r\n", b"\r\nX-Pad: " + b"p" * 500 + b"\r\n\r\n")
    assert count * len(request) > 3 * h11_protocol.MAX_LOOKAHEAD_BYTES
    async with running_server() as server, await server.connect() as client:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.stream.send_all, request * count)
                for _ in range(count):
                    assert (await client.answer()).status == 200


async def test_a_long_pipeline_behind_a_slow_answer_is_given_up_after_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(h11_protocol, "PARK_SECONDS", 0.1)
    async with running_server() as server, await server.connect() as client:
        data = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n" + PLAIN_REQUEST * 50_000
        await client.send(data)  # which gets through only because what is too much is dropped
        server.app.go_on.set()
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"held", "close")
        assert await client.until_closed() == b""
        assert len(server.app.requests) == 1


async def test_http_1_0_gets_no_chunks_and_a_closed_connection() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"one two")
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"


async def test_empty_lines_before_a_request_are_ignored() -> None:
    async with running_server() as server, await server.connect() as client:
        for _ in range(3):
            await client.send(b"\r\n")
            await client.send(b"\r\n" + PLAIN_REQUEST)
            assert (await client.answer()).status == 200
            await client.send(POST % (b"/echo", 4, b"") + b"four\r\n")
            assert (await client.answer()).status == 200


async def test_a_head_request_gets_headers_only() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await client.answer(omits_body=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "4")
        await client.send(b"HEAD /mute HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer(omits_body=True)).status == 500
        assert await client.until_closed() == b""


async def test_100_continue_is_sent_once_and_only_when_the_body_is_awaited() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(POST % (b"/continue", 4, EXPECT))
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        with trio.move_on_after(0.1):
            await client.stream.receive_some(1)
            raise AssertionError("something was sent before the body was awaited")
        server.app.go_on.set()
        assert (await client.answer()).status == 100
        await client.send(b"four")
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"4 bytes")
        # The connection lives on, and the next request has its own expectation.
        await client.send(POST % (b"/continue", 4, EXPECT))
        assert (await client.answer()).status == 100
        await client.send(b"four")
        assert (await client.answer()).body == b"4 bytes"


@pytest.mark.parametrize("headers", [b"", EXPECT], ids=["not asked for", "body already sent"])
async def test_100_continue_is_not_sent_when_it_is_not_waited_for(headers: bytes) -> None:
    async with running_server() as server, await server.connect() as client:
        server.app.go_on.set()
        await client.send(POST % (b"/continue", 4, headers) + b"four")
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"4 bytes")


async def test_a_refusal_of_an_expectation_costs_no_upload() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(POST % (b"/refuse", 10**9, EXPECT))
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"too large")
        assert answer.headers["connection"] == "close"
        assert await client.until_closed() == b""


async def test_an_early_refusal_is_readable_while_the_body_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=NEVER)
    size = 30_000_000
    async with running_server() as server, await server.connect() as client:
        await client.send(POST % (b"/refuse", size, b""))
        # A client that sends everything before it reads: without lingering it would be reset.
        with trio.fail_after(PATIENCE):
            await client.stream.send_all(bytes(size))
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"too large")
        assert await client.until_closed() == b""
        await client.stream.aclose()
        await server.until_open(0)


async def test_an_application_that_reads_no_body_is_not_held_up_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=NEVER)
    async with running_server() as server, await server.connect() as client:
        await client.send(POST % (b"/hold-then-refuse", 30_000_000, b""))
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        with trio.move_on_after(0.3):  # until every buffer on the way is full
            await client.stream.send_all(bytes(20_000_000))
        server.app.go_on.set()
        assert (await client.answer()).status == 503
        assert await client.until_closed() == b""
        await client.stream.aclose()
        await server.until_open(0)


@pytest.mark.parametrize(
    ("path", "log"),
    [
        (b"/mute", None),
        (b"/fail", "the application failed"),
        (b"/bad-header", "the application broke the rules of HTTP"),
    ],
)
async def test_an_application_without_a_valid_answer_makes_a_json_500(
    path: bytes, log: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server() as server:
        answer = await server.ask(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        answer.check_error(500)
        await server.check_alive()
    lines = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(lines) == (log is not None)
    assert log is None or lines[0].getMessage().startswith(log)
    assert all(record.name == "dflash_trio.net" for record in lines)


@pytest.mark.parametrize("path", [b"/fail-late", b"/too-long"])
async def test_an_application_that_fails_in_its_answer_cuts_the_connection(path: bytes) -> None:
    async with running_server() as server:
        async with await server.connect() as client:
            await client.send(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            data = await client.until_closed()
            assert data.startswith(b"HTTP/1.1 200")
            assert b"0\r\n\r\n" not in data  # no end of the body is pretended
        await server.check_alive()


async def test_a_half_closed_client_counts_as_gone() -> None:
    async with running_server() as server, await server.connect() as client:
        assert isinstance(client.stream, trio.SocketStream)
        await client.send(b"GET /until-gone HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.stream.send_eof()
        assert await client.until_closed() == b""
        assert server.app.disconnects == 1


async def test_a_connection_without_a_request_closes_after_the_keep_alive_timeout() -> None:
    async with running_server(keep_alive_timeout=1.0) as server:
        async with await server.connect() as client:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200
            assert await client.until_closed() == b""
        async with await server.connect() as client:
            await client.send(b"GET / HTTP/1.1\r\nHos")
            assert await client.until_closed() == b""
