"""From an engine's thread to the event loop: messages, and a wake-up that keeps the interpreter.

``TrioToken.run_sync_soon`` would do, but for one thing: it writes to its socket with the
interpreter given up. The loop, woken by that, takes the interpreter, and the engine's thread waits
for up to a switch interval to get it back, right when the device waits for its next step. Here the
byte is written with the interpreter held; the loop gets it when the engine's thread gives it up for
the step.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

_write = ctypes.PyDLL(None).write
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
_write.restype = ctypes.c_ssize_t


class MailboxClosed(Exception):
    """The event loop has ended, or the mailbox was closed: nothing posted will be read."""


class LoopMailbox(Generic[T]):
    """A pipe that becomes readable when there are messages. The loop's task waits for that, and
    calls :meth:`take`; what it does with them is its own business."""

    def __init__(self) -> None:
        # Unbounded, but bounded by its writers: see the channel of a generation.
        self._messages: deque[T] = deque()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        # Guards the two below and the pipe's life: a descriptor that is closed while it is
        # written to may be somebody else's by then.
        self._lock = threading.Lock()
        self._woken = False
        self._closed = False

    def fileno(self) -> int:
        """What becomes readable."""
        return self._readable

    def post(self, message: T) -> None:
        """Called on any thread. Never waits. Raises MailboxClosed."""
        with self._lock:
            if self._closed:
                raise MailboxClosed
            self._messages.append(message)
            if not self._woken:
                self._woken = True
                _write(self._writable, b"\0", 1)

    def take(self) -> Iterator[T]:
        """Those messages that are there now, in order; later ones wake the loop again."""
        if not self._closed:
            with suppress(BlockingIOError):
                os.read(self._readable, 64)
        # Before the messages are taken, so that one that comes now wakes again.
        self._woken = False
        for _ in range(len(self._messages)):
            yield self._messages.popleft()

    def close(self) -> None:
        """Take no more messages; those that were posted can still be taken. Once, by the loop."""
        with self._lock:
            self._closed = True
            os.close(self._writable)
        os.close(self._readable)
