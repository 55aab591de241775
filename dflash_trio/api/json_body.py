"""Strict JSON from clients: what Python's parser lets through and others choke on is refused here.

Refused with a 400: anything but UTF-8, a byte order mark, NaN and Infinity, numbers beyond a
double, integers of thousands of digits, lone surrogates, duplicate keys, nesting too deep to parse.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ..generation.errors import InvalidRequest

MAX_INTEGER_DIGITS = 400
"""Longer than any double; Python itself raises ValueError beyond 4,300."""
MAX_DEPTH = 200
"""Nested arrays and objects. Far beyond any real request, far below Python's own limits."""
MAX_ARRAYS = 100_000
"""Arrays in a body. Python's parser holds its lock through any number of them, and looks at
each again and again while it does: three million empty ones stop everything for a second."""

_STRING_OR_ARRAY = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|\[', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """A request body as a JSON object. Raises InvalidRequest saying what is wrong and where.

    CPU-bound: about 10 ms for a megabyte. Call it off the event loop for large bodies.
    """
    if not raw.strip():
        raise InvalidRequest("The request body is empty: send a JSON object.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not UTF-8 (byte {error.start}): send JSON in UTF-8."
        ) from None
    _check_arrays(raw)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_bounded_integer,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON: {error.msg} "
            f"(line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The request body must be a JSON object, not {json_type_name(value)}."
        )
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


_TOO_DEEP = f"The request body is nested more than {MAX_DEPTH} levels deep."


def json_type_name(value: object) -> str:
    """What JSON calls a value's type, with its article: for error messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case _:
            return "an object"


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(
                    f"The request body has the key {printable(key)} twice in one object."
                )
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"The request body holds {name}, which JSON does not have.")


def _bounded_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise InvalidRequest(
            f"The request body holds an integer of {len(digits)} digits; "
            f"at most {MAX_INTEGER_DIGITS} are read."
        )
    return int(digits)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("The request body holds a number too large for a double.")
    return value


def _check_arrays(raw: bytes) -> None:
    if raw.count(b"[") <= MAX_ARRAYS:
        return
    # Those within strings are none. One by one, so that others may run meanwhile.
    arrays = 0
    for found in _STRING_OR_ARRAY.finditer(raw):
        arrays += found[0] == b"["
        if arrays > MAX_ARRAYS:
            raise InvalidRequest(f"The request body holds more than {MAX_ARRAYS} arrays.")


def _check_depth(value: Any) -> None:
    # Iterative: the point is not to depend on the interpreter's recursion limit.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            deeper.extend(child for child in children if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(_TOO_DEEP)


def _refuse_lone_surrogates(value: Any) -> None:
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidRequest(
                    f"The request body holds half a character (a lone surrogate) in "
                    f"{printable(item)}: text must be whole Unicode characters."
                ) from None
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def printable(text: str, limit: int = 60) -> str:
    """A client's text for an error message: quoted, short, and always encodable."""
    shown = text if len(text) <= limit else text[:limit] + "…"
    return json.dumps(shown.encode("utf-8", "replace").decode(), ensure_ascii=False)
