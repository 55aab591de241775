"""JSON of large answers, made so that others may run meanwhile.

Python's encoder keeps the interpreter to itself until it is done: a megabyte of small objects takes
tenths of a second, in which no other thread runs, the event loop's included. Here long arrays are
encoded some items at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from attrs import frozen

SLICE = 64
"""Items that are encoded at once: a millisecond, also where each is a token's log probability with
twenty alternatives."""


@frozen
class LongArray:
    """An array whose items are made while it is encoded, and are not all there at a time."""

    items: Iterable[Any]


def dump_in_parts(value: Any, *, compact: bool = False) -> str:
    """What ``json.dumps(value, ensure_ascii=False)`` gives. ``compact``: without blanks.

    For threads: slower than ``json.dumps``. ``value`` has strings as keys, and may have LongArray
    in it.
    """
    comma, colon = (",", ":") if compact else (", ", ": ")
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(comma, colon))
    return "".join(_parts(value, encoder, comma, colon))


def _parts(value: Any, encoder: json.JSONEncoder, comma: str, colon: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{comma if index else ''}{encoder.encode(key)}{colon}"
            yield from _parts(item, encoder, comma, colon)
        yield "}"
    elif isinstance(value, LongArray) or (isinstance(value, list | tuple) and len(value) > SLICE):
        items = iter(value.items if isinstance(value, LongArray) else value)
        yield "["
        between = ""
        for first in items:
            some = [*islice(chain((first,), items), SLICE)]
            yield between + encoder.encode(some)[1:-1]
            between = comma
        yield "]"
    elif isinstance(value, list | tuple):
        yield "["
        for index, item in enumerate(value):
            if index:
                yield comma
            yield from _parts(item, encoder, comma, colon)
        yield "]"
    else:
        yield encoder.encode(value)
