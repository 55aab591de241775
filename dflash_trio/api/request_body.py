"""Reading a request's body: bounded in size, in time, and in what a shutdown waits for."""

from __future__ import annotations

import trio
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType

from ..generation.errors import Draining, PreparationFull, PromptTooLong
from ..net import SEND_CONTINUE
from ..routing.request_scope import RequestScope

SLOWEST_BODY = 1024
"""Bytes per second on average, once the first ``stall_timeout`` seconds are over."""


async def read_body(
    request: Request, scope: RequestScope, *, max_bytes: int, stall_timeout: float
) -> bytes:
    """The whole body. Counts it as held in ``scope`` as it comes: an announcement holds nothing.

    Raises werkzeug's 413, 415 and 408 errors, PreparationFull, PromptTooLong as soon as it is
    larger than any room allows, and Draining when the server begins to shut down before the body
    has come. Takes no slot and no place in the queue.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"Bodies with Content-Encoding {encoding} are not read: send it uncompressed."
        )
    announced = request.content_length
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    send_continue = request.scope["state"].get(SEND_CONTINUE)
    if send_continue is not None:
        await send_continue()

    data = bytearray()
    # What is raised after the nursery, which would wrap it in a group. Nothing else having ended
    # the reading, it was the shutdown.
    failure: Exception | None = Draining()
    async with trio.open_nursery() as nursery:

        async def give_up_when_draining() -> None:
            await scope.router.wait_draining()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up_when_draining)
        begin = trio.current_time()
        with trio.move_on_after(stall_timeout) as patience:
            try:
                async for part in request.body:
                    data += part
                    if len(data) > max_bytes:
                        raise _too_large(max_bytes)
                    scope.router.check_body_size(len(data))
                    scope.hold_body(len(part))
                    patience.deadline = begin + stall_timeout + len(data) / SLOWEST_BODY
                failure = None
            except RequestEntityTooLarge:  # ours, or the framework's, which names no size
                failure = _too_large(max_bytes)
            except (PreparationFull, PromptTooLong) as error:
                failure = error
        if patience.cancelled_caught:
            failure = RequestTimeout("The request body came too slowly or stopped.")
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return bytes(data)


def _too_large(max_bytes: int) -> RequestEntityTooLarge:
    return RequestEntityTooLarge(f"The request body is larger than {max_bytes} bytes.")
