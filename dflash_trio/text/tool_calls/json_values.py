"""JSON as models write it, read character by character: values, and objects that are calls."""

from __future__ import annotations

import json
from collections.abc import Collection

from .reader import Emit, PieceReader, Reading

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
INCIDENTAL_KEYS = ("type", "id")
"""Keys that may stand before a call's name even where nothing but its name marks a call."""

_CLOSERS = {"{": "}", "[": "]"}
_BETWEEN = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
"""What JSON may have outside of strings and brackets."""
_ATOM = frozenset("+-.0123456789eEtrufalsn")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def escaped(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def nowhere(text: str) -> None:
    """An Emit for what nobody wants."""


def copy_value(reader: PieceReader, emit: Emit) -> Reading[bool]:
    """Hands a value on as it is written, from its first character to its last.

    Control characters in strings, which JSON forbids and models write, are escaped. False: what
    comes next cannot belong to the value, or the answer has ended, before the value has.
    """
    closers: list[str] = []
    character = yield from reader.peek()
    if character in _ATOM:
        while character and character in _ATOM:
            emit(reader.take())
            character = yield from reader.peek()
        return True
    while True:
        if character == '"':
            emit(reader.take())
            if not (yield from _copy_string(reader, emit)):
                return False
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            emit(reader.take())
        elif closers and character == closers[-1]:
            closers.pop()
            emit(reader.take())
        elif closers and character in _BETWEEN:
            emit(reader.take())
        else:
            return False
        if not closers:
            return True
        character = yield from reader.peek()


def _copy_string(reader: PieceReader, emit: Emit) -> Reading[bool]:
    while character := (yield from reader.peek()):
        reader.take()
        emit(character if character >= " " else escaped(character))
        if character == '"':
            return True
        if character == "\\" and (following := (yield from reader.peek())):
            emit(escaped(reader.take()) if following < " " else reader.take())
    return False


def read_string(reader: PieceReader, emit: Emit) -> Reading[bool]:
    """Hands on what a string says, from behind its opening quote until behind its closing one.
    False: the answer ended in it."""
    high = ""
    while character := (yield from reader.peek()):
        reader.take()
        if character == '"':
            return True
        if character == "\\":
            character = yield from reader.peek()
            if not character:
                return False
            reader.take()
            character = _ESCAPES.get(character, character)
            if character == "u":
                character = yield from read_code_point(reader, 4)
                if "\ud800" <= character < "\udc00":
                    high = character
                    continue
                if high and "\udc00" <= character < "\ue000":
                    character = (
                        (high + character).encode("utf-16", "surrogatepass").decode("utf-16")
                    )
                elif "\udc00" <= character < "\ue000":
                    character = "\ufffd"
        high = ""
        emit(character)
    return False


def read_code_point(reader: PieceReader, digits: int) -> Reading[str]:
    """The character of a hexadecimal number of at most so many digits; U+FFFD for none."""
    number = ""
    while len(number) < digits:
        digit = yield from reader.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            break
        number += reader.take()
    code = int(number, 16) if number else 0x110000
    return chr(code) if code < 0x110000 else "\ufffd"


def read_any_call(reader: PieceReader) -> Reading[bool]:
    """After white space, an object that is a call whatever its name. False: there is none."""
    if (yield from reader.skip_spaces()) != "{":
        return False
    return (yield from read_call_object(reader, None))


def read_call_object(reader: PieceReader, known: Collection[str] | None) -> Reading[bool]:
    """Reads ``{"name": ..., "arguments": {...}}`` from its brace on, begins the call and ends it.

    ``known``: where nothing marks a call but these names. Then the call begins only once its
    arguments do, as objects with a name are many. ``None``: any name will do, at once.

    False: it is no call, and nothing was begun. True: there was a call, whole or broken.
    """
    reader.take()
    name = ""
    early: list[str] = []
    begun = given = False
    while True:
        character = yield from reader.skip_spaces()
        if character == ",":
            reader.take()
            continue
        if character != '"':
            break
        reader.take()
        parts: list[str] = []
        if not (yield from read_string(reader, parts.append)):
            break
        key = "".join(parts)
        if (yield from reader.skip_spaces()) != ":":
            break
        reader.take()
        character = yield from reader.skip_spaces()
        if key in NAME_KEYS and character == '"' and not name:
            reader.take()
            parts = []
            if not (yield from read_string(reader, parts.append)):
                break
            name = "".join(parts)
            if known is not None and name not in known:
                return False
            if name and (known is None or given):
                reader.begin(name)
                begun = True
                reader.arguments("".join(early))
        elif key in ARGUMENT_KEYS and not given:
            if name and not begun:
                reader.begin(name)
                begun = True
            given = True
            if not (
                yield from _read_arguments(reader, reader.arguments if begun else early.append)
            ):
                break
        elif known is not None and not begun and key not in INCIDENTAL_KEYS:
            return False
        elif not (yield from copy_value(reader, nowhere)):
            break
    if character == "}":
        reader.take()
        if name and not begun:
            reader.begin(name)
            begun = True
        if begun and not given:
            reader.arguments("{}")
    reader.end()
    return begun


def _read_arguments(reader: PieceReader, emit: Emit) -> Reading[bool]:
    """The value of the arguments: an object as it is; a string that holds the text of one, which
    some models write; ``{}`` for anything else."""
    character = yield from reader.peek()
    if character == "{":
        return (yield from copy_value(reader, emit))
    if character == '"':
        reader.take()
        if (yield from reader.peek()) == '"':
            emit("{}")
        return (yield from read_string(reader, emit))
    whole = yield from copy_value(reader, nowhere)
    if whole:
        emit("{}")
    return whole
