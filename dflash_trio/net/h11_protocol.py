"""HTTP/1.1 on one connection: hypercorn's h11 protocol with its sharp edges taken off.

What differs from the base class, and why:

* Whatever this floor refuses by itself gets a JSON body, an id and ``Connection: close``; the
  base class sends an empty body, or lets h11's exception end the whole server.
* HTTP/2 (preface, h2c upgrade) and WebSockets are never spoken. An HTTP/2 connection could not be
  drained request by request.
* ``100 Continue`` goes out when the application asks for it, so that a refusal costs the client
  no upload. The base class sends it before the application has seen the headers.
* The reader goes on reading while a response is under way. The base class parks it as soon as a
  pipelined request, or a request with an ``Upgrade`` header, keeps h11 from parsing on, and then
  nobody notices that the client has gone.
* A connection that broke is never recycled, and its parked reader always wakes.

The rules of the two states h11 keeps (ours, theirs) are in h11's own documentation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from time import time
from typing import Any
from urllib.parse import urlsplit

import h11
import trio
from attrs import frozen
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import ConnectionState, H11SendableEvent, ResponseSummary

from .direct_output import DIRECT_OUTPUT, ByteOutput, ChunkOutput
from .error_response import client_request_id, error_body, error_headers, new_request_id

logger = logging.getLogger("dflash_trio.net")

MAX_HEADER_BYTES = 64 * 1024
"""The request line and the headers together; more is 431."""

MAX_LOOKAHEAD_BYTES = 64 * 1024
"""How much of a pipelined request is read before the current one is answered."""

PARK_SECONDS = 1.0
"""How long the reader waits, beyond the look-ahead, for the current response to end. Then it gives
up on the pipeline (the connection closes after the current response, and what follows is dropped):
behind data that nobody reads, a client's leaving stays invisible."""

SEND_CONTINUE = "send_continue"
"""The key in ``scope["state"]`` of the async function that asks the client for the body."""

# Where h11 parses nothing more until the current response is complete. The second is a request
# with an Upgrade header that we have not declined yet; h11 documents it without exporting it.
_PAUSED_STATES = frozenset({h11.DONE, h11.MIGHT_SWITCH_PROTOCOL})  # type: ignore[attr-defined]


@frozen
class Refusal:
    """An answer that this floor gives instead of the application."""

    status: int
    message: str


def split_target(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """The target in origin form, and the authority that an absolute form named.

    ValueError for a target that no server could route: a malformed authority, a foreign scheme,
    or CONNECT's ``host:port``, which is for proxies.
    """
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target, None
    url = urlsplit(target.decode("ascii"))
    if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
        raise ValueError("not a path and not an http URL")
    _ = url.port  # raises ValueError when it is no port number
    _, _, rest = target.partition(b"://")
    origin = rest[len(url.netloc) :].partition(b"#")[0]
    return (origin if origin.startswith(b"/") else b"/" + origin), url.netloc.encode("ascii")


_HEADERS_THAT_MATTER_HERE = frozenset(
    {b"connection", b"content-length", b"expect", b"transfer-encoding", b"upgrade"}
)


def check_request(request: h11.Request) -> Refusal | None:
    """Why this request cannot go to the application, if it cannot. Reads the headers only."""
    headers = [(name, value) for name, value in request.headers]
    size = len(request.method) + len(request.target)
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in headers)
    if not request.http_version.startswith(b"1."):
        return Refusal(505, "this server speaks HTTP/1.1 only")
    if size > MAX_HEADER_BYTES:
        return _REFUSALS[431]
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _HEADERS_THAT_MATTER_HERE:
            values[name] = b",".join([values[name], value] if name in values else [value]).lower()
    if b"content-length" in values and b"transfer-encoding" in values:
        # Two answers to where the body ends; h11 would pick one, a proxy before us the other.
        return Refusal(400, "a request has Content-Length or Transfer-Encoding, not both")
    if b"transfer-encoding" in values and request.http_version < b"1.1":
        return Refusal(400, "HTTP/1.0 has no Transfer-Encoding")
    upgrades = {item.strip() for item in values.get(b"upgrade", b"").split(b",")}
    tokens = {item.strip() for item in values.get(b"connection", b"").split(b",")}
    if b"websocket" in upgrades and b"upgrade" in tokens:
        return Refusal(400, "this server has no WebSockets")
    expect = values.get(b"expect", b"100-continue").strip()
    if expect != b"100-continue" and request.http_version >= b"1.1":
        return Refusal(417, "the only supported Expect is 100-continue")
    return None


_REFUSALS = {
    400: Refusal(400, "malformed HTTP request"),
    431: Refusal(431, f"the request headers are larger than {MAX_HEADER_BYTES // 1024} KiB"),
    501: Refusal(501, "the only supported Transfer-Encoding is chunked"),
}


class JSONErrorHTTPStream(HTTPStream):
    """Hypercorn's request stream, whose own error (an application that ended mute) is JSON."""

    def __init__(self, *args: Any, request_id: str, omit_body: bool, **kwargs: Any) -> None:
        # Any: the base class's ten parameters, passed through.
        super().__init__(*args, **kwargs)
        self._request_id = request_id
        self._omit_body = omit_body

    async def _send_error_response(self, status_code: int) -> None:
        body = error_body(status_code, HTTPStatus(status_code).phrase.lower())
        headers = error_headers(body, self._request_id)
        await self.send(Response(STREAM_ID, headers=headers, status_code=status_code))
        if not self._omit_body:
            await self.send(Body(STREAM_ID, data=body))
        await self.send(EndBody(STREAM_ID))
        self.state = ASGIHTTPState.CLOSED
        summary = ResponseSummary(status=status_code, headers=headers)
        await self.config.log.access(self.scope, summary, time() - self.start_time)


class JSONErrorH11Protocol(H11Protocol):
    """One connection's HTTP/1.1 state; see the module's text for what it changes.

    Two kinds of tasks call in: the connection's reader with :meth:`handle`, and the current
    request's application, through its stream, with :meth:`stream_send`. Nothing that h11 raises
    leaves either.
    """

    connection: h11.Connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Any: the base class's nine parameters, passed through.
        super().__init__(*args, **kwargs)
        # Held while h11's input is turned into events: after a response the parsing of a
        # pipelined request starts in a task of its own, beside the reader.
        self._parsing = trio.Lock()
        # The connection is over for us: the peer left, it broke, or we have decided to close.
        self._over = False
        # The current request has been answered by this floor; the application is not heard.
        self._refused = False
        # Data was dropped unread, so the peer may still be sending, and there is no next request.
        self._dropped_input = False
        self._request_method = b""
        self._request_id = ""
        # The current response's body goes out in chunks, as opposed to: of a length that was
        # announced, until the connection closes, or not at all.
        self._is_chunked = False
        self.output: ByteOutput
        """The connection's. Set by whoever makes the protocol, before the first request."""
        self.body_dropped = False
        """Something of a response's body came when the connection was over, and went nowhere."""

    @property
    def peer_may_be_sending(self) -> bool:
        """Whether closing now could destroy our answer: the request was not read to its end."""
        buffered, ended = self.connection.trailing_data
        if ended:
            return False
        unread = self.connection.their_state in {h11.SEND_BODY, h11.ERROR}
        return unread or bool(buffered) or self._dropped_input

    async def handle(self, event: Event) -> None:
        """Take what the socket brought: data (empty at end of file), or the connection's end."""
        if isinstance(event, RawData):
            if self._take(event.data):
                await self._handle_events()
                await self._park_reader()
        elif isinstance(event, Closed):
            self._over = True
            await self.can_read.set()
            await self._close_stream()

    def _take(self, data: bytes) -> bool:
        """Give h11 its input; False when there is nothing to parse."""
        state = self.connection.their_state
        done = self._over or self._dropped_input
        if data and (done or state in {h11.MUST_CLOSE, h11.CLOSED, h11.ERROR}):
            # h11 would call bytes after the last request of a connection an error, and turn the
            # stray CRLF that old clients put behind a body into a 400 over a good answer.
            self._dropped_input = True
            return False
        self.connection.receive_data(data)
        return True

    async def _park_reader(self) -> None:
        """Hold the reader while more than the look-ahead waits behind the current request."""
        while (
            not self._over
            and self.connection.their_state in _PAUSED_STATES
            and len(self.connection.trailing_data[0]) > MAX_LOOKAHEAD_BYTES
        ):
            # No checkpoint between the look above and the wait, so no wake-up is lost:
            # recycling, closing and the end of the connection all set the event.
            await self.can_read.clear()
            with trio.move_on_after(PARK_SECONDS) as patience:
                await self.can_read.wait()
            if patience.cancelled_caught:
                self._dropped_input = True
                return
            await self._handle_events()

    async def _handle_events(self) -> None:
        async with self._parsing:
            while not self._over and self.connection.their_state is not h11.MUST_CLOSE:
                self._skip_empty_lines()
                try:
                    event = self.connection.next_event()
                except h11.RemoteProtocolError as error:
                    await self._refuse(_describe(error))
                    return
                if isinstance(event, h11.Request):
                    await self._begin_request(event)
                elif isinstance(event, h11.Data) and self.stream is not None:
                    await self.stream.handle(Body(STREAM_ID, data=bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage) and self.stream is not None:
                    await self.stream.handle(EndBody(STREAM_ID))
                else:
                    return  # NEED_DATA, PAUSED, ConnectionClosed, or a body nobody wants

    def _skip_empty_lines(self) -> None:
        """Drop empty lines before a request line, as HTTP asks of servers and h11 does not.

        Old clients put one behind a body. Between two requests h11's connection has no state but
        its buffer, so a new one can take over.
        """
        if self.connection.states != {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}:
            return
        buffered, ended = self.connection.trailing_data
        if buffered[:1] not in {b"\r", b"\n"}:
            return
        self.connection = h11.Connection(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )
        if rest := buffered.lstrip(b"\r\n"):
            self.connection.receive_data(rest)
        if ended:
            self.connection.receive_data(b"")

    async def _begin_request(self, request: h11.Request) -> None:
        self._request_method = bytes(request.method)
        self._request_id = client_request_id(request.headers) or new_request_id()
        self._refused = False
        await self.send(Updated(idle=False))
        if self._over:
            return  # the idle timeout was closing the connection meanwhile
        refusal = check_request(request)
        if refusal is not None:
            await self._refuse(refusal)
            return
        await self._create_stream(request)

    async def _create_stream(self, request: h11.Request) -> None:
        try:
            target, authority = split_target(request.method, request.target)
        except ValueError:
            await self._refuse(Refusal(400, "malformed request target"))
            return
        headers = [(bytes(name), bytes(value)) for name, value in request.headers]
        if authority is not None:
            # An absolute target overrules Host, and whoever checks Host must see what counts.
            headers = [(name, value) for name, value in headers if name != b"host"]
            headers.insert(0, (b"host", authority))
        stream = JSONErrorHTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
            request_id=self._request_id,
            omit_body=request.method == b"HEAD",
        )
        self.stream = stream
        await stream.handle(
            Request(
                STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode("ascii"),
                # As sent: methods are case-sensitive, and h11 and the stream must agree on HEAD.
                method=request.method.decode("ascii"),
                raw_path=target,
                state=ConnectionState(
                    {
                        **self.connection_state,
                        SEND_CONTINUE: self._continue_for(stream),
                        DIRECT_OUTPUT: ChunkOutput(self, stream),
                    }
                ),
            )
        )
        self.keep_alive_requests += 1

    def _continue_for(self, stream: HTTPStream) -> Callable[[], Any]:
        """The function with which *stream*'s application asks its client for the body."""

        async def send_continue() -> None:
            """Send ``100 Continue`` if the client waits for it and this request is current.

            Idempotent; a no-op without ``Expect``, once body data or a response is under way,
            and after the request's end.
            """
            waiting = self.connection.they_are_waiting_for_100_continue
            if not waiting or self._over or self.stream is not stream:
                await trio.lowlevel.checkpoint()
                return
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

        return send_continue

    async def stream_send(self, event: StreamEvent) -> None:
        """Take what the current request's application produced. Raises nothing of h11's.

        An application that breaks HTTP's rules is logged; its client gets a 500 if nothing was
        sent yet, and else sees the connection end early.
        """
        if (self._over or self._refused) and not isinstance(event, StreamClosed):
            self.body_dropped = self.body_dropped or isinstance(event, Body)
            # Dropped; but an application that sends in a loop must not starve the others.
            await trio.lowlevel.checkpoint()
            return
        if isinstance(event, Response):
            self._is_chunked = self._sends_chunks(event)
            if self._last_response:
                event = _with_connection_close(event)
        try:
            await super().stream_send(event)
        except h11.LocalProtocolError as error:
            logger.error("the application broke the rules of HTTP: %s", error)
            await self._refuse(Refusal(500, "internal server error"))

    @property
    def _last_response(self) -> bool:
        """Whether the response that starts now has to be the connection's last."""
        unread = self.connection.their_state is h11.SEND_BODY
        return unread or self._dropped_input or self.context.terminated.is_set()

    def _sends_chunks(self, response: Response) -> bool:
        """How h11 is going to frame the body; the same rules as there."""
        if self._request_method == b"HEAD" or response.status_code in {204, 304}:
            return False
        version = self.connection.their_http_version
        if response.status_code < 200 or version is None or version < b"1.1":
            return False
        return all(name.lower() != b"content-length" for name, _ in response.headers)

    def takes_chunks_of(self, stream: HTTPStream) -> bool:
        """Whether a chunk of this request's response may be written beside h11 now: between two of
        its own, a chunk changes nothing in its state."""
        return (
            self.stream is stream
            and self._is_chunked
            and not (self._over or self._refused)
            and self.connection.our_state is h11.SEND_BODY
        )

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if self._over:
            await trio.lowlevel.checkpoint()
            return
        await self.send(RawData(data=self.connection.send(event)))

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer instead of the application if no answer has begun, and close in every case."""
        self._refused = True
        # The timer of idle connections must not cut the lingering that may follow.
        await self.send(Updated(idle=False))
        if not self._over and self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = error_body(refusal.status, refusal.message)
            request_id = self._request_id or new_request_id()
            headers = error_headers(body, request_id) + self.config.response_headers("h11")
            # All three states are passed without a checkpoint, so no other task's event can
            # come between, and the answer is one write.
            data = self.connection.send(h11.Response(status_code=refusal.status, headers=headers))
            if self._request_method != b"HEAD":
                data += self.connection.send(h11.Data(data=body))
            data += self.connection.send(h11.EndOfMessage())
            await self.send(RawData(data=data))
        await self.send(Closed())

    async def _maybe_recycle(self) -> None:
        if self._over or self._refused:
            await self._close_stream()
            return
        if self._dropped_input:
            await self._close_stream()
            await self.send(Closed())
            return
        self._request_method, self._request_id = b"", ""
        # This runs in the application's task, and tells the application that its request is over:
        # quart-trio then cancels that task, in the middle of this. The timer of the idle connection
        # would not start, and nothing would ever close the connection. Shielded; bound: it waits
        # for locks and the start of a task only, never for the peer.
        with trio.CancelScope(shield=True):
            await super()._maybe_recycle()
        if self.connection.their_state is h11.IDLE and self.connection.trailing_data[0]:
            # A pipelined request waits, and the reader is most likely blocked on the socket.
            self.task_group.spawn(self._handle_events)


def _describe(error: h11.RemoteProtocolError) -> Refusal:
    """h11's complaint without the offending bytes, which may hold a secret, in its message."""
    known = _REFUSALS.get(error.error_status_hint, _REFUSALS[400])
    if known.status != 400:
        return known
    return Refusal(400, f"{known.message} ({str(error).partition(':')[0].lower()})")


def _with_connection_close(response: Response) -> Response:
    others = [(name, value) for name, value in response.headers if name.lower() != b"connection"]
    return replace(response, headers=[*others, (b"connection", b"close")])
