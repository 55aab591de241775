"""A tiny ASGI application, a server around it, and a client that speaks raw bytes."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dflash_trio.net import (
    SEND_CONTINUE,
    BoundListeners,
    ConnectionServer,
    bind_listeners,
    stream,
)
from tests.support.http_client import PATIENCE

NEVER = 3600.0
"""Seconds that no test waits: ``PATIENCE`` is over long before."""
PLAIN_REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
# Longer than both kernel buffers can hide.
BIG_ANSWER_BYTES = 64 * 1024 * 1024


class TinyApp:
    """Pure ASGI; what it does is chosen by the path. Tests see its inside through attributes."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.disconnects = 0
        self.disconnected = trio.Event()
        self.reached = trio.Event()
        self.go_on = trio.Event()
        self.sent_chunks = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(scope)
        handler = getattr(self, "on_" + scope["path"].strip("/").replace("-", "_"), self.on_)
        await handler(scope, receive, send)

    async def answer(self, send: Any, status: int, body: bytes, *headers: Any) -> None:
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def read_body(self, receive: Any) -> bytes | None:
        """The whole body, or None after a disconnect."""
        body = b""
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                self.disconnects += 1
                self.disconnected.set()
                return None
            body += event["body"]
            if not event["more_body"]:
                return body

    async def on_(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answer(send, 200, b"ok " + scope["path"].encode())

    async def on_echo(self, scope: Any, receive: Any, send: Any) -> None:
        body = await self.read_body(receive)
        if body is not None:
            await self.answer(send, 200, b"%d bytes" % len(body))

    async def on_refuse(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answer(send, 413, b"too large")

    async def on_hold_then_refuse(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.set()
        await self.go_on.wait()
        await self.answer(send, 503, b"draining")

    async def on_continue(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.set()
        await self.go_on.wait()
        for _ in range(2):
            await scope["state"][SEND_CONTINUE]()
        await self.on_echo(scope, receive, send)

    async def on_hold(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.set()
        await self.go_on.wait()
        await self.answer(send, 200, b"held")

    async def on_until_gone(self, scope: Any, receive: Any, send: Any) -> None:
        await self.read_body(receive)
        self.reached.set()
        await self.read_body(receive)
        assert (await receive())["type"] == "http.disconnect"

    async def on_big(self, scope: Any, receive: Any, send: Any) -> None:
        """An answer too large for the kernel, watched for a disconnect at the same time."""
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def watch() -> None:
                await self.read_body(receive)
                await self.read_body(receive)
                nursery.cancel_scope.cancel()

            await self.on_big_blindly(scope, receive, send)
            nursery.cancel_scope.cancel()

    async def on_big_blindly(self, scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", str(BIG_ANSWER_BYTES).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        part = bytes(256 * 1024)
        for left in range(BIG_ANSWER_BYTES // len(part), 0, -1):
            await send({"type": "http.response.body", "body": part, "more_body": left > 1})
            self.sent_chunks += 1

    async def on_mute(self, scope: Any, receive: Any, send: Any) -> None:
        pass

    async def on_fail(self, scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("on purpose")

    async def on_fail_late(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ZeroDivisionError("on purpose")

    async def on_bad_header(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answer(send, 200, b"never seen", (b"x-bad", b"a\r\nb: c"))

    async def on_too_long(self, scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"2")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"four", "more_body": False})

    async def on_stream(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})


class Server:
    """A running ConnectionServer with its application."""

    def __init__(self, server: ConnectionServer, app: TinyApp, listeners: BoundListeners) -> None:
        self.server = server
        self.app = app
        self.listeners = listeners
        self.ended = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[object]) -> None:
        await self.server.serve(task_status=task_status)
        self.ended.set()

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", self.listeners.port))
        except OSError:
            sock.close()
            raise
        return Client(trio.SocketStream(sock))

    async def ask(self, data: bytes) -> Answer:
        """Send *data* on a connection of its own and read the first answer."""
        async with await self.connect() as client:
            await client.send(data)
            return await client.answer()

    async def check_alive(self) -> None:
        assert not self.ended.is_set()
        assert (await self.ask(PLAIN_REQUEST)).status == 200

    async def until_open(self, count: int) -> None:
        """Wait until exactly *count* connections are open."""
        with trio.fail_after(PATIENCE):
            while self.server.statistics().open != count:  # noqa: ASYNC110
                await trio.sleep(0.005)


class Answer:
    """One HTTP response, parsed no more than the tests need."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.version, status, *_ = first.split(" ")
        self.status = int(status)
        pairs = [line.partition(":") for line in lines]
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.body = body

    def check_error(self, status: int) -> str:
        """It is our JSON error with *status*; returns the message."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/json"
        assert self.headers["connection"] == "close"
        assert self.headers["x-request-id"]
        assert "date" in self.headers
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == (
            "server_error" if status in {500, 503} else "invalid_request_error"
        )
        assert error["param"] is error["code"] is None
        assert "Traceback" not in error["message"]
        return str(error["message"])


class Client:
    """The client's end of a connection; every wait is bounded by ``PATIENCE``."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.buffer = b""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self.stream)

    async def send(self, data: bytes) -> None:
        with trio.fail_after(PATIENCE):
            await self.stream.send_all(data)

    async def _more(self) -> bool:
        with trio.fail_after(PATIENCE):
            data = await self.stream.receive_some(65536)
        self.buffer += data
        return bool(data)

    async def answer(self, *, omits_body: bool = False) -> Answer:
        """The next response; its body by its Content-Length, or all until the end."""
        while b"\r\n\r\n" not in self.buffer:
            assert await self._more(), f"connection ended in the headers: {self.buffer!r}"
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        answer = Answer(head, b"")
        if answer.status < 200 or omits_body:
            return answer
        length = answer.headers.get("content-length")
        while length is None or len(self.buffer) < int(length):
            if not await self._more():
                assert length is None, "connection ended in the body"
                length = str(len(self.buffer))
        answer.body, self.buffer = self.buffer[: int(length)], self.buffer[int(length) :]
        return answer

    async def until_closed(self) -> bytes:
        """Everything that still comes before the peer's end; a reset counts as one."""
        try:
            while await self._more():
                pass
        except trio.BrokenResourceError:
            pass
        data, self.buffer = self.buffer, b""
        return data


def linger_at_most(monkeypatch: pytest.MonkeyPatch, *, quiet: float, altogether: float) -> None:
    """Replace the bounds of a lingering close. With ``NEVER`` it ends as the peer does."""
    monkeypatch.setattr(stream, "LINGER_QUIET_SECONDS", quiet)
    monkeypatch.setattr(stream, "LINGER_SECONDS", altogether)


async def pass_and_read(
    clock: trio.testing.MockClock, seconds: float, stream: trio.abc.ReceiveStream, count: int
) -> None:
    """Let time pass for everybody, then read so many bytes, which take none.

    The kernel has its own time for them: the clock waits, and so no pause of the machine's makes
    the reader slower than it is meant to be.
    """
    clock.jump(seconds)
    # Whoever looks at a queue then has done so.
    await trio.testing.wait_all_tasks_blocked()
    while count:
        data = await stream.receive_some(count)
        assert data
        count -= len(data)


@asynccontextmanager
async def running_server(
    *,
    app: TinyApp | None = None,
    listeners: BoundListeners | None = None,
    stall_timeout: float = NEVER,
    max_connections: int = 100,
    ssl_context: ssl.SSLContext | None = None,
    keep_alive_timeout: float = NEVER,
    handshake_timeout: float = NEVER,
) -> AsyncIterator[Server]:
    """A server on a free port of 127.0.0.1 unless told otherwise; cut when the block ends.

    Its timeouts are longer than a test has patience, so that what ends, ends for another reason.
    """
    app = app or TinyApp()
    listeners = listeners or bind_listeners("127.0.0.1", 0)
    server = ConnectionServer(
        app,
        listeners=listeners,
        stall_timeout=stall_timeout,
        max_connections=max_connections,
        ssl_context=ssl_context,
        keep_alive_timeout=keep_alive_timeout,
        handshake_timeout=handshake_timeout,
    )
    running = Server(server, app, listeners)
    async with trio.open_nursery() as nursery:
        await nursery.start(running.run)
        yield running
        nursery.cancel_scope.cancel()
