"""Raw connections: every byte, the receive window and the way to leave are the client's choice.

h11 does the parsing, so an answer that breaks HTTP's rules (a wrong Content-Length, a chunked body
without its end) shows up as one that was cut or malformed, never as a shorter body.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import attrs
import h11
import trio

Leaving = Literal["FIN", "RST"]

_TCP_CLOSE = 7  # Linux <net/tcp_states.h>


class Malformed(Exception):
    """The server's bytes are not HTTP."""


@attrs.define
class Answer:
    """A whole response, or what came of it."""

    status: int
    """0 when the connection ended without a response."""
    headers: dict[str, str]
    body: bytes
    complete: bool
    """Whether it ended as HTTP says it must; False: the connection was cut."""

    def json(self) -> Any:
        return json.loads(self.body)


class Response:
    """One response being read. ``method``: of its request, since HEAD's have no body."""

    def __init__(self, wire: Wire, method: str) -> None:
        self._wire = wire
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=256 * 1024)
        # What was really sent may have been garbage: h11 only has to know what to expect.
        self._h11.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._h11.send(h11.EndOfMessage())
        if wire.unread:
            self._h11.receive_data(wire.unread)
            wire.unread = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False
        self.cut = False
        self.continued = False
        """A 100 Continue has come."""

    async def head(self) -> int:
        """Wait for status and headers; 0 when the connection ends before them."""
        while not self.status and not self.cut:
            await self._event()
        return self.status

    async def part(self) -> bytes:
        """The next bytes of the body; ``b""`` at its end, whichever way it ended."""
        while not (self.ended or self.cut):
            event = await self._event()
            if isinstance(event, h11.Data) and event.data:
                return bytes(event.data)
        return b""

    async def rest(self) -> Answer:
        """Everything to the end."""
        parts = []
        if await self.head():
            while data := await self.part():
                parts.append(data)
        return Answer(self.status, self.headers, b"".join(parts), self.ended)

    async def until_continue(self) -> bool:
        """Wait for 100 Continue; False when something else came first."""
        while not (self.continued or self.status or self.cut):
            await self._event()
        return self.continued

    async def _event(self) -> Any:
        try:
            event = self._h11.next_event()
            while event is h11.NEED_DATA:
                data = await self._wire.receive()
                if not data and not self.status:
                    self.cut = True
                    return None
                self._h11.receive_data(data)
                event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if self._wire.at_end:
                self.cut = True  # in the middle of a body
                return None
            raise Malformed(str(error)) from error
        if isinstance(event, h11.InformationalResponse):
            self.continued = self.continued or event.status_code == 100
        elif isinstance(event, h11.Response):
            self.status = event.status_code
            self.headers = {n.decode(): v.decode("latin-1") for n, v in event.headers}
        elif isinstance(event, h11.EndOfMessage):
            self.ended = True
            self._wire.unread = bytes(self._h11.trailing_data[0])
        elif isinstance(event, h11.ConnectionClosed):
            self.cut = not self.ended
        return event


class Wire:
    """A connection to the server."""

    def __init__(self, sock: trio.socket.SocketType, read_size: int) -> None:
        self._socket = sock
        self._read_size = read_size
        self.unread = b""
        """What came behind the last response."""
        self.at_end = False
        """The server has ended its side, properly or not."""
        self.was_reset = False

    async def send(self, data: bytes) -> bool:
        """Send all of it; False when the server has ended the connection meanwhile."""
        view = memoryview(data)
        try:
            while view:
                view = view[await self._socket.send(view) :]
        except OSError:
            # A server that refuses early may have closed already: its answer counts, not this.
            return False
        return True

    async def receive(self) -> bytes:
        """Some bytes; ``b""`` at the end of file or after a reset."""
        if self.at_end:
            return b""
        try:
            data = await self._socket.recv(self._read_size)
        except OSError:
            self.was_reset = True
            data = b""
        self.at_end = not data
        return data

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a whole request; its response, not read yet."""
        await self.send(request_bytes(method, path, body, headers))
        return Response(self, method)

    async def until_closed(self) -> bytes:
        """Everything that still comes, to the connection's end."""
        parts = [self.unread]
        self.unread = b""
        while data := await self.receive():
            parts.append(data)
        return b"".join(parts)

    def is_gone(self) -> bool:
        """Whether the connection is over although we have not read to its end (Linux only)."""
        if sys.platform != "linux":
            return False
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == _TCP_CLOSE

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def leave(self, how: Leaving) -> None:
        """Go now. ``RST``: without the goodbye."""
        if how == "RST":
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()


@contextlib.asynccontextmanager
async def connect(port: int, *, window: int | None = None) -> AsyncIterator[Wire]:
    """A connection to a server on this machine, closed at the end of the block.

    ``window``: bytes of receive buffer, set before connecting so that it bounds what is on its
    way to us; reads are then of that size too.
    """
    sock = trio.socket.socket()
    if window is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    with sock:
        await sock.connect(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Wire(sock, window or 65536)


def request_bytes(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A well-formed request, unless the caller's own headers say otherwise."""
    fields = {"Host": "127.0.0.1", **(headers or {})}
    if body is not None:
        fields.setdefault("Content-Type", "application/json")
        if "Transfer-Encoding" not in fields:
            fields.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def chunked(parts: list[bytes]) -> bytes:
    """A body in HTTP's chunked coding."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
