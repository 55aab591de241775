"""A small HTTP/1.1 client for tests, which can misbehave: h11 on a trio socket.

Real clients hide what these tests are about: when bytes come, how a connection ends, what happens
to one that is not read. Everything here is bounded by ``PATIENCE``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import h11
import trio

PATIENCE = 120.0
"""Seconds that a peer may keep a test waiting before it fails."""


@attrs.define
class Answer:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool
    """Whether the body ended as HTTP says it must; False: the connection was cut."""

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of an OpenAI-shaped answer."""
        assert self.headers["content-type"] == "application/json"
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return dict(error)


class Exchange:
    """One connection, with one request at a time on it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False
        """The response's last byte has come."""
        self.cut = False
        """The connection ended before it."""

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole request."""
        fields = {"host": "127.0.0.1", **(headers or {})}
        if body is not None:
            fields.setdefault("content-type", "application/json")
            fields["content-length"] = str(len(body))
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        data = self.connection.send(request) or b""
        if body:
            data += self.connection.send(h11.Data(data=body)) or b""
        data += self.connection.send(h11.EndOfMessage()) or b""
        # A server that refuses early may have closed already: its answer counts, not this.
        with contextlib.suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)

    async def read_headers(self) -> None:
        """Wait for the response to begin."""
        while not self.status and not self.cut:
            await self._next_event()

    async def read_some(self) -> bytes:
        """The next bytes of the body; ``b""`` at its end or when the connection was cut."""
        while not (self.ended or self.cut):
            event = await self._next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
        return b""

    async def read_rest(self) -> Answer:
        """Everything to the end."""
        await self.read_headers()
        parts = []
        while part := await self.read_some():
            parts.append(part)
        return Answer(self.status, self.headers, b"".join(parts), complete=self.ended)

    async def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Answer:
        """One more request on this connection, and its whole answer."""
        if self.ended:
            self.connection.start_next_cycle()
            self.status, self.headers, self.ended = 0, {}, False
        await self.send(method, path, body, headers)
        return await self.read_rest()

    async def _next_event(self) -> Any:
        while True:
            event = self.connection.next_event()
            if event is h11.NEED_DATA:
                with trio.fail_after(PATIENCE):
                    try:
                        data = await self.stream.receive_some(65536)
                    except trio.BrokenResourceError:
                        self.cut = True
                        return None
                if not data and self.connection.their_state in (h11.SEND_RESPONSE, h11.IDLE):
                    self.cut = True
                    return None
                try:
                    self.connection.receive_data(data)
                    if not data:
                        event = self.connection.next_event()
                    else:
                        continue
                except h11.RemoteProtocolError:
                    self.cut = True
                    return None
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {n.decode(): v.decode("latin-1") for n, v in event.headers}
            elif isinstance(event, h11.EndOfMessage):
                self.ended = True
            elif isinstance(event, h11.ConnectionClosed):
                self.cut = not self.ended
            return event

    def reset(self) -> None:
        """Leave with a RST instead of a FIN."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()


@contextlib.asynccontextmanager
async def connect(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[Exchange]:
    """A connection to a server on this machine, closed at the end of the block.

    ``receive_buffer``: bytes for SO_RCVBUF, set before connecting so that it bounds the window.
    """
    sock = trio.socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    with sock:
        await sock.connect(("127.0.0.1", port))
        yield Exchange(trio.SocketStream(sock))


async def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own. ``body``: bytes, or anything JSON can say."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with connect(port) as exchange:
        return await exchange.request(method, path, raw, **headers)
