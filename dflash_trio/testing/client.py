"""One HTTP/1.1 client connection that sees everything: h11 on a trio socket.

Usual clients hide what a shutdown check is about: whether a response came whole, when its bytes
came, and how a connection ended. They also read as fast as they can; this one reads when told to.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import socket
import struct
import termios
from collections.abc import Callable, Mapping
from typing import Any

import h11
import trio
from attrs import field, frozen

TINY_BUFFER = 2048
"""SO_RCVBUF in bytes for readers that must not hide behind a buffer. The kernel rounds it up."""
WIDE_BUFFER = 1 << 20
READ_BYTES = 65536


class End(enum.Enum):
    """How an exchange ended for the client."""

    COMPLETE = "complete"
    """The response ended as HTTP says it must."""
    CUT = "cut"
    """The connection ended inside the response."""
    CLOSED = "closed"
    """The connection ended before any byte of a response."""
    REFUSED = "refused"
    """There was no connection."""
    OPEN = "open"
    """Nothing had ended when the check stopped waiting."""
    LEFT = "left"
    """The client went away itself."""


@frozen
class Seen:
    """What a client saw of one request. Times are on trio's clock."""

    end: End
    status: int | None = None
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes = field(default=b"", repr=False)
    wire_bytes: int = 0
    """Everything read from the socket, framing and headers included."""
    first_byte_at: float | None = None
    ended_at: float | None = None


@frozen
class Address:
    """Where the server listens: a TCP port of 127.0.0.1, or a Unix socket's path."""

    port: int | None = None
    socket_path: str | None = None

    async def connect(self, *, receive_buffer: int | None = None) -> Exchange:
        """A new connection, owned by the caller. OSError when there is none to be had."""
        if self.socket_path is not None:
            return Exchange(await trio.open_unix_socket(self.socket_path), None)
        sock = trio.socket.socket()
        try:
            if receive_buffer is not None:
                # Before connecting, so that it bounds the window that is offered.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await sock.connect(("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return Exchange(trio.SocketStream(sock), self.port)

    async def accepts(self) -> bool:
        """Whether somebody listens there. Connects and leaves again; a second at most."""
        with trio.move_on_after(1.0):
            try:
                exchange = await self.connect()
            except OSError:
                return False
            exchange.close()
        return True  # no answer at all is no refusal either


class Exchange:
    """A connection with one request at a time on it. Close it with :meth:`close`.

    The fields describe the current request; :meth:`seen` is a snapshot of them. One task reads.
    """

    def __init__(self, stream: trio.SocketStream, port: int | None) -> None:
        self.stream = stream
        self._port = port
        self._connection = h11.Connection(h11.CLIENT)
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._end: End | None = None
        self._wire_bytes = 0
        self._first_byte_at: float | None = None
        self._ended_at: float | None = None
        self._news = trio.Event()

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def begun(self) -> bool:
        """Whether a byte of the response has been read."""
        return self._wire_bytes > 0

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @property
    def wire_bytes(self) -> int:
        return self._wire_bytes

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        states = (self._connection.our_state, self._connection.their_state)
        return self._end is End.COMPLETE and states == (h11.DONE, h11.DONE)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        sent_bytes: int | None = None,
    ) -> None:
        """Send a request; of its body only the first ``sent_bytes``, if that is given.

        A server that answers early may have closed already: its answer counts, not our error.
        """
        if self.reusable:
            self._begin_next()
        fields = {"host": "127.0.0.1", "user-agent": "dflash-shutdown-check", **(headers or {})}
        if body is not None:
            fields = {"content-type": "application/json", **fields}
            fields["content-length"] = str(len(body))
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        data = self._connection.send(request) or b""
        if body:
            data += self._connection.send(h11.Data(data=body[:sent_bytes])) or b""
        if sent_bytes is None:
            data += self._connection.send(h11.EndOfMessage()) or b""
        with contextlib.suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)

    def _begin_next(self) -> None:
        self._connection.start_next_cycle()
        self._status, self._headers, self._end = None, {}, None
        self._body.clear()
        self._wire_bytes = 0
        self._first_byte_at = self._ended_at = None

    def expect_close(self) -> None:
        """From now on nothing but the connection's end is awaited (an idle connection)."""
        if self.reusable:
            self._begin_next()

    async def receive(self, max_bytes: int = READ_BYTES) -> bool:
        """Take one piece from the socket; whether more is to come. Cancelling loses nothing."""
        if self._end is not None:
            return False
        data = b""
        broken = False
        try:
            data = await self.stream.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            broken = True
        if data:
            if not self._wire_bytes:
                self._first_byte_at = trio.current_time()
            self._wire_bytes += len(data)
        try:
            if not broken:
                self._connection.receive_data(data)
            self._take_events()
        except h11.RemoteProtocolError:
            self._finish(End.CUT if self.begun else End.CLOSED)
        if not data and self._end is None:
            self._finish(End.CUT if self.begun else End.CLOSED)
        self._tell()
        return self._end is None

    def _take_events(self) -> None:
        while True:
            event: Any = self._connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Response):
                self._status = event.status_code
                self._headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in event.headers}
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._finish(End.COMPLETE)
                return
            elif isinstance(event, h11.ConnectionClosed):
                return

    def _finish(self, end: End) -> None:
        self._end = end
        self._ended_at = trio.current_time()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def read_all(self) -> Seen:
        """Read to the end. Not bounded: the caller sets the deadline."""
        while await self.receive():
            pass
        return self.seen()

    def widen(self) -> None:
        """Take a tiny buffer back: for a client that has read nothing and now reads everything."""
        with contextlib.suppress(OSError):
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_BUFFER)

    async def read_slowly(self, piece: int, pause: float) -> None:
        """Read to the end, at most ``piece`` bytes every ``pause`` seconds."""
        while await self.receive(piece):  # noqa: ASYNC110 (no polling: a pace)
            await trio.sleep(pause)

    async def until(self, what: Callable[[Exchange], bool]) -> None:
        """Wait until ``what(self)``, looked at after each piece that another task reads, or the
        end of the exchange."""
        while not what(self) and self._end is None:
            await self._news.wait()

    def leave(self) -> None:
        """Close the connection from our side, at once."""
        if self._end is None:
            self._finish(End.LEFT)
        self.stream.socket.close()
        self._tell()

    def close(self) -> None:
        """Give the socket back. Harmless when done twice."""
        self.stream.socket.close()

    def seen(self) -> Seen:
        """What has been seen so far."""
        return Seen(
            self._end or End.OPEN,
            self._status,
            dict(self._headers),
            bytes(self._body),
            self._wire_bytes,
            self._first_byte_at,
            self._ended_at,
        )

    # ------------------------------------------------------------------ unread bytes

    def unread_here(self) -> int:
        """Bytes that have arrived at this socket and were not read."""
        answer = fcntl.ioctl(self.stream.socket.fileno(), termios.FIONREAD, bytes(4))
        return int(struct.unpack("i", answer)[0])

    def unread_there(self) -> int | None:
        """Bytes that the server's kernel holds for this connection; ``None``: it cannot be told.

        From Linux's tables of TCP sockets; a Unix socket's other end cannot be looked at.
        """
        if self._port is None:
            return None
        ours = self.stream.socket.getsockname()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                with open(table, encoding="ascii") as file:
                    lines = file.readlines()[1:]
            except OSError:
                continue
            for line in lines:
                words = line.split()
                local, remote = words[1].rsplit(":")[1], words[2].rsplit(":")[1]
                if (int(local, 16), int(remote, 16)) == (self._port, ours):
                    return int(words[4].split(":")[0], 16)
        return None


async def fetch(
    address: Address, path: str, headers: Mapping[str, str], *, patience: float = 5.0
) -> Seen:
    """GET a path on a connection of its own, within ``patience`` seconds. Never raises OSError."""
    try:
        exchange = await address.connect()
    except OSError:
        return Seen(End.REFUSED)
    try:
        with trio.move_on_after(patience):
            await exchange.send("GET", path, headers={"connection": "close", **headers})
            await exchange.read_all()
        return exchange.seen()
    finally:
        exchange.close()


def json_of(seen: Seen) -> Any:
    """The body of a complete 200 as JSON; ``None`` for anything else."""
    if seen.status != 200 or seen.end is not End.COMPLETE:
        return None
    try:
        return json.loads(seen.body)
    except ValueError:
        return None
