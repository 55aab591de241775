"""Parsing of bodies where it blocks nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

LARGE_BODY = 64 * 1024
"""Bytes from which a body is parsed on a thread: below, the hop costs more than the parsing."""

T = TypeVar("T")


async def parse_body(
    parse: Callable[[bytes], T], raw: bytes, *, limiter: trio.CapacityLimiter | None = None
) -> T:
    """``parse(raw)``, on a thread if it may take long. ``limiter``: for those threads."""
    if len(raw) < LARGE_BODY:
        return parse(raw)
    return await trio.to_thread.run_sync(parse, raw, limiter=limiter)
