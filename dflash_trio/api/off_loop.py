"""Parsing of bodies where it blocks nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

LARGE_BODY = 16 * 1024
"""Bytes from which a body is parsed on a thread. Below, parsing takes some milliseconds at the
worst (many tiny messages); the hop to a thread and back takes a tenth of one."""

T = TypeVar("T")


async def parse_body(
    parse: Callable[[bytes], T], raw: bytes, *, limiter: trio.CapacityLimiter | None = None
) -> T:
    """``parse(raw)``, on a thread if it may take long. ``limiter``: for those threads."""
    if len(raw) < LARGE_BODY:
        return parse(raw)
    return await trio.to_thread.run_sync(parse, raw, limiter=limiter)
