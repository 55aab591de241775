"""Limits, stalls, TLS and the steps of a shutdown."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme

from dflash_trio.net import ConnectionServer, bind_listeners, server_ssl_context
from tests.net.net_helpers import (
    NEVER,
    PLAIN_REQUEST,
    Client,
    Server,
    TinyApp,
    linger_at_most,
    pass_and_read,
    running_server,
)
from tests.support.http_client import PATIENCE

POST = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


def get(path: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()


class BlindApp(TinyApp):
    """Answers ``/big`` without ever looking for a disconnect."""

    on_big = TinyApp.on_big_blindly


# --- clients that do not read


async def test_a_client_that_reads_nothing_loses_its_connection_and_nobody_else_waits() -> None:
    async with running_server(stall_timeout=1.0) as server:
        async with await server.connect(receive_buffer=4096) as client:
            started = trio.current_time()
            await client.send(get("/big"))
            await server.until_open(1)
            await server.check_alive()
            await server.until_open(0)
            assert trio.current_time() - started >= 1.0
        assert server.app.disconnects == 1
        assert server.server.statistics().stalled == 1
        await server.check_alive()


async def test_a_client_that_reads_slowly_keeps_its_connection(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with (
        running_server(stall_timeout=2.0) as server,
        await server.connect(receive_buffer=4096) as client,
    ):
        await client.send(get("/big"))
        for _ in range(30):
            await pass_and_read(mock_clock, 0.1, client.stream, 4000)
        assert server.server.statistics().open == 1
        assert server.server.statistics().stalled == 0


async def test_aborting_cuts_writers_that_cancellation_cannot_reach() -> None:
    async with running_server(app=BlindApp()) as server:
        clients = [await server.connect(receive_buffer=4096) for _ in range(3)]
        for client in clients:
            await client.send(get("/big"))
        await server.until_open(3)
        await wait_until_writers_block(server)
        server.server.stop_accepting()
        server.server.close_idle()
        server.server.abort_connections()
        with trio.fail_after(PATIENCE):
            await server.ended.wait()
        for client in clients:
            await client.until_closed()
            await client.stream.aclose()


async def test_aborting_reaches_a_connection_whose_reader_waits_for_the_application() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(get("/until-gone") + PLAIN_REQUEST * 10_000)
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        server.server.stop_accepting()
        server.server.abort_connections()
        with trio.fail_after(PATIENCE):
            await server.ended.wait()
        assert server.app.disconnects == 1
        server.server.abort_connections()


async def wait_until_writers_block(server: Server) -> None:
    seen = -1
    while seen != server.app.sent_chunks:
        seen = server.app.sent_chunks
        await trio.sleep(0.05)


# --- shutting down


async def test_a_stopped_server_refuses_connects_and_ends_with_its_last_connection() -> None:
    async with running_server() as server, await server.connect() as busy:
        await busy.send(get("/hold"))
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        server.server.stop_accepting()
        server.server.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            await server.connect()
        assert not server.server.statistics().accepting
        server.server.close_idle()
        server.app.go_on.set()
        answer = await busy.answer()
        assert (answer.status, answer.body) == (200, b"held")
        assert answer.headers["connection"] == "close"
        assert await busy.until_closed() == b""
        with trio.fail_after(PATIENCE):
            await server.ended.wait()


async def test_a_server_stopped_before_it_serves_returns_at_once() -> None:
    server = ConnectionServer(
        TinyApp(), listeners=bind_listeners("127.0.0.1", 0), stall_timeout=1, max_connections=1
    )
    server.stop_accepting()
    with trio.fail_after(PATIENCE):
        await server.serve()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: h", PLAIN_REQUEST],
    ids=["nothing", "half a line", "half the headers", "kept alive"],
)
async def test_connections_without_a_request_close_at_once(sent: bytes) -> None:
    async with running_server() as server, await server.connect() as client:
        if sent:
            await client.send(sent)
        if sent == PLAIN_REQUEST:
            assert (await client.answer()).status == 200
        await server.until_open(1)
        await server.check_alive()  # what was sent has been read by now
        server.server.stop_accepting()
        server.server.close_idle()
        server.server.close_idle()
        with trio.fail_after(PATIENCE):
            assert await client.until_closed() == b""
            await server.ended.wait()


@pytest.mark.parametrize("kept_alive", [True, False])
@pytest.mark.parametrize("turns", range(12))
async def test_a_request_that_comes_as_idle_connections_close_is_answered(
    turns: int, kept_alive: bool
) -> None:
    async with running_server() as server, await server.connect() as client:
        if kept_alive:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200
        await server.until_open(1)
        await server.check_alive()
        os.write(client.stream.socket.fileno(), PLAIN_REQUEST)  # as a send, without a turn
        # At each moment from the socket to the application.
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        server.server.stop_accepting()
        server.server.close_idle()
        answer = await client.answer()
        assert answer.status == 200
        with trio.fail_after(PATIENCE):
            assert await client.until_closed() == b""
            await server.ended.wait()


@pytest.mark.parametrize("turns", range(12))
async def test_a_request_that_comes_as_its_connection_has_been_idle_for_long_is_answered(
    turns: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_server(keep_alive_timeout=5.0) as server, await server.connect() as client:
        await client.send(PLAIN_REQUEST)
        assert (await client.answer()).status == 200
        await trio.testing.wait_all_tasks_blocked()
        os.write(client.stream.socket.fileno(), PLAIN_REQUEST)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        autojump_clock.jump(5.0)
        assert (await client.answer()).status == 200


async def test_a_connection_in_its_tls_handshake_closes_at_once(tls: Tls) -> None:
    async with (
        running_server(ssl_context=tls.server) as server,
        await server.connect() as client,
    ):
        await client.send(b"\x16\x03")
        await server.until_open(1)
        server.server.stop_accepting()
        server.server.close_idle()
        with trio.fail_after(PATIENCE):
            await client.until_closed()
            await server.ended.wait()


async def test_a_half_sent_body_delays_nothing_after_its_answer() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(POST % (b"/hold-then-refuse", 100) + b"half")
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        server.server.stop_accepting()
        server.server.close_idle()
        server.app.go_on.set()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await client.until_closed() == b""
        # The client says nothing more, so lingering ends.
        with trio.fail_after(PATIENCE):
            await server.ended.wait()


async def test_a_request_behind_the_last_answer_is_not_served() -> None:
    async with running_server() as server, await server.connect() as client:
        await client.send(get("/hold") + get("/second"))
        with trio.fail_after(PATIENCE):
            await server.app.reached.wait()
        server.server.close_idle()
        server.app.go_on.set()
        assert (await client.answer()).body == b"held"
        assert await client.until_closed() == b""
        assert len(server.app.requests) == 1


async def test_cancelling_the_server_ends_it_whatever_its_connections_do() -> None:
    async with running_server() as server:
        clients = [await server.connect() for _ in range(3)]
        await clients[0].send(get("/hold"))
        await clients[1].send(b"GET /")
        await clients[2].send(POST % (b"/echo", 10) + b"half")
        await server.until_open(3)
    for client in clients:
        await client.until_closed()
        await client.stream.aclose()


# --- limits


async def test_a_connection_over_the_limit_gets_503_and_is_counted() -> None:
    async with running_server(max_connections=1) as server:
        async with await server.connect() as first:
            await first.send(PLAIN_REQUEST)
            assert (await first.answer()).status == 200
            async with await server.connect() as second:
                await second.send(PLAIN_REQUEST)
                (await second.answer()).check_error(503)
                assert await second.until_closed() == b""
            statistics = server.server.statistics()
            assert (statistics.open, statistics.total, statistics.refused) == (1, 1, 1)
        await server.until_open(0)
        await server.check_alive()


OUT_OF_DESCRIPTORS = """
import logging, resource, sys, trio
from dflash_trio.net import ConnectionServer, bind_listeners
logging.basicConfig(level=logging.CRITICAL)

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})

async def main():
    listeners = bind_listeners("127.0.0.1", 0)
    server = ConnectionServer(app, listeners=listeners, stall_timeout=5, max_connections=999)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, hard))
        try:
            while True:
                clients.append(await trio.open_tcp_stream("127.0.0.1", listeners.port))
        except (OSError, ExceptionGroup):
            pass
        await trio.sleep(0.3)  # accept(2) fails meanwhile
        assert server.statistics().open < len(clients)
        for client in clients:
            await client.aclose()
        with trio.fail_after(120):
            client = await trio.open_tcp_stream("127.0.0.1", listeners.port)
            await client.send_all(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
            assert (await client.receive_some(100)).startswith(b"HTTP/1.1 204")
            await client.aclose()
        server.stop_accepting()
        server.close_idle()
    print("recovered")

trio.run(main)
"""


async def test_running_out_of_file_descriptors_is_survived() -> None:
    with trio.fail_after(PATIENCE):
        result = await trio.run_process(
            [sys.executable, "-c", OUT_OF_DESCRIPTORS],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert result.stdout.decode().strip() == "recovered", result.stdout.decode()


async def test_an_error_of_one_connection_is_one_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object) -> None:
        raise ZeroDivisionError("on purpose")

    async with running_server() as server:
        with monkeypatch.context() as patch:
            patch.setattr("dflash_trio.net.connection.Connection._read_data", broken)
            async with await server.connect() as client:
                await client.until_closed()
        await server.check_alive()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in lines] == ["dflash_trio.net"]
    assert "ZeroDivisionError" in lines[0].getMessage()


# --- TLS


class Tls:
    """A certificate for 127.0.0.1 and both sides' contexts."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("127.0.0.1")
        certificate, key = directory / "cert.pem", directory / "key.pem"
        for index, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(certificate, append=index > 0)
        leaf.private_key_pem.write_to_path(key)
        self.server = server_ssl_context(str(certificate), str(key))
        self.client = ssl.create_default_context()
        authority.configure_trust(self.client)

    async def connect(self, server: Server, *, receive_buffer: int | None = None) -> Client:
        plain = await server.connect(receive_buffer=receive_buffer)
        stream = trio.SSLStream(
            plain.stream, self.client, server_hostname="127.0.0.1", https_compatible=True
        )
        return Client(stream)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(tmp_path)


async def test_tls_serves_http_1_1_even_to_a_client_that_offers_http_2_first(tls: Tls) -> None:
    tls.client.set_alpn_protocols(["h2", "http/1.1"])
    async with running_server(ssl_context=tls.server) as server:
        async with await tls.connect(server) as client:
            for size in (4, 300_000):
                await client.send(POST % (b"/echo", size) + bytes(size))
                assert (await client.answer()).body == b"%d bytes" % size
            assert isinstance(client.stream, trio.SSLStream)
            assert client.stream.selected_alpn_protocol() == "http/1.1"
            assert server.app.requests[0]["scheme"] == "https"
            server.server.close_idle()
            assert await client.until_closed() == b""
        await server.until_open(0)


async def test_an_early_refusal_over_tls_is_readable_while_the_body_is_in_flight(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=NEVER)
    async with running_server(ssl_context=tls.server) as server:
        async with await tls.connect(server) as client:
            await client.send(POST % (b"/refuse", 10_000_000))
            with trio.fail_after(PATIENCE):
                await client.stream.send_all(bytes(10_000_000))
            assert (await client.answer()).status == 413
            assert await client.until_closed() == b""
        await server.until_open(0)


async def test_a_tls_client_that_reads_nothing_loses_its_connection(tls: Tls) -> None:
    async with running_server(stall_timeout=1.0, ssl_context=tls.server) as server:
        async with await tls.connect(server, receive_buffer=4096) as client:
            await client.send(get("/big"))
            await server.until_open(1)
            with trio.fail_after(PATIENCE):
                await server.app.disconnected.wait()
            await server.until_open(0)
        assert server.server.statistics().stalled == 1


async def test_aborting_cuts_a_tls_writer(tls: Tls) -> None:
    async with (
        running_server(app=BlindApp(), ssl_context=tls.server) as server,
        await tls.connect(server, receive_buffer=4096) as client,
    ):
        await client.send(get("/big"))
        await server.until_open(1)
        await wait_until_writers_block(server)
        server.server.stop_accepting()
        server.server.abort_connections()
        with trio.fail_after(PATIENCE):
            await server.ended.wait()


@pytest.mark.parametrize("data", [PLAIN_REQUEST, b"", b"\x16\x03\x01", bytes(5000)])
async def test_a_plain_client_on_a_tls_port_does_no_harm(data: bytes, tls: Tls) -> None:
    # These wait for more, and the bound ends them.
    timeout = 1.0 if data in (b"", b"\x16\x03\x01") else NEVER
    async with running_server(ssl_context=tls.server, handshake_timeout=timeout) as server:
        async with await server.connect() as client:
            if data:
                await client.send(data)
            await client.until_closed()
        await server.until_open(0)
        server.server._config.ssl_handshake_timeout = NEVER
        async with await tls.connect(server) as client:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200


async def test_a_tls_client_over_the_limit_is_closed(tls: Tls) -> None:
    async with running_server(ssl_context=tls.server, max_connections=0) as server:
        async with await server.connect() as client:
            assert await client.until_closed() == b""
        assert server.server.statistics().refused == 1


async def test_a_slow_reader_over_a_unix_socket_is_watched_too(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listeners = bind_listeners(f"unix:{path}", 0)
    async with running_server(listeners=listeners, stall_timeout=1.0) as server:
        with trio.socket.socket(socket.AF_UNIX) as sock:
            await sock.connect(str(path))
            await sock.send(get("/big"))
            await server.until_open(1)
            with trio.fail_after(PATIENCE):
                await server.app.disconnected.wait()
            await server.until_open(0)


async def test_a_connection_over_the_limit_is_told_when_to_come_again() -> None:
    async with (
        running_server(max_connections=1) as server,
        await server.connect() as first,
        await server.connect() as second,
    ):
        await first.send(PLAIN_REQUEST)
        assert (await first.answer()).status == 200
        await second.send(PLAIN_REQUEST)
        refused = await second.answer()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
