"""JSON as models write it, read character by character: values, and objects that are calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from .reader import SPACES, Emit, PieceReader, Reading

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
INCIDENTAL_KEYS = ("type", "id")
"""Keys that may stand before a call's name even where nothing but its name marks a call."""

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_BEFORE_STRING = frozenset("{[(,:=")
"""What stands before a string. A quote behind anything else is one too many, or one too few was
written before it."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def escaped(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def nowhere(text: str) -> None:
    """An Emit for what nobody wants."""


def copy_value(reader: PieceReader, emit: Emit, tags: Sequence[str] = ()) -> Reading[None]:
    """Hands a value on as it is written, from its first character to its last, JSON or not.

    An object ends where its brackets close. Anything else but a string ends before what cannot
    belong to it in an object: a bracket that closes none of its own, or a comma and the next key.

    ``tags``: what the format has behind a call. One of them ends the value too, and stays. In a
    string it is part of the string, unless the quotes so far do not tell what is a string.

    Control characters in strings, which JSON forbids and models write, are escaped.
    """
    first = yield from reader.peek()
    if first == '"':
        emit(reader.take())
        yield from _copy_string(reader, emit)
        return
    starts = frozenset(tag[0] for tag in tags)
    closers: list[str] = []
    count = dict.fromkeys(_CLOSERS.values(), 0)
    """How many of each are in ``closers``, so that none is looked for in vain."""
    waiting: list[str] = []
    """Blanks and commas, which are the value's only if it goes on behind them."""
    previous = ":"
    doubtful = False
    while character := (yield from reader.peek()):
        if character == "}" and not count["}"]:
            break
        if not closers:
            if character == "]" or (character == '"' and "," in waiting):
                break
            if character == "," or character in SPACES:
                waiting.append(reader.take())
                continue
        if character in starts:
            tag, text = yield from reader.match_or_text(*tags)
            if tag:
                reader.put_back(tag)
                break
        else:
            text = reader.take()
        emit("".join((*waiting, text)))
        waiting.clear()
        if character == '"' or (character == "'" and previous in _BEFORE_STRING):
            doubtful = doubtful or character == "'" or previous not in _BEFORE_STRING
            yield from _copy_string(reader, emit, character, tags if doubtful else None)
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            count[_CLOSERS[character]] += 1
        elif count.get(character):
            # Brackets inside of this one that were left open are closed with it.
            closer = ""
            while closer != character:
                closer = closers.pop()
                count[closer] -= 1
            if first == "{" and not closers:
                break
        if text[-1] not in SPACES:
            previous = text[-1]
    if waiting:
        reader.put_back("".join(waiting))


def _copy_string(
    reader: PieceReader, emit: Emit, quote: str = '"', tags: Sequence[str] | None = None
) -> Reading[None]:
    """From behind the opening quote. ``tags``: what ends it besides its quote, where it may be
    none; then it is left exactly as it is."""
    starts = frozenset(tag[0] for tag in tags or ())
    while character := (yield from reader.peek()):
        if character in starts:
            tag, text = yield from reader.match_or_text(*(tags or ()))
            if tag:
                reader.put_back(tag)
                return
            emit(text)
            continue
        reader.take()
        emit(character if character >= " " or tags is not None else escaped(character))
        if character == quote:
            return
        if character == "\\" and (yield from reader.peek()) in (quote, "\\"):
            emit(reader.take())


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


def read_any_call(reader: PieceReader, tags: Sequence[str] = ()) -> Reading[bool]:
    """After white space, an object that is a call whatever its name. False: there is none.

    ``tags``: as for ``copy_value``.
    """
    if (yield from reader.skip_spaces()) != "{":
        return False
    return (yield from read_call_object(reader, None, tags))


def read_call_object(
    reader: PieceReader, known: Collection[str] | None, tags: Sequence[str] = ()
) -> Reading[bool]:
    """Reads ``{"name": ..., "arguments": {...}}`` from its brace on, begins the call and ends it.

    ``known``: where nothing marks a call but these names. Then the call begins only once its
    arguments do, as objects with a name are many. ``None``: any name will do, at once.

    ``tags``: as for ``copy_value``.

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
            yield from read_arguments(reader, reader.arguments if begun else early.append, tags)
        elif known is not None and not begun and key not in INCIDENTAL_KEYS:
            return False
        else:
            yield from copy_value(reader, nowhere, tags)
    if character == "}":
        reader.take()
        if name and not begun:
            reader.begin(name)
            begun = True
        if begun and not given:
            reader.arguments("{}")
    reader.end()
    return begun


def read_arguments(reader: PieceReader, emit: Emit, tags: Sequence[str] = ()) -> Reading[None]:
    """The value of the arguments, as it is; a string that holds the text of an object, which some
    models write, without its quotes; ``{}`` where there is none, or null.

    ``tags``: as for ``copy_value``.
    """
    character = yield from reader.peek()
    if character == '"':
        reader.take()
        if (yield from reader.peek()) == '"':
            emit("{}")
        yield from read_string(reader, emit)
        return
    may_be_null = character in ("n", "N")
    given: list[str] = []

    def keep(text: str) -> None:
        if may_be_null or not given:
            given.append(text)
        if not may_be_null:
            emit(text)

    yield from copy_value(reader, keep, tags)
    if may_be_null:
        text = "".join(given)
        emit("{}" if text in ("null", "None") else text)
    elif not given and (yield from reader.peek()):
        emit("{}")
