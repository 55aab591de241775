"""A byte stream over one accepted connection that no silent peer can hold for ever.

Three things set it apart from :class:`trio.SocketStream`:

* **Stall guard.** A send that makes no progress for ``stall_timeout`` seconds breaks the stream.
  Hypercorn sends inside a shield without a deadline; this timeout is the bound of that shield.
* **Abort.** :meth:`StallGuardedStream.abort` is synchronous and closes the socket under whoever
  is blocked on it, so another task can cut a send that cancellation cannot reach.
* **Lingering close.** Closing a socket while the peer still sends makes the kernel answer with a
  reset, which may destroy the response that the peer has not read yet. After
  :meth:`StallGuardedStream.begin_linger` the stream says that it has finished (EOF) and throws
  away what still arrives, within bounds, before the socket goes.
"""

from __future__ import annotations

import ctypes
import errno
import math
import socket as stdlib_socket
import struct
import sys
import threading
from contextlib import suppress

import trio

if sys.platform != "darwin":
    import fcntl
    import termios

# The most that one call hands to the kernel, so that progress is seen between parts.
SEND_PART_BYTES = 64 * 1024
# The same for a Unix socket, whose queue shrinks by whole parts only: a reader that takes longer
# than the stall timeout for one of these would look stalled.
UNIX_PART_BYTES = 4 * 1024
# When a send that blocks first looks at the kernel's queue, and how often from then on, in
# seconds. Waiting for "writable" is not enough: the kernel reports it only after a good part of
# its buffer is free, which takes a slow reader minutes.
FIRST_LOOK_SECONDS = 0.05
QUEUE_POLL_SECONDS = 1.0

# Bounds of a lingering close. It ends at the first of: the peer's EOF, this long altogether,
LINGER_SECONDS = 1.0
# this long with nothing arriving (the peer has stopped sending, so nothing provokes a reset),
LINGER_QUIET_SECONDS = 0.3
# or this much thrown away.
LINGER_BYTES = 128 * 1024 * 1024

# write(2), called with the interpreter held.
_write = ctypes.PyDLL(None).write
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
_write.restype = ctypes.c_ssize_t

_SO_NWRITE = 0x1024  # macOS <sys/socket.h>; the socket module does not name it
_CLOSED_ERRNOS = frozenset({errno.EBADF, errno.ENOTSOCK})


def unsent_bytes(sock: trio.socket.SocketType) -> int | None:
    """What the kernel still holds of our output, unsent or unacknowledged, or None if unknown.

    Only its shrinking means anything: for Unix sockets Linux counts bookkeeping memory too.
    """
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(stdlib_socket.SOL_SOCKET, _SO_NWRITE)
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(struct.calcsize("i")))
        return int(struct.unpack("i", answer)[0])
    except (OSError, ValueError):
        return None


class StallGuardedStream(trio.abc.HalfCloseableStream):
    """A connected socket with a stall guard, an abort and a lingering close.

    Owns *transport* and its socket. One task may send while another receives; two senders, or
    two receivers, raise :class:`trio.BusyResourceError`. *stall_timeout* is in seconds.
    Cancelling :meth:`send_all` leaves the stream in an unknown place of the data, as with any
    trio stream; every other method may be cancelled freely.
    """

    def __init__(self, transport: trio.SocketStream, *, stall_timeout: float) -> None:
        if not stall_timeout > 0:
            raise ValueError("stall_timeout must be positive")
        self._transport = transport
        self._stall_timeout = stall_timeout
        unix = transport.socket.family == stdlib_socket.AF_UNIX
        self._part_bytes = UNIX_PART_BYTES if unix else SEND_PART_BYTES
        self._sending = False
        # trio's, for any thread.
        self._clock = trio.lowlevel.current_clock().current_time
        # Held while a descriptor is written to on any thread, and while it is closed: a number
        # that was closed in between might be another connection's by then. Held for a write that
        # does not block at most.
        self._open_guard = threading.Lock()
        # The scope of the task inside receive_some, which begin_linger uses to wake it.
        self._receive_scope: trio.CancelScope | None = None
        # When lingering has to be over (trio's clock); None while the stream is in full use.
        self._linger_deadline: float | None = None
        self._linger_taken = False  # somebody discards, or has discarded
        # Counters, for status pages and tests.
        self.bytes_sent = 0
        self.last_progress = trio.current_time()
        self.stalled = False

    @property
    def socket(self) -> trio.socket.SocketType:
        """The trio socket, which hypercorn asks for its addresses."""
        return self._transport.socket

    def output_pending(self) -> bool:
        """Whether the kernel still holds output that the peer's has not taken.

        False as well where that is not known, and once the socket is gone.
        """
        return bool(unsent_bytes(self.socket))

    @property
    def closed(self) -> bool:
        """Whether the socket is gone: closed, aborted or stalled."""
        return self.socket.fileno() == -1

    def send_now(self, data: bytes) -> int:
        """Hand to the kernel what it takes of *data* at once; returns how many bytes.

        0 as well where there is a reason against it: :meth:`send_all` will say which. The rest
        is for that in any case. No checkpoint. May be called on any thread, while no task sends.
        """
        lingering = self._linger_deadline is not None
        if self._sending or lingering or self.socket.did_shutdown_SHUT_WR:
            return 0
        with self._open_guard:
            # With the interpreter held: a thread that has a device wait for it would get it back
            # only after whoever took it meanwhile. Python ignores SIGPIPE; -1 is any error.
            fd = self.socket.fileno()
            part = data[: self._part_bytes]
            sent = _write(fd, part, len(part)) if fd >= 0 else -1
        if sent <= 0:
            return 0
        self.bytes_sent += sent
        self.last_progress = self._clock()
        return sent

    def _close_socket(self) -> None:
        with self._open_guard:
            self.socket.close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of *data*, each pause bounded by the stall timeout.

        The clock restarts whenever the kernel accepts a byte and whenever its queue shrank since
        the last look. Raises :class:`trio.BrokenResourceError` when the clock runs out (the
        stream is aborted by then, which wakes its receiver too) or the peer is gone, and
        :class:`trio.ClosedResourceError` after a close, an abort or an end of file of ours.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        if self._linger_deadline is not None or self.socket.did_shutdown_SHUT_WR:
            raise trio.ClosedResourceError("can't send data after sending EOF")
        self._sending = True
        try:
            with memoryview(data) as view:
                await self._send_parts(view)
        except OSError as error:
            if error.errno in _CLOSED_ERRNOS:
                raise trio.ClosedResourceError("this stream was closed") from None
            raise trio.BrokenResourceError(f"connection broken: {error}") from error
        finally:
            self._sending = False

    async def _send_parts(self, view: memoryview) -> None:
        self.last_progress = trio.current_time()
        if not view:
            if self.closed:
                raise trio.ClosedResourceError("this stream was closed")
            await trio.lowlevel.checkpoint()
            return
        total = 0
        # The kernel's queue at the last look since it accepted a byte; None before the first.
        queued: int | float | None = None
        while total < len(view):
            pause = FIRST_LOOK_SECONDS if queued is None else QUEUE_POLL_SECONDS
            give_up = self.last_progress + self._stall_timeout
            with trio.move_on_at(min(trio.current_time() + pause, give_up)):
                sent = await self.socket.send(view[total : total + self._part_bytes])
                total += sent
                self.bytes_sent += sent
                self.last_progress = trio.current_time()
                queued = None
                continue
            queued = self._look_at_queue(queued)

    def _look_at_queue(self, before: int | float | None) -> int | float:
        """The queue now; raises when neither it nor the kernel moved for the stall timeout.

        Where the queue cannot be read it counts as never shrinking: accepted bytes decide alone.
        """
        size = unsent_bytes(self.socket)
        now_queued = math.inf if size is None else size
        now = trio.current_time()
        if before is not None and now_queued < before:
            self.last_progress = now
        elif now - self.last_progress >= self._stall_timeout:
            self.stalled = True
            # Without this the receiving side of the connection would wait on: a peer that reads
            # nothing rarely sends anything either.
            self.abort()
            raise trio.BrokenResourceError(
                f"the peer took no data for {self._stall_timeout:g} seconds"
            )
        return now_queued

    async def wait_send_all_might_not_block(self) -> None:
        """As in :class:`trio.abc.SendStream`; not bounded by the stall timeout."""
        await self._transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Tell the peer that we send no more. Harmless when done twice."""
        await self._transport.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Bytes from the peer, ``b""`` at its end of file.

        Once lingering has begun, data is thrown away instead (by whichever task is in here) and
        the call ends with :class:`trio.ClosedResourceError` when lingering is over.
        """
        if self._receive_scope is not None:
            raise trio.BusyResourceError("another task is receiving on this stream")
        with trio.CancelScope() as scope:
            self._receive_scope = scope
            try:
                if self._linger_deadline is None:
                    data = await self._transport.receive_some(max_bytes)
                    if self._linger_deadline is None:
                        return data
            finally:
                self._receive_scope = None
        await self._discard()
        raise trio.ClosedResourceError("this stream is closing")

    def begin_linger(self) -> None:
        """Send EOF now and have what still arrives thrown away, within the module's bounds.

        Never blocks. A task inside :meth:`receive_some` does the discarding, else
        :meth:`aclose` does. For the case that the peer may still be sending a request whose
        answer is already written; in any other case plain closing is right.
        """
        if self.closed or self._linger_deadline is not None:
            return
        self._linger_deadline = trio.current_time() + LINGER_SECONDS
        with suppress(OSError):  # the peer is gone already: the discarding will see it
            self.socket.shutdown(stdlib_socket.SHUT_WR)
        if self._receive_scope is not None:
            self._receive_scope.cancel()

    async def _discard(self) -> None:
        """Read and drop until the peer ends, falls quiet, or a bound is reached."""
        if self._linger_deadline is None or self._linger_taken:
            return
        self._linger_taken = True
        dropped = 0
        with trio.move_on_at(self._linger_deadline):
            while dropped < LINGER_BYTES:
                data = b""
                with trio.move_on_after(LINGER_QUIET_SECONDS):
                    try:
                        data = await self._transport.receive_some(SEND_PART_BYTES)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        return
                if not data:
                    return
                dropped += len(data)

    async def aclose(self) -> None:
        """Close the socket, after lingering if that was asked for and has not happened yet.

        Output that the kernel has accepted is still delivered by it. Cancellation and
        :meth:`abort` cut the lingering short; the socket is closed in every case.
        """
        try:
            if self._receive_scope is None:
                await self._discard()
        finally:
            self._close_socket()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close the socket at once, from any task of the same trio run, shield or no shield.

        Whoever is blocked on the stream wakes with :class:`trio.ClosedResourceError`. The peer
        sees a reset and the kernel's unsent output is dropped (SO_LINGER with zero seconds), so
        that nothing of the connection outlives the call. Harmless on a closed stream.
        """
        if self.closed:
            return
        with suppress(OSError):
            self.socket.setsockopt(
                stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self._close_socket()
