"""The JSON error answers that this floor gives by itself, before any application sees a request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus
from time import time
from uuid import uuid4
from wsgiref.handlers import format_date_time

# A client's own x-request-id is echoed when it is at most this many printable ASCII characters.
MAX_REQUEST_ID_LENGTH = 128

# The 5xx answers that are about what the client sent, not about a fault of ours.
_CLIENT_FAULTS_ABOVE_500 = frozenset({501, 505})


def new_request_id() -> str:
    """A fresh, unguessable id for an answer whose request brought none."""
    return f"req_{uuid4().hex}"


def client_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The ``x-request-id`` the client sent, or None when it is absent, long or not printable."""
    for name, value in headers:
        if name.lower() == b"x-request-id":
            text = value.decode("latin-1").strip()
            fine = text.isascii() and text.isprintable() and " " not in text
            return text if fine and 0 < len(text) <= MAX_REQUEST_ID_LENGTH else None
    return None


def error_body(status: int, message: str) -> bytes:
    """An error object in OpenAI's shape, encoded. *message* is one sentence for people."""
    ours = status >= 500 and status not in _CLIENT_FAULTS_ABOVE_500
    error = {
        "message": message,
        "type": "server_error" if ours else "invalid_request_error",
        "param": None,
        "code": None,
    }
    return json.dumps({"error": error}).encode()


def error_headers(body: bytes, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers that go with :func:`error_body`; they announce that the connection closes."""
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
    ]


def raw_error_response(status: int, message: str) -> bytes:
    """A whole HTTP/1.1 error response, for connections that get no protocol object at all."""
    body = error_body(status, message)
    date = (b"date", format_date_time(time()).encode())
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    headers = [date, *error_headers(body, new_request_id())]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    lines += [b"%s: %s" % header for header in headers]
    return b"\r\n".join([*lines, b"", body])
