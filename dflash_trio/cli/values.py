"""What may stand after an option: one :class:`ValueType` for each kind of value.

A value arrives as text, from the command line or from a TOML scalar written out again, and leaves
as the Python object the configuration wants. Ranges live in the types, so that the same sentence
is the check, the error's remedy and the help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from dflash_trio.config import BACKENDS, DevicePlacement

# Python's int() and float() also read "1_000", " 7" and other scripts' digits. A launch script is
# read by people, so only the plain spellings count.
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")

_LONGEST_INTEGER = 40

NAME_CHARACTERS = 128


class BadValue(ValueError):
    """The text is no value of its type; ``str()`` continues the phrase ``--option text ...``."""


@frozen
class ValueType:
    """A kind of value: how it is shown, how it is read, and which TOML types may hold it."""

    metavar: str
    form: str
    """What a good value looks like, to follow ``write``."""
    parse: Callable[[str], Any]
    """Text to value; :class:`BadValue` says what is wrong with the text."""
    toml: tuple[type, ...] = (str,)
    limits: str = ""
    """The range in words, for the help; empty where the form says enough."""
    words: tuple[str, ...] = ()
    """Words that are values, for a shell to offer; not all values, where there are others."""


def integer(
    minimum: int,
    maximum: int,
    *,
    metavar: str = "N",
    words: Mapping[str, object] | None = None,
) -> ValueType:
    """Whole numbers from ``minimum`` to ``maximum``, and the ``words`` that mean a value too."""
    special = dict(words or {})

    def parse(text: str) -> object:
        if text in special:
            return special[text]
        if not _INTEGER.fullmatch(text):
            raise BadValue("is not a whole number")
        # int() of thousands of digits is slow, and refused by Python itself.
        value = int(text) if len(text) <= _LONGEST_INTEGER else maximum + 1
        if not minimum <= value <= maximum:
            raise BadValue("is out of range")
        return value

    limits = " or ".join([*special, f"{minimum} to {maximum}"])
    form = " or ".join([*special, f"a whole number from {minimum} to {maximum}"])
    spelled = any(not _INTEGER.fullmatch(word) for word in special)
    return ValueType(metavar, form, parse, (int, str) if spelled else (int,), limits)


def number(minimum: float, maximum: float, *, above: bool = False, metavar: str = "X") -> ValueType:
    """Finite numbers from ``minimum`` (itself excluded with ``above``) to ``maximum``."""

    def parse(text: str) -> float:
        if not _NUMBER.fullmatch(text):
            raise BadValue("is not a finite number")
        value = float(text)
        if math.isinf(value) or not minimum <= value <= maximum or (above and value == minimum):
            raise BadValue("is out of range")
        return value

    low, high = _plain(minimum), _plain(maximum)
    limits = f"above {low}, at most {high}" if above else f"{low} to {high}"
    return ValueType(
        metavar, f"a number {limits if above else 'from ' + limits}", parse, (int, float), limits
    )


def _plain(bound: float) -> str:
    return f"{bound:.6f}".rstrip("0").rstrip(".")


def choice(*allowed: str) -> ValueType:
    """One word out of ``allowed``."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise BadValue("is not a value of this option")
        return text

    *others, last = allowed
    form = f"{', '.join(others)} or {last}" if others else last
    return ValueType("|".join(allowed), form, parse, words=allowed)


def _path(text: str) -> str:
    if not text:
        raise BadValue("is empty")
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BadValue("is no path") from None
    if b"\0" in encoded:
        raise BadValue("is no path")
    return text


def _path_or_off(text: str) -> str | None:
    return None if text == "off" else _path(text)


def _name(text: str) -> str:
    if not text.strip():
        raise BadValue("is blank")
    if len(text) > NAME_CHARACTERS:
        raise BadValue("is too long")
    if not text.isprintable():
        raise BadValue("has characters that do not print")
    return text


def _api_key(text: str) -> bytes:
    try:
        key = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BadValue("is not text") from None
    return check_api_key(key)


def check_api_key(key: bytes) -> bytes:
    """The key itself, if a client could send it in a header; :class:`BadValue` otherwise."""
    if not key:
        raise BadValue("is empty")
    if key != key.strip():
        raise BadValue("begins or ends with a blank, which no header can carry")
    if any(byte < 0x20 or byte == 0x7F for byte in key):
        raise BadValue("has control characters, which no header can carry")
    return key


def _device(text: str) -> DevicePlacement:
    try:
        return DevicePlacement.parse(text)
    except ValueError:
        raise BadValue("is no device") from None


def _device_or_auto(text: str) -> DevicePlacement | None:
    return None if text == "auto" else _device(text)


def _draft_device(text: str) -> DevicePlacement | str | None:
    # A remote device has an address behind the prefix, which only its server can judge.
    if text.startswith("rpc:") and len(text) > len("rpc:") and text.isprintable():
        return text
    return _device_or_auto(text)


def _host(text: str) -> str:
    if not text:
        raise BadValue("is empty")
    if not text.isprintable():
        raise BadValue("has characters that do not print")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise BadValue("has no path behind unix:")
        # The kernel's sockaddr_un holds 108 bytes with the closing NUL.
        if len(path.encode("utf-8", "surrogateescape")) > 107:
            raise BadValue("has a path longer than the 107 bytes of a Unix socket")
        return text
    if " " in text:  # the only blank that counts as printable
        raise BadValue("has blanks")
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "/" in host or not host:
        raise BadValue("is no address")
    if ":" in host and not _is_ip(host, 6):
        raise BadValue("is no IPv6 address (a port goes into --port)")
    return host


def _is_ip(text: str, version: int) -> bool:
    from ipaddress import ip_address

    try:
        return ip_address(text).version == version
    except ValueError:
        return False


_ORIGIN = re.compile(
    r"(https?)://(?:([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?)|\[([^\]]*)\])(?::([1-9][0-9]{0,4}))?"
)
_NUMERIC_NAME = re.compile(r"(?:^|\.)(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?$")


def _origin(text: str) -> str:
    """As browsers write it, or it would match none: no path, no user, and numbers in one form."""
    if text == "*":
        return text
    if "*" in text:
        raise BadValue("has a * within, and the only wildcard is * alone")
    parts = _ORIGIN.fullmatch(text)
    if parts is None:
        raise BadValue("is no origin")
    scheme, name, bracketed, port = parts.groups()
    if port is not None and int(port) > 65535:
        raise BadValue("has no port from 1 to 65535")
    if bracketed is not None:
        from ipaddress import IPv6Address

        if "%" in bracketed or not _is_ip(bracketed, 6):
            raise BadValue("has no IPv6 address in its brackets")
        name = f"[{IPv6Address(bracketed).compressed}]"
    elif _NUMERIC_NAME.search(name) and not _is_ip(name, 4):
        # Browsers read such a name as an address, and write 127.1 as 127.0.0.1.
        raise BadValue("has no IPv4 address in its usual form")
    return f"{scheme}://{name}" + (f":{port}" if port else "")


def _curve_point(text: str) -> tuple[int, float]:
    tokens, colon, ratio = text.partition(":")
    try:
        if colon:
            return _CURVE_TOKENS.parse(tokens), RATIO.parse(ratio)
    except BadValue:
        pass
    raise BadValue("is no point of a curve")


def looks_like_curve_point(text: str) -> bool:
    """Whether a word after ``--prefill-curve`` goes on with the curve instead of ending it."""
    tokens, _, ratio = text.partition(":")
    return bool(_NUMBER.fullmatch(tokens) and _NUMBER.fullmatch(ratio))


def _separated(parse: Callable[[str], object], what: str) -> Callable[[str], tuple[object, ...]]:
    def parse_all(text: str) -> tuple[object, ...]:
        parts: Sequence[str] = text.split(",")
        try:
            values = tuple(parse(part) for part in parts)
        except BadValue:
            raise BadValue(f"is no list of {what}") from None
        if len(values) < 2:
            raise BadValue(f"is no list of at least two {what}")
        return values

    return parse_all


_SOME_DEVICES = tuple(f"{backend}:0" for backend in BACKENDS)
_DEVICES = f"backend:index with one of {', '.join(BACKENDS)} (for example cuda:0)"
_CURVE_TOKENS = integer(0, 2**24)

TOKENS = integer(1, 2**24)
"""A count of tokens that has to be something."""
CONTEXT = integer(2, 2**24)
"""Cells of a sequence: a prompt has at least one token, and an answer."""
TOKEN_BUDGET = integer(0, 2**24)
"""A count of tokens that may be nothing."""
RATIO = number(0, 1, above=True)
POSITIVE = number(1e-6, 1e9)
"""Far from where single precision ends: what is too small for it would count as none."""
SECONDS = number(0, 1e9, metavar="S")
SECONDS_ABOVE_ZERO = number(0, 1e9, above=True, metavar="S")
PATH = ValueType("PATH", "a path", _path)
FILE = ValueType("FILE", "a path", _path)
TOML_FILE = ValueType("FILE.toml", "a path", _path)
DIRECTORY = ValueType("DIR", "a path", _path)
DIRECTORY_OR_OFF = ValueType("DIR|off", "a folder's path or off", _path_or_off, words=("off",))
NAME = ValueType("NAME", f"1 to {NAME_CHARACTERS} printable characters, not only blanks", _name)
API_KEY = ValueType("KEY", "a key that an HTTP header can carry", _api_key)
HOST = ValueType("ADDRESS", "an IP address, a host name or unix:/path", _host)
ORIGIN = ValueType(
    "ORIGIN", "scheme://host[:port] with http or https and nothing else, or * alone", _origin
)
DEVICE = ValueType("BACKEND:N", _DEVICES, _device, words=_SOME_DEVICES)
DEVICE_OR_AUTO = ValueType(
    "BACKEND:N|auto", f"auto or {_DEVICES}", _device_or_auto, words=("auto", *_SOME_DEVICES)
)
PRIMARY_DEVICE = ValueType("BACKEND:N", _DEVICES, _device_or_auto, words=_SOME_DEVICES)
"""``auto`` is read too, so that choosing the primary can say why it matches nothing."""
DRAFT_DEVICE = ValueType("BACKEND:N", f"auto or {_DEVICES}", _draft_device)
DEVICE_LIST = ValueType(
    "B:N,B:N", "two or more devices, for example cuda:0,cuda:1", _separated(_device, "devices")
)
WEIGHTS = ValueType(
    "W,W", "two or more numbers above 0, for example 3,2", _separated(POSITIVE.parse, "weights")
)
CURVE_POINT = ValueType(
    "T:R",
    "tokens:ratio, a whole number and a number above 0, at most 1 (for example 8000:0.5)",
    _curve_point,
)
