"""One accepted connection: hypercorn's TCP server over our stream, with our protocol inside."""

from __future__ import annotations

import ssl
import threading
from contextlib import suppress
from typing import cast

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, TaskGroup

from .asgi_task import AppTasks
from .h11_protocol import JSONErrorH11Protocol
from .stream import StallGuardedStream

OUTPUT_PENDING = "output_pending"
"""The key in ``scope["state"]`` of the function that tells whether the client's side has yet to
take some of what was sent before; see StallGuardedStream. Who writes only when it has not, and no
more than the send buffer holds, never blocks."""

OUTPUT_LOST = "output_lost"
"""The key in ``scope["state"]`` of the function that tells whether something of a response's body
never got to the kernel, or was taken from it again: the client is gone or was cut off. A send
raises nothing then. Once true it stays so, as the connection's last request is over."""

_LAST_TURNS = 8
"""Turns of the scheduler in which what has come already is read and begun before an idle connection
closes: the reader takes about half of them from the socket to the request."""

_SENDS_A_TURN = 16
"""Sends in a row that wait for nothing, until the other tasks get a turn in any case."""


class Connection(TCPServer):
    """Serves one connection from its TLS handshake to its close; :meth:`run` does it.

    Owns *transport*. *context* is shared by all connections of a server: when its ``terminated``
    is set, an idle connection closes at once and a busy one after its current response.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        transport: StallGuardedStream,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self.transport = transport
        self._wrapper: ProtocolWrapper | None = None
        self._turns = 0
        # No request is being served, as the protocol told last.
        self._is_idle = True
        # What write_now could not hand over. Goes out before anything else.
        self._rest = b""
        # Guards it, and who sends: write_now is called on other threads as well. Held for a write
        # that does not block at most.
        self._guard = threading.Lock()
        self._broken = False
        self._plain = ssl_context is None
        stream: trio.abc.Stream = transport
        if ssl_context is not None:
            # https_compatible: HTTP says itself where a message ends, so neither side sends or
            # expects TLS's own goodbye, and closing never waits for the peer.
            stream = trio.SSLStream(transport, ssl_context, server_side=True, https_compatible=True)
        # Hypercorn declares TLS over a socket stream, and takes either kind of either layer.
        super().__init__(
            app,
            config,
            context,
            {OUTPUT_PENDING: transport.output_pending, OUTPUT_LOST: self._output_lost},
            cast("trio.SSLStream[trio.SocketStream]", stream),
        )

    @property
    def in_handshake(self) -> bool:
        """Whether TLS is still being agreed on, so that no timer of HTTP's runs yet."""
        return self._wrapper is None

    @property
    def protocol(self) -> ProtocolWrapper:
        """Hypercorn's holder of the protocol; assigning one puts ours into it.

        ``run`` assigns its own once the handshake is done, and offers no other place to choose
        the class. Ours never asks the holder for a switch to HTTP/2.
        """
        assert self._wrapper is not None, "no protocol before the handshake is done"
        return self._wrapper

    @protocol.setter
    def protocol(self, wrapper: ProtocolWrapper) -> None:
        self._http = JSONErrorH11Protocol(
            wrapper.app,
            wrapper.config,
            wrapper.context,
            cast(TaskGroup, AppTasks(wrapper.task_group)),
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            wrapper.send,
        )
        self._http.output = self
        wrapper.protocol = self._http
        self._wrapper = wrapper

    def abort(self) -> None:
        """Cut the connection now, whatever its tasks wait for; the application is told.

        Synchronous, and reaches a send inside its shield. Harmless when repeated.
        """
        self._broken = True
        self.transport.abort()
        if self._wrapper is None:
            return  # in the handshake, which the closed socket ends
        # A reader that waits for the application, not for the socket, has to be told as well.
        with suppress(RuntimeError):  # the connection's nursery has just closed: nothing to tell
            if self._task_group._nursery is not None:
                self._task_group.spawn(self.protocol.handle, Closed())

    async def protocol_send(self, event: Event) -> None:
        """What the protocol wants done: bytes sent, the connection closed, a timer changed."""
        if isinstance(event, Updated):
            # Before anything is awaited: the idle timer may have run out in this very turn, and
            # then stopping it comes too late for what it is about to do.
            self._is_idle = event.idle
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed) and self._http.peer_may_be_sending:
            # The reader does the discarding, so the application is not kept waiting for it.
            self.transport.begin_linger()
            await self.protocol.handle(Closed())
        else:
            await super().protocol_send(event)

    async def _send(self, data: bytes) -> None:
        # A stream's writes are small and many, and mostly nobody else sends and the kernel takes
        # all of it. Then the turns that a lock and a trio send take through the scheduler, waiting
        # for nothing, would be most of what a write costs.
        with self._guard:  # nobody on another thread is in the middle of a write from here on
            is_free = not self.send_lock.locked()
            if is_free:
                self.send_lock.acquire_nowait()
        if not is_free:
            await self.send_lock.acquire()
        try:
            if self._rest:
                with self._guard:
                    data, self._rest = self._rest + data, b""
            sent = self.transport.send_now(data) if self._plain else 0
            if sent < len(data) or not data:
                # A message cut in half would spoil the connection, so cancelling a request does
                # not reach its writes. Bound: the stream's stall timeout, or abort().
                with trio.CancelScope(shield=True):
                    await self.stream.send_all(memoryview(data)[sent:] if sent else data)
            elif self._turn() == 0:
                # Bound: one turn of the scheduler. Whoever only ever sends must let others run.
                await trio.lowlevel.cancel_shielded_checkpoint()
        except trio.BrokenResourceError:
            # Hypercorn leaves the socket to the reader here, but a reader behind a peer that
            # is merely silent, or behind a broken TLS layer, would never return.
            self._broken = True
            self.transport.abort()
            await self.protocol.handle(Closed())
        except trio.ClosedResourceError:  # closed or lingering already, by our own hand
            self._broken = True
            await self.protocol.handle(Closed())
        finally:
            self.send_lock.release()

    def can_write_now(self) -> bool:
        """See ByteOutput. Never under TLS, whose layer writes from a task only."""
        return self._plain and not self._rest and not self.send_lock.locked()

    def write_now(self, data: bytes) -> bool:
        """See ByteOutput."""
        with self._guard:
            busy = self._rest or self.send_lock.locked()
            sent = 0 if busy else self.transport.send_now(data)
            self._rest += data[sent:]
            return sent == len(data)

    async def write_rest(self) -> None:
        """See ByteOutput."""
        if self._rest:
            await self._send(b"")

    def _output_lost(self) -> bool:
        return self._broken or self._http.body_dropped

    def _turn(self) -> int:
        self._turns = (self._turns + 1) % _SENDS_A_TURN
        return self._turns

    async def _initiate_server_close(self) -> None:
        # What idle timers do at their end, in a shield. A request that came at the same moment is
        # served, and its response closes the connection or winds the timer up again.
        for _ in range(_LAST_TURNS):
            await trio.lowlevel.checkpoint()
            if not self._is_idle:
                return
        await super()._initiate_server_close()

    async def _read_data(self) -> None:
        await super()._read_data()
        # Hypercorn would keep the connection (and its descriptor) until the keep-alive timeout
        # when an idle client leaves: nothing else ends the timer, and the nursery waits for it.
        await self.idle_task.stop()
