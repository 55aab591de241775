"""The ASGI connection that opens a RequestScope around everything the web framework does.

Quart sends a response's headers before it enters the response's body, and quart-trio cancels its
own nursery when the client leaves: a cancellation in between runs no clean-up of the body at all.
Around the whole call, the scope's exit is certain.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import trio
from hypercorn.typing import (
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
)
from quart import Request
from quart_trio.asgi import TrioASGIHTTPConnection

from ..net import OUTPUT_LOST
from ..net.error_response import client_request_id, new_request_id
from ..routing.request_scope import RequestScope
from .request_record import RequestRecord, put_record
from .request_trace import new_trace

if TYPE_CHECKING:
    from .app import DflashApp

log = logging.getLogger("dflash_trio.api")

_WITH_BODY = frozenset({"POST"})
"""Methods whose routes read the body."""

_SCOPE_KEY = "dflash_trio.request_scope"


class RequestConnection(TrioASGIHTTPConnection):
    """One HTTP request: its scope outlives its response by nothing and ends no sooner."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        app = cast("DflashApp", self.app)
        # A base URL with a slash at its end makes paths like /v1//models. The framework would
        # redirect those, with a page of HTML and for POST to no avail.
        asked_for = self.scope["path"]
        self.scope["path"] = re.sub("//+", "/", asked_for)
        record = RequestRecord(
            app.request_totals,
            client_request_id(self.scope["headers"]) or new_request_id(),
            self.scope["method"],
        )
        if app.traces is not None:
            record.trace = new_trace(app.traces, self.scope, asked_for, record.began)
        put_record(self.scope, record)
        try:
            async with RequestScope(app.router, observer=record) as scope:
                cast(dict[str, object], self.scope)[_SCOPE_KEY] = scope
                await self._handle(scope, record, receive, send)
        finally:
            record.close()

    async def _handle(
        self,
        scope: RequestScope,
        record: RequestRecord,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        lost: Callable[[], bool] = self.scope["state"].get(OUTPUT_LOST, lambda: False)

        async def receive_and_note() -> ASGIReceiveEvent:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.client_left()
            elif message["type"] == "http.request" and self.scope["method"] not in _WITH_BODY:
                # The framework would keep it for as long as the response lasts, and an event stream
                # has no end. It is read all the same: the connection goes on behind it.
                return {**message, "body": b""}
            return message

        async def send_and_release(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                record.response_began(message["status"], _length_in(message["headers"]))
            # Before: with its last byte a request is over, which looks like a client's leaving.
            in_vain = record.left
            await send(message)
            if message["type"] == "http.response.body":
                last = not message.get("more_body", False)
                # A send to a client that is gone, or is cut off meanwhile, just returns.
                in_vain = in_vain or lost()
                record.sent(len(message.get("body", b"")), last=last, in_vain=in_vain)
                if last:
                    # The last byte is with the kernel. Given back here and not a few checkpoints
                    # later, so that a client's next request finds the slot it just left.
                    await scope.close()

        try:
            await super().__call__(receive_and_note, send_and_release)
        except BaseException as error:
            # A real error that comes together with a cancellation is lost further up.
            if (real := _without_cancellation(error)) is not None:
                record.crashed()
                log.error("a request failed", exc_info=real)
            raise


def request_scope(request: Request) -> RequestScope:
    """The scope that was opened around this request."""
    return cast(RequestScope, cast(dict[str, object], request.scope)[_SCOPE_KEY])


def _length_in(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The announced length of a body of ours."""
    return next((int(v) for name, v in headers if name.lower() == b"content-length"), None)


def _without_cancellation(error: BaseException) -> BaseException | None:
    if isinstance(error, trio.Cancelled):
        return None
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1]
    return error
