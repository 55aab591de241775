"""The id of the request that is being answered."""

from __future__ import annotations

from quart import g, request

from ..net.error_response import client_request_id, new_request_id


def current_request_id() -> str:
    """The client's own if it is printable and short, else a new one, which then stays."""
    if "request_id" not in g:
        g.request_id = client_request_id(request.scope["headers"]) or new_request_id()
    return str(g.request_id)
