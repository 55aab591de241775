"""``/status/stream``: the status as server-sent events, for whoever watches.

Theory of operation. There is no task for it and no hook anywhere: each listener looks four times a
second, and the first to look shares what it sees with the others. A server that nobody watches does
nothing. A listener is sent something only when its side has taken all that came before; so at most
one event of it is on its way, a write never waits for a reader, and neither does a shutdown.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio
from attrs import frozen
from quart import Response, request

from ..net import OUTPUT_PENDING
from ..routing.router import Router
from . import sse
from .connection import request_scope
from .error_responses import ErrorAnswer
from .request_id import current_request_id

MAX_STREAMS = 16
"""At a time. Each holds one connection, and costs a look at what has changed."""
LOOK_INTERVAL = 0.25
"""Seconds between two events, at least."""
SIGN_OF_LIFE = 15.0
"""Seconds between two events, at most, of a client that reads."""

Body = dict[str, Any]

DRAINING = sse.event({"state": "draining"}, "draining")
"""The last event of a stream that a shutdown ends."""


def stamped(body: Body) -> Body:
    """A status with the moment it is of: seconds since 1970."""
    return {**body, "taken_at": round(time.time(), 3)}


@frozen
class Seen:
    """A look at the status."""

    body: Body
    event: bytes
    at: float
    """Seconds, trio's clock."""


class StatusStreams:
    """The view, and who watches.

    ``take``: the status now, without its stamp and without waiting. ``stall_timeout``: seconds
    after which a listener that takes nothing loses its place.
    """

    def __init__(self, router: Router, take: Callable[[], Body], *, stall_timeout: float) -> None:
        self._router = router
        self._take = take
        self._stall_timeout = stall_timeout
        self._open = 0
        self._seen: Seen | None = None

    async def view(self) -> Response:
        """The route."""
        if request.method == "HEAD":
            return Response(b"", 200, sse.HEADERS)
        if self._open >= MAX_STREAMS:
            return _refusal()
        self._open += 1
        # By the request's end and not by the body's, which may never begin.
        request_scope(request).at_close(self._leave)
        pending = request.scope["state"].get(OUTPUT_PENDING, lambda: False)
        return Response(self.events(pending), 200, sse.HEADERS)

    def _leave(self) -> None:
        self._open -= 1

    async def events(self, pending: Callable[[], bool]) -> AsyncIterator[bytes]:
        """One listener's events, until the server drains or the listener has stalled.

        ``pending``: whether the client's side has yet to take what was sent.
        """
        said: Body | None = None
        said_at = took_at = trio.current_time()
        # No nursery and no cancel scope may span a yield here: only the wait is timed.
        while not self._router.draining:
            now = trio.current_time()
            if not pending():
                took_at = now
                seen = self._look(now)
                due = said_at + SIGN_OF_LIFE - LOOK_INTERVAL
                if seen.body is not said or now >= due:
                    said, said_at = seen.body, now
                    yield seen.event
            elif now - took_at >= self._stall_timeout:
                return
            with trio.move_on_after(LOOK_INTERVAL):
                await self._router.wait_draining()
        yield DRAINING

    def _look(self, now: float) -> Seen:
        """What there is to see: with the body of the look before, the same object, if nothing has
        changed since. Looks that others took just before are good enough."""
        before = self._seen
        if before is not None and now - before.at < LOOK_INTERVAL:
            return before
        body = self._take()
        if before is not None and body == before.body:
            body = before.body
        self._seen = Seen(body, sse.event(stamped(body), "status"), now)
        return self._seen


def _refusal() -> Response:
    answer = ErrorAnswer(
        503,
        f"All {MAX_STREAMS} status streams are taken; /status/json says the same once.",
        "server_error",
        code="too_many_status_streams",
        retry_after=5,
    )
    body = answer.json_for(request.path, current_request_id())
    return Response(body, answer.status, answer.all_headers())
