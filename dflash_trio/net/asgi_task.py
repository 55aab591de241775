"""How one request's ASGI application runs inside its connection's nursery.

Stands in for hypercorn's task group, whose queue between connection and application has two
flaws here: telling an application that has stopped reading about a disconnect blocks for ever
once ten body parts are queued (so a refusal of a large body never ends its connection), and a
second ``receive()`` after the disconnect waits for ever instead of reporting it again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeAlias

import trio
from hypercorn.config import Config
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    Scope,
    TaskGroup,
)

logger = logging.getLogger("dflash_trio.net")

Send: TypeAlias = Callable[[ASGISendEvent | None], Awaitable[None]]


class RequestInbox:
    """The body parts on their way to one application, then its disconnect, reported for ever.

    At most *capacity* parts wait; a further :meth:`put` blocks, which is the back pressure on
    the client. A disconnect never blocks: it also wakes and drops a put that does.
    """

    def __init__(self, capacity: int) -> None:
        self._send, self._receive = trio.open_memory_channel[ASGIReceiveEvent](capacity)

    async def put(self, event: ASGIReceiveEvent) -> None:
        """Hand on a body part, or end the inbox with ``http.disconnect``."""
        if event["type"] == "http.disconnect":
            self._send.close()
            return
        try:
            await self._send.send(event)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return  # the request is over, and so is any interest in its body

    async def get(self) -> ASGIReceiveEvent:
        """The application's ``receive``: what is queued, then ``http.disconnect`` every time."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            return {"type": "http.disconnect"}


class AppTasks:
    """Starts applications in the nursery of *task_group*; fits hypercorn's TaskGroup protocol."""

    def __init__(self, task_group: TaskGroup) -> None:
        self._task_group = task_group

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Send
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Run *app* for one request; returns the function that delivers its incoming events."""
        inbox = RequestInbox(config.max_app_queue_size)
        self._task_group.spawn(_run_app, app, scope, inbox, send)
        return inbox.put

    def spawn(self, func: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start *func* beside the applications, in the connection's nursery."""
        self._task_group.spawn(func, *args)

    async def __aenter__(self) -> AppTasks:
        raise RuntimeError("the nursery belongs to the connection, which has entered it")

    async def __aexit__(self, exc_type: type, exc_value: BaseException, tb: TracebackType) -> None:
        raise RuntimeError("the nursery belongs to the connection, which leaves it")


async def _run_app(app: AppWrapper, scope: Scope, inbox: RequestInbox, send: Send) -> None:
    """Run the application; an error of its own is logged and never leaves this task.

    ``send(None)`` tells the protocol that the application is through: without a response so far
    that makes a 500, in the middle of one it cuts the connection.
    """
    try:
        await app(scope, inbox.get, send, trio.to_thread.run_sync, trio.from_thread.run)
    except Exception:
        logger.exception("the application failed on a request")
    except BaseExceptionGroup as group:
        errors, rest = group.split(Exception)
        if errors is not None:
            logger.error("the application failed on a request", exc_info=errors)
        if rest is not None:
            raise rest from None
    await send(None)
