"""Server-sent events: one line of strict JSON for each, safe for clients that split naively."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: keeps proxies and clients from giving up, shows up nowhere."""
DONE = b"data: [DONE]\n\n"

# Line ends to Python's str.splitlines and to JavaScript, but not to JSON or to SSE.
_ESCAPES = {0x2028: "\\u2028", 0x2029: "\\u2029", 0x85: "\\u0085"}


def json_line(value: Any) -> str:
    """Compact JSON on one line, with every Unicode line separator escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_ESCAPES)


def event(value: Any) -> bytes:
    """One ``data:`` event."""
    return f"data: {json_line(value)}\n\n".encode()
