"""What one rendering of a chat template may use: time, characters, and the size of each value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

_MOST_BITS = 1024  # of an integer; larger ones only serve to burn time
# In printf and in brace formats alike: a width or precision of five digits, one taken from the
# arguments.
_LONG_WIDTH = re.compile(r"%[^a-zA-Z%]*\d{5}|\{[^{}]*\d{5}")
_DYNAMIC_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]+\{")
_SIZED_BY_AN_INTEGER = frozenset(
    [
        "*",
        "batch",
        "center",
        "expandtabs",
        "indent",
        "ljust",
        "rjust",
        "slice",
        "tojson",
        "wordwrap",
        "zfill",
    ]
)


class RenderLimit(Exception):
    """A rendering went on for too long or grew too large."""


@attrs.define
class RenderMeter:
    """What one rendering may use, and has used."""

    deadline: float
    """In terms of ``clock``."""
    most_characters: int
    """Bound of all text written, and of any one value."""
    clock: Callable[[], float]
    written: int = 0
    """Characters so far; text of a macro counts again where the macro's result is written."""

    def tick(self) -> None:
        """Look at the deadline."""
        if self.clock() > self.deadline:
            raise RenderLimit("the chat template ran for too long")

    def wrote(self, text: str) -> str:
        """Count a text on its way out."""
        self.tick()
        self.written += len(text)
        if self.written > self.most_characters:
            self.too_large()
        return text

    def check(self, value: Any) -> Any:
        """Bound the size of a value."""
        if isinstance(value, str | list | tuple | dict):
            if len(value) > self.most_characters:
                self.too_large()
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            self.too_large()
        return value

    def too_large(self) -> None:
        """Refuse to go on."""
        raise RenderLimit("the chat template produced too much text")

    def text_of(self, value: Any) -> str:
        """``str(value)``, bounded also for values that contain others many times over."""
        if not isinstance(value, str):
            self.measure(value)
            value = str(value)
        return self.wrote(value)

    def measure(self, value: Any) -> None:
        """Refuse a value whose parts, counted wherever they occur, are too many."""
        left = self.most_characters
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, dict):
                stack.extend(item.keys())
                stack.extend(item.values())
                left -= len(item)
            elif isinstance(item, list | tuple):
                stack.extend(item)
                left -= len(item)
            elif isinstance(item, str):
                left -= len(item)
            if left < 0:
                self.too_large()
            if len(stack) & 0xFFF == 0xFFF:
                self.tick()

    def before(self, name: str, subject: Any, args: Iterable[Any]) -> None:
        """Refuse an operation whose result would be far larger than what goes into it."""
        self.tick()
        args = tuple(args)
        most = self.most_characters
        size = _length(subject)
        if name in ("format", "format_map", "%") and isinstance(subject, str):
            dynamic = _DYNAMIC_WIDTH.search(subject) and max(_integers(args), default=0) > 9999
            if dynamic or _LONG_WIDTH.search(subject):
                self.too_large()
        elif name == "replace" and isinstance(subject, str):
            old, new, *_ = (*args, None, None)
            if isinstance(old, str) and subject.count(old) * _length(new) > most:
                self.too_large()
        elif name == "join":  # as a filter, and as a method of the separator
            if any(size * _length(other) > most for other in args):
                self.too_large()
        elif name in ("**", "round", "to_bytes"):
            if max(_integers(args), default=0) > _MOST_BITS:
                self.too_large()
        elif (
            name in _SIZED_BY_AN_INTEGER
            and not isinstance(subject, int | float)
            and size * max(_integers(args), default=0) > most
        ):
            self.too_large()


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def _integers(args: Iterable[Any]) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, dict):
            arg = tuple(arg.values())
        for value in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(value, int):
                yield abs(value)
