"""The id of the request that is being answered."""

from __future__ import annotations

from quart import request

from .request_record import request_record


def current_request_id() -> str:
    """The client's own if it is printable and short, else one that was made for it."""
    return request_record(request).request_id
