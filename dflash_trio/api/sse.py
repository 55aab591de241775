"""Server-sent events: one line of strict JSON for each, safe for clients that split naively."""

from __future__ import annotations

import json
from typing import Any

from .json_text import dump_in_parts

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: keeps proxies and clients from giving up, shows up nowhere."""
DONE = b"data: [DONE]\n\n"

# One for all: json.dumps would make one for each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# Line ends to Python's str.splitlines and to JavaScript, but not to JSON or to SSE.
_ESCAPES = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


def json_line(value: Any, *, large: bool = False) -> str:
    """Compact JSON on one line, with every Unicode line separator escaped.

    ``large``: made in parts; see json_text.
    """
    text = dump_in_parts(value, compact=True) if large else _encode(value)
    if not text.isascii():
        # Not str.translate, which takes a tenth of a second for a megabyte.
        for separator, escape in _ESCAPES.items():
            text = text.replace(separator, escape)
    return text


def event(value: Any, name: str | None = None) -> bytes:
    """One event; ``name``: of its kind, where the stream has several."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json_line(value)}\n\n".encode()
