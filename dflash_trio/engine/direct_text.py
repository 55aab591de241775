"""Text from an engine's thread to whoever sends it, past the event loop.

In the middle of a stream nothing is to be decided: the text is encoded and written, and the task
that owns the stream sleeps. Waking the event loop for it costs several times what that takes, and
on a machine whose cores compute it costs the engine as much again. So an owner that waits lets the
engine's thread do it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..generation.events import Event, TextDelta

TakeText = Callable[[Sequence[Event]], bool]
"""Takes a delivery that is text and nothing else. False: it wants it by way of the event loop. It
never waits, never raises and touches nothing of trio's: it is called on the engine's thread."""


class DirectText:
    """One generation's. Events keep their order, whichever way they go."""

    def __init__(self) -> None:
        # Held by the engine's thread for one delivery at most, which is encoding and a write that
        # does not block; the event loop waits for that long to take its stream back.
        self._lock = threading.Lock()
        self._take: TakeText | None = None
        # Events that were sent to the event loop and have not come to the reader's channel yet.
        self._on_their_way = 0

    # ------------------------------------------------------------------ the engine's thread

    def offer(self, events: Sequence[Event]) -> bool:
        """Hand the reader a delivery. False: it is to go by way of the event loop, which tells
        :meth:`arrived`."""
        with self._lock:
            take = self._take
            if (
                take is not None
                and not self._on_their_way
                and all(isinstance(event, TextDelta) for event in events)
                and take(events)
            ):
                return True
            self._on_their_way += len(events)
            return False

    # ----------------------------------------------------------------------- the event loop

    def arrived(self, events: int) -> None:
        """So many of those that were not taken are where the reader finds them."""
        with self._lock:
            self._on_their_way -= events

    def arm(self, take: TakeText) -> None:
        """From now on ``take`` may be called, at any time and on the engine's thread."""
        with self._lock:
            self._take = take

    def disarm(self) -> None:
        """Nothing is called any more once this returns. Idempotent."""
        with self._lock:
            self._take = None
