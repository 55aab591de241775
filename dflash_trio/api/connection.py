"""The ASGI connection that opens a RequestScope around everything the web framework does.

Quart sends a response's headers before it enters the response's body, and quart-trio cancels its
own nursery when the client leaves: a cancellation in between runs no clean-up of the body at all.
Around the whole call, the scope's exit is certain.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart import Request
from quart_trio.asgi import TrioASGIHTTPConnection

from ..routing.request_scope import RequestScope

if TYPE_CHECKING:
    from .app import DflashApp

log = logging.getLogger("dflash_trio.api")

_SCOPE_KEY = "dflash_trio.request_scope"


class RequestConnection(TrioASGIHTTPConnection):
    """One HTTP request: its scope outlives its response by nothing and ends no sooner."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        app = cast("DflashApp", self.app)
        # A base URL with a slash at its end makes paths like /v1//models. The framework would
        # redirect those, with a page of HTML and for POST to no avail.
        self.scope["path"] = re.sub("//+", "/", self.scope["path"])
        async with RequestScope(app.router) as scope:
            cast(dict[str, object], self.scope)[_SCOPE_KEY] = scope

            async def send_and_release(message: ASGISendEvent) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    # The last byte is with the kernel. Given back here and not a few checkpoints
                    # later, so that a client's next request finds the slot it just left.
                    await scope.close()

            try:
                await super().__call__(receive, send_and_release)
            except BaseException as error:
                # A real error that comes together with a cancellation is lost further up.
                if (real := _without_cancellation(error)) is not None:
                    log.error("a request failed", exc_info=real)
                raise


def request_scope(request: Request) -> RequestScope:
    """The scope that was opened around this request."""
    return cast(RequestScope, cast(dict[str, object], request.scope)[_SCOPE_KEY])


def _without_cancellation(error: BaseException) -> BaseException | None:
    if isinstance(error, trio.Cancelled):
        return None
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1]
    return error
