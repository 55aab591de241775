"""One hostile request by its route, seed and number: always the same one."""

from __future__ import annotations

import gzip
import random
from typing import Any

from attrs import frozen

from .hostile import EVERYTHING, Pairs, any_value, encode
from .shapes import SHAPES

IDS = ("resp_x", "a" * 2000, "%00", "%0d%0aevil:%201", "..", "%2e%2e%2f", "%c3%a9", "%ff", "%7b%7d")
CONTENT_TYPES = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""),
    *("application/json; charset=utf-16", "application/json; charset=banana", "text/html", "\xe9"),
    *("application/json;;;=", "x" * 3000),
)
HEADERS: tuple[dict[str, str], ...] = (
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "identity"},
    {"Content-Encoding": "br, gzip"},
    {"Accept": "text/html"},
    {"Accept-Encoding": "zstd, gzip, br"},
    {"x-request-id": "mine-1"},
    {"x-request-id": "\xe9\x7f"},
    {"x-request-id": "a" * 5000},
    {"anthropic-version": "banana", "anthropic-beta": "x" * 200},
    {"Cookie": "a=b; " * 100},
    {"Origin": "http://localhost:1"},
    {"X-HTTP-Method-Override": "DELETE"},
    {"Range": "bytes=0-1"},
    {"If-None-Match": "*"},
    {"Expect": "100-continue"},
)


@frozen
class Case:
    """A request, ready to send."""

    route: str
    number: int
    path: str
    body: bytes
    headers: dict[str, str]


def make_case(route: str, seed: int, number: int) -> Case:
    """The case of this number. Linear in its size, which is some hundred kilobytes at most."""
    chance = random.Random(f"{route} {seed} {number}")
    body: Any = SHAPES[route](chance)
    kind = chance.random()
    if kind < 0.2:
        pass  # as it is: what is right, or only carries a weird schema, must get on
    elif kind < 0.75:
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            body = _mutated(body, chance)
    elif kind < 0.80:
        body = chance.choice(EVERYTHING)
    text = encode(body, ascii_only=chance.random() < 0.5)
    raw = text.encode("utf-8", "surrogatepass")
    headers: dict[str, str] = {}
    if kind >= 0.80:
        raw = _other_bytes(raw, chance)
    if chance.random() < 0.12:
        headers["Content-Type"] = chance.choice(CONTENT_TYPES)
    if chance.random() < 0.12:
        headers |= chance.choice(HEADERS)
    path = route.replace("{response_id}", chance.choice(IDS))
    if chance.random() < 0.1:
        path = path.removeprefix("/v1") if path.startswith("/v1") else f"/v1{path}"
    if chance.random() < 0.1:
        path += chance.choice(("?beta=true", "?" + "a" * 3000, "?x=%ff", "/", "?a=b&a=c;d"))
    return Case(route, number, path, raw, headers)


# ------------------------------------------------------------------------ changes to a value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a body, its own (empty) one included."""
    found = [path]
    if isinstance(value, dict):
        for key, child in value.items():
            found += _places(child, (*path, key))
    elif isinstance(value, list) and len(value) <= 50:
        for index, child in enumerate(value):
            found += _places(child, (*path, index))
    return found


def _mutated(body: Any, chance: random.Random) -> Any:
    if not isinstance(body, dict):
        return body
    places = _places(body)
    # Half of the time one of the body's own fields: those are the ones with a meaning.
    shallow = [place for place in places if len(place) == 1]
    path = chance.choice(shallow if shallow and chance.random() < 0.5 else places)
    if not path:
        return {**body, **_unexpected(chance)}
    return _changed(body, path, chance)


def _changed(value: Any, path: tuple[Any, ...], chance: random.Random) -> Any:
    """A copy of ``value`` with what is at ``path`` changed, left out or doubled."""
    key, *rest = path
    if rest:
        inner = _changed(value[key], tuple(rest), chance)
    else:
        how = chance.random()
        if how < 0.15:
            return _without(value, key)
        if how < 0.22 and isinstance(value, dict):
            return Pairs((*value.items(), (key, chance.choice((value[key], any_value(chance))))))
        if how < 0.30 and isinstance(value, list):
            return value * chance.choice((2, 3, 300))
        inner = _other(value[key], chance)
    if isinstance(value, dict):
        return {**value, key: inner}
    return [inner if index == key else item for index, item in enumerate(value)]


def _without(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if name != key}
    return [item for index, item in enumerate(value) if index != key]


def _other(value: Any, chance: random.Random) -> Any:
    match chance.randrange(8):
        case 0:
            return [value]
        case 1:
            return {"x": value}
        case 2:
            return str(value)[:5000]
        case 3 if isinstance(value, str):
            return value * chance.choice((2, 100))
        case 4 if isinstance(value, str):
            return f"{value}{chance.choice(('<|im_end|>', chr(0), chr(0x2028), 'é', ' '))}"
    return any_value(chance)


def _unexpected(chance: random.Random) -> dict[str, Any]:
    """A field that this route may or may not know, of any kind."""
    names = ("n", "logprobs", "stop", "tools", "tool_choice", "thinking", "stream", "system")
    names += ("input", "prompt", "content", "tokens", "model", "previous_response_id", "store")
    names += (
        "grammar",
        "json_schema",
        "guided_choice",
        "logit_bias",
        "seed",
        "messages",
        "reasoning",
    )
    names += ("reasoning", "text", "include", "background", "audio", "functions", "echo", "suffix")
    names += ("", "\0", "__proto__", "é" * 200, "$schema", "chat_template", "chat_template_kwargs")
    return {chance.choice(names): any_value(chance)}


# ------------------------------------------------------------------------- changes to bytes


def _other_bytes(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw) + 1)
    match chance.randrange(16):
        case 0 | 1:
            return raw[:at]
        case 2:
            return b"\xef\xbb\xbf" + raw
        case 3:
            return raw.decode("utf-8", "replace").encode("utf-16")
        case 4:
            return raw.decode("utf-8", "replace").encode("utf-32-le")
        case 5:
            return gzip.compress(raw)
        case 6:
            return raw + chance.choice((b"x", b"\0", b"{}", b"]", b"\n\n", b" " * 5000, raw))
        case 7:
            return raw[:at] + bytes([chance.randrange(256)]) + raw[at:]
        case 8:
            return raw[:at] + chance.randbytes(chance.choice((1, 4, 200))) + raw[at + 1 :]
        case 9:
            return raw[at:]
        case 10:
            return raw.decode("utf-8", "replace").encode("latin-1", "replace")
        case 11:
            return chance.randbytes(chance.choice((0, 1, 50, 5000)))
        case 12:
            return (
                raw[:at] + chance.choice((b"\xed\xa0\x80", b"\xc0\x80", b"\xf8", b"\0")) + raw[at:]
            )
        case 13:
            return raw.replace(b'"', b"'")
        case 14:
            return b"[" + raw + b"]" if chance.random() < 0.5 else b"[" * 5000 + raw
        case _:
            changed = bytearray(raw)
            for _ in range(chance.choice((1, 3, 10))):
                if changed:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            return bytes(changed)
