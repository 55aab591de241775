"""Whatever bytes a client sends, the server answers the next client as if nothing had been."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import trio

from tests.net.net_helpers import PLAIN_REQUEST, Client, running_server
from tests.support.http_client import PATIENCE

HOST = b"Host: here\r\n"
TLS_HELLO = bytes.fromhex("160301020001000102fc0303") + bytes(range(256)) * 2

# name, bytes, the expected status of the JSON error (None: the input is answered by the app or
# by nothing at all, and only survival is promised).
MALFORMED: list[tuple[str, bytes, int | None]] = [
    ("random bytes", bytes(range(128, 256)) * 8 + b"\r\n\r\n", 400),
    ("nul bytes", b"\0" * 64, 400),
    ("nul in a header", b"GET / HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n", 400),
    ("TLS hello", TLS_HELLO, 400),
    ("no version (HTTP/0.9)", b"GET /\r\n\r\n", 400),
    ("version 0.9", b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505),
    ("version 3.0", b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 505),
    ("missing host", b"GET / HTTP/1.1\r\n\r\n", 400),
    ("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("space before colon", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    ("header without colon", b"GET / HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n", 400),
    ("fold before any header", b"GET / HTTP/1.1\r\n folded\r\n" + HOST + b"\r\n", 400),
    ("folded header", b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n  b\r\n\r\n", None),
    ("huge method", b"G" * 70_000 + b" / HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    ("huge target", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    ("100 KiB header", b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 102_400 + b"\r\n\r\n", 431),
    ("66 kB header", b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 66_000 + b"\r\n\r\n", 431),
    ("many headers", b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 12_000 + b"\r\n", 431),
    ("endless header", b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000, 431),
    ("bad target", b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("bad target port", b"GET http://a:b/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("target with a user", b"GET http://u@here/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("relative target", b"GET index.html HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("only a query", b"GET ?a=b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("foreign scheme", b"GET ftp://here/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("target of CONNECT", b"CONNECT here:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("asterisk", b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("negative length", b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
    ("length in hex", b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0x1\r\n\r\n", 400),
    (
        "length of 30 digits",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
        400,
    ),
    (
        "two lengths",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        400,
    ),
    (
        "length and chunked",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "unknown transfer encoding",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\n",
        501,
    ),
    (
        "chunked in HTTP/1.0",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "bad chunk size",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n",
        400,
    ),
    (
        "negative chunk size",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nab\r\n",
        400,
    ),
    (
        "huge chunk size",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"f" * 40 + b"\r\nab\r\n",
        400,
    ),
    (
        "bad chunk end",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX",
        400,
    ),
    (
        "websocket with a bad key and trailing bytes",
        b"GET / HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: bad\r\nSec-WebSocket-Version: 13\r\n\r\n\x81\x85trailing",
        400,
    ),
    (
        "websocket, well-formed",
        b"GET / HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade"
        b"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        400,
    ),
    ("unknown expectation", b"POST / HTTP/1.1\r\n" + HOST + b"Expect: tea\r\n\r\n", 417),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "status"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED]
)
async def test_malformed_input_gets_json_and_leaves_the_server_serving(
    data: bytes, status: int | None
) -> None:
    async with running_server() as server:
        async with await server.connect() as client:
            await client.send(data)
            answer = await client.answer()
            if status is None:
                assert answer.status == 200
            else:
                answer.check_error(status)
                assert await client.until_closed() == b""
        await server.check_alive()
        await server.until_open(0)


async def test_a_request_after_garbage_in_the_body_is_not_run() -> None:
    data = (
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    )
    async with running_server() as server:
        assert (await server.ask(data)).status == 400
        await server.until_open(0)
        assert [scope["path"] for scope in server.app.requests] == ["/echo"]
        assert server.app.disconnects == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: he",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
        b"GET /until-gone HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /until-gone HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n",
        b"GET /until-gone HTTP/1.1\r\nHost: a\r\n\r\n" + PLAIN_REQUEST,
        b"GET /until-gone HTTP/1.1\r\nHost: a\r\n\r\n" + PLAIN_REQUEST * 6000,
    ],
    ids=["nothing", "line", "headers", "body", "chunk", "request", "upgrade", "pipeline", "long"],
)
@pytest.mark.parametrize("how", ["end of file", "reset"])
async def test_a_client_that_leaves_at_any_point_frees_its_connection(
    data: bytes, how: str
) -> None:
    async with running_server() as server:
        async with await server.connect() as client:
            assert isinstance(client.stream, trio.SocketStream)
            if data:
                await client.send(data)
            await server.until_open(1)
            if b"until-gone" in data:
                with trio.fail_after(PATIENCE):
                    await server.app.reached.wait()
            if how == "reset":
                client.stream.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            await client.stream.aclose()
            await server.until_open(0)
        await server.check_alive()


async def test_an_idle_client_that_leaves_frees_its_connection() -> None:
    async with running_server() as server:
        async with await server.connect() as client:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200
        await server.until_open(0)


async def test_an_h2c_upgrade_is_served_as_plain_http() -> None:
    data = (
        b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    )
    async with running_server() as server, await server.connect() as client:
        for _ in range(2):  # and the connection lives on
            await client.send(data)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"ok /a")


async def test_an_absolute_target_is_routed_by_its_path_and_overrules_host() -> None:
    async with running_server() as server:
        answer = await server.ask(b"GET http://named:81/a%20b?c=d HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (answer.status, answer.body) == (200, b"ok /a b")
        scope = server.app.requests[0]
        assert scope["query_string"] == b"c=d"
        assert [value for name, value in scope["headers"] if name == b"host"] == [b"named:81"]
        for target in (b"http://named", b"http://named?x"):
            answer = await server.ask(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
            assert (answer.status, answer.body) == (200, b"ok /")


async def test_random_bytes_of_any_kind_do_no_harm() -> None:
    async with running_server() as server:
        for _ in range(40):
            async with await server.connect() as client:
                await client.send(os.urandom(300) + b"\r\n\r\n")
                await client.until_closed()
        await server.check_alive()


async def test_a_request_line_error_keeps_the_clients_own_id_only_where_it_was_read() -> None:
    async with running_server() as server:
        request = b"POST / HTTP/1.1\r\n" + HOST + b"X-Request-Id: mine-1\r\nExpect: tea\r\n\r\n"
        assert (await server.ask(request)).headers["x-request-id"] == "mine-1"
        evil = request.replace(b"mine-1", b"m" * 500)
        assert len((await server.ask(evil)).headers["x-request-id"]) < 100


async def test_a_secret_in_a_bad_header_is_not_repeated() -> None:
    async with running_server() as server:
        data = b"GET / HTTP/1.1\r\n" + HOST + b"Authorization\x01: Bearer s3cret\r\n\r\n"
        assert "s3cret" not in (await server.ask(data)).check_error(400)


async def test_a_client_one_byte_at_a_time_is_served() -> None:
    async with running_server() as server, await server.connect() as client:
        assert isinstance(client, Client)
        for index in range(len(PLAIN_REQUEST)):
            await client.send(PLAIN_REQUEST[index : index + 1])
        assert (await client.answer()).status == 200
