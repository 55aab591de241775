"""The accept loop, the guard around every connection, and the steps of ending them.

A shutdown is three calls, in this order, each harmless to repeat: :meth:`stop_accepting`,
:meth:`close_idle`, and in the end :meth:`abort_connections` for whatever is still writing.
:meth:`serve` returns when the last connection has ended.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys

import trio
from attrs import frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import ASGIFramework

from .connection import Connection
from .descriptors import patient_listeners
from .error_response import raw_error_response
from .h11_protocol import MAX_HEADER_BYTES
from .listener import SEND_BUFFER_BYTES, BoundListeners
from .stream import StallGuardedStream

logger = logging.getLogger("dflash_trio.net")

KEEP_ALIVE_SECONDS = 75.0
"""How long a connection may be without a complete request. Longer than the pools of common
clients keep theirs, so that it is they who close, and no request meets a closing connection."""

HANDSHAKE_SECONDS = 10.0
"""How long a client may take for TLS's handshake."""

# A connection over the limit gets its 503 within this time, if it reads that fast,
REFUSAL_SECONDS = 1.0
# and while this many are getting theirs, further ones are just closed.
MAX_REFUSALS_IN_FLIGHT = 64


@frozen
class ConnectionStatistics:
    """A snapshot of a server's connections."""

    open: int
    """Being served now, idle ones included."""
    total: int
    """Ever served."""
    refused: int
    """Turned away because the limit was reached."""
    stalled: int
    """Cut because the client took no data for the stall timeout."""
    accepting: bool
    """Whether new connections are welcome."""


class _ServerContext(WorkerContext):
    """Hypercorn's state shared by connections, with a way to set ``terminated`` synchronously."""

    def __init__(self) -> None:
        super().__init__(max_requests=None)
        self._termination = trio.Event()
        self.terminated = EventWrapper()
        self.terminated._event = self._termination

    def terminate_now(self) -> None:
        self._termination.set()


class ConnectionServer:
    """Serves an ASGI application on bound listeners.

    *app* is called once per request, with the http scope only: its lifespan is its owner's
    business. *listeners* belong to the server from now on. *stall_timeout* (seconds) is how long
    a client may take no data while some is waiting for it. Above *max_connections* a client gets
    a 503 and is closed. With *ssl_context* the server speaks TLS; the context's ALPN list is set
    to HTTP/1.1. *access_log* gets a line per request, in hypercorn's format.
    """

    def __init__(
        self,
        app: ASGIFramework,
        *,
        listeners: BoundListeners,
        stall_timeout: float,
        max_connections: int,
        ssl_context: ssl.SSLContext | None = None,
        keep_alive_timeout: float = KEEP_ALIVE_SECONDS,
        handshake_timeout: float = HANDSHAKE_SECONDS,
        access_log: logging.Logger | None = None,
    ) -> None:
        if not stall_timeout > 0:
            raise ValueError("stall_timeout must be positive")
        self._app = ASGIWrapper(app)
        self._listeners = listeners
        self._stall_timeout = stall_timeout
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["http/1.1"])
        self._config = _hypercorn_config(keep_alive_timeout, handshake_timeout, access_log)
        self._context = _ServerContext()
        self._accepting = trio.CancelScope()
        # Every connection with a task of its own, from accept to close.
        self._connections: set[Connection] = set()
        self._refusals = 0  # in flight
        self._total = 0
        self._refused = 0
        self._stalled = 0

    async def serve(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve until accepting was stopped and the last connection has ended.

        Started with the listeners' addresses. Cancelling it cuts every connection. No error of a
        connection gets here; an error of accept(2) itself does, after the listeners are closed,
        unless it is a shortage (of descriptors, of memory): new clients wait then.
        Call it once.
        """
        try:
            async with trio.open_nursery() as connections:
                if not self._listeners.closed:
                    task_status.started(self._listeners.addresses)
                    await self._accept(connections)
                else:
                    task_status.started(self._listeners.addresses)
        finally:
            self._listeners.close()

    async def _accept(self, connections: trio.Nursery) -> None:
        try:
            with self._accepting:
                await trio.serve_listeners(
                    self._serve_connection,
                    patient_listeners(
                        self._listeners.trio_listeners(), lambda: len(self._connections)
                    ),
                    handler_nursery=connections,
                )
        except* trio.ClosedResourceError:
            # stop_accepting closes the sockets too, perhaps just as accept was to run again.
            if not self._listeners.closed:
                raise

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; those that wait unaccepted are reset."""
        self._accepting.cancel()
        self._listeners.close()

    def close_idle(self) -> None:
        """Close connections without a request now, and the others after their current response.

        Without a request are: kept-alive ones between requests, those whose request headers are
        not complete, and those in TLS's handshake.
        """
        self._context.terminate_now()
        for connection in self._connections:
            if connection.in_handshake:
                connection.abort()

    def abort_connections(self) -> None:
        """Cut every connection at once, also those inside a send that cancellation cannot reach.

        Their applications see a disconnect.
        """
        for connection in self._connections:
            connection.abort()

    def statistics(self) -> ConnectionStatistics:
        """A snapshot of the counters."""
        return ConnectionStatistics(
            open=len(self._connections),
            total=self._total,
            refused=self._refused,
            stalled=self._stalled,
            accepting=not self._listeners.closed,
        )

    async def _serve_connection(self, accepted: trio.SocketStream) -> None:
        """One connection's task. Whatever goes wrong in it costs that connection only."""
        try:
            if accepted.socket.family == socket.AF_UNIX:
                # Unlike TCP sockets, accepted Unix sockets inherit no buffer size.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            transport = StallGuardedStream(accepted, stall_timeout=self._stall_timeout)
            if len(self._connections) >= self._max_connections:
                await self._refuse(transport)
            else:
                await self._run_connection(transport)
        except Exception as error:
            _log_failure(error)
        except BaseExceptionGroup as group:
            # A cancellation (or an interrupt from the keyboard) goes on; errors beside it do not.
            errors, rest = group.split(Exception)
            if errors is not None:
                _log_failure(errors)
            if rest is not None:
                raise rest from None
        finally:
            # All its tasks are over, and with them whoever wrote in their place.
            accepted.socket.close()

    async def _run_connection(self, transport: StallGuardedStream) -> None:
        self._total += 1
        connection = Connection(
            self._app, self._config, self._context, transport, self._ssl_context
        )
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._stalled += transport.stalled

    async def _refuse(self, transport: StallGuardedStream) -> None:
        """Say 503 to a connection over the limit, if that is possible at once; then close it."""
        self._refused += 1
        if self._ssl_context is not None or self._refusals >= MAX_REFUSALS_IN_FLIGHT:
            transport.abort()
            return
        self._refusals += 1
        try:
            with trio.move_on_after(REFUSAL_SECONDS):
                await transport.send_all(raw_error_response(503, "too many connections"))
                # Its request may still be on its way; bounded by the stream's linger bounds too.
                transport.begin_linger()
                await transport.aclose()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has left already
        finally:
            self._refusals -= 1
            transport.abort()


class EncryptedKey(Exception):
    """A private key that wants a password, and none was given."""


def server_ssl_context(
    certificate: str, key: str, *, password: str | None = None
) -> ssl.SSLContext:
    """A server's TLS context from PEM files: TLS 1.2 and later, ALPN offering HTTP/1.1 only.

    OSError or ssl.SSLError when a file cannot be read or does not hold what it should.
    EncryptedKey without a *password* for a key that wants one.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, _no_password if password is None else password)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    # OpenSSL would ask on the terminal, where a server has nobody, and wait for ever.
    raise EncryptedKey


def _hypercorn_config(
    keep_alive_timeout: float, handshake_timeout: float, access_log: logging.Logger | None
) -> Config:
    config = Config()
    config.accesslog = access_log
    config.errorlog = logger
    config.alpn_protocols = ["http/1.1"]
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    config.keep_alive_timeout = keep_alive_timeout
    config.keep_alive_max_requests = sys.maxsize
    config.read_timeout = None  # an idle connection has its timer, a slow upload is the app's
    config.ssl_handshake_timeout = handshake_timeout
    return config


def _log_failure(error: BaseException) -> None:
    """One line for a connection that ended in an error, its traceback at debug level."""
    if isinstance(error, trio.ClosedResourceError | trio.BrokenResourceError):
        logger.debug("a connection broke: %r", error)  # the peer's doing, or abort()
        return
    logger.error("a connection failed: %r", error)
    logger.debug("the failed connection's traceback", exc_info=error)
