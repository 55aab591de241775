"""Parsing of bodies where it blocks nobody."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import trio

LARGE_BODY = 16 * 1024
"""Bytes from which a body is parsed on a thread. Below, parsing takes some milliseconds at the
worst (many tiny messages); the hop to a thread and back takes a tenth of one."""

_COSTLY = re.compile(
    rb'"(?:schema|json_schema|parameters|input_schema|structured_outputs|[\w_]*grammar|guided_\w+)"'
    rb"|\\u00[2-7]"
)
"""Keys of schemas and grammars, which are checked with the body: a hostile one of some kilobytes
takes a second. And escapes of plain letters, which nobody needs, and behind which any key hides."""

T = TypeVar("T")


async def parse_body(
    parse: Callable[[bytes], T],
    raw: bytes,
    *,
    limiter: trio.CapacityLimiter | None = None,
    costly: tuple[bytes, ...] = (),
) -> T:
    """``parse(raw)``, on a thread if it may take long. ``limiter``: for those threads.

    ``costly``: what a body that takes long has in it, beside schemas and grammars.
    """
    if len(raw) < LARGE_BODY and not _COSTLY.search(raw) and not any(map(raw.count, costly)):
        return parse(raw)
    return await trio.to_thread.run_sync(parse, raw, limiter=limiter)
