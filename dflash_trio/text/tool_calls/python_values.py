"""Python calls as models write them, read character by character and given out as JSON.

Nothing is evaluated. Values are literals: strings, numbers, True, False, None, lists, tuples and
dicts; a bare word, which is no literal, counts as the string of its letters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from attrs import define

from .json_values import escaped, read_code_point
from .reader import SPACES, Emit, PieceReader, Reading

_STOPS = SPACES | frozenset("()[]{},=:;'\"`<>")
"""What ends a name, a number or a word."""
_WORDS = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = dict(zip("ntrbfav\\'\"/", "\n\t\r\b\f\a\v\\'\"/", strict=True)) | {"\n": ""}
_CODE_POINTS = {"x": 2, "u": 4, "U": 8}
_LONGEST_NUMBER = 1000
"""Digits beyond which a number in a notation that JSON has not is not worked out."""


def is_name(text: str) -> bool:
    """It can be read as a name where one is expected."""
    return bool(text) and _STOPS.isdisjoint(text)


def read_word(reader: PieceReader) -> Reading[str]:
    """A name, a number or a word: all up to what ends one. May be empty."""
    word: list[str] = []
    while (character := (yield from reader.peek())) and character not in _STOPS:
        word.append(reader.take())
    return "".join(word)


def read_call_arguments(
    reader: PieceReader, parameters: Sequence[str], word: str = ""
) -> Reading[bool]:
    """Reads a call's arguments from behind the opening parenthesis until behind the closing one and
    adds them to the call that has begun, as an object.

    ``parameters``: which names arguments without one have, in order. ``word``: what was read of the
    first one already. False: it broke off.
    """
    unnamed = list(parameters)
    before = "{"
    while True:
        character = yield from reader.skip_spaces()
        if character == ")" and not word:
            reader.take()
            reader.arguments("{}" if before == "{" else "}")
            return True
        word = word or (yield from read_word(reader))
        if word and (yield from reader.skip_spaces()) == "=":
            reader.take()
            if word in unnamed:
                unnamed.remove(word)
            reader.arguments(f"{before}{_quoted(word)}: ")
            whole = yield from read_value(reader, reader.arguments)
        elif unnamed:
            reader.arguments(f"{before}{_quoted(unnamed.pop(0))}: ")
            whole = yield from read_value(reader, reader.arguments, word)
        else:
            return False
        before, word = ", ", ""
        character = yield from reader.skip_spaces()
        if character == ",":
            reader.take()
        elif character != ")":
            return False
        if not whole:
            return False


@define
class _Open:
    """A list or dict that is being read."""

    closer: str
    expects: str
    """``key``, ``colon``, ``value`` or ``comma``, which may also be the closer."""
    empty: bool = True


def read_value(reader: PieceReader, emit: Emit, word: str = "") -> Reading[bool]:
    """Reads one literal and hands it on as JSON. ``word``: what was read of it already.

    False: what comes next belongs to no literal, or the answer has ended. What was handed on is
    the beginning of a JSON value then.
    """
    stack: list[_Open] = []
    while True:
        character = yield from reader.skip_spaces()
        top = stack[-1] if stack else None
        if top is not None and not word:
            if character == top.closer and (top.expects == "comma" or top.expects != "colon"):
                if top.expects == "value" and top.closer == "}":
                    return False
                reader.take()
                emit("}" if top.closer == "}" else "]")
                stack.pop()
                if not stack:
                    return True
                continue
            if character == "," and top.expects == "comma":
                reader.take()
                top.expects = "key" if top.closer == "}" else "value"
                continue
            if character == ":" and top.expects == "colon":
                reader.take()
                emit(": ")
                top.expects = "value"
                continue
            if top.expects in ("comma", "colon"):
                return False
        is_key = top is not None and top.expects == "key"
        if top is not None:
            starts_item = is_key or top.closer != "}"
            comma = ", " if starts_item and not top.empty else ""
            top.empty = False
            top.expects = "colon" if is_key else "comma"
        else:
            comma = ""
        if not word and character in ("[", "(", "{"):
            if is_key:
                return False
            reader.take()
            emit(comma + ("{" if character == "{" else "["))
            closer = {"[": "]", "(": ")", "{": "}"}[character]
            stack.append(_Open(closer, "key" if character == "{" else "value"))
            continue
        if not word:
            word = yield from read_word(reader)
        character = yield from reader.peek()
        if character in ("'", '"') and (
            not word or word.lower() in ("r", "b", "u", "f", "rb", "br")
        ):
            emit(comma + '"')
            if not (yield from _read_string(reader, emit, raw="r" in word.lower())):
                return False
            emit('"')
        elif word:
            atom = _atom(word)
            emit(comma + (atom if not is_key or atom.startswith('"') else _quoted(word)))
        else:
            return False
        word = ""
        if not stack:
            return True


def _read_string(reader: PieceReader, emit: Emit, *, raw: bool) -> Reading[bool]:
    """Hands on what a string says, escaped for JSON; from its opening quote until behind its
    closing one."""
    quote = reader.take()
    triple = False
    if (yield from reader.peek()) == quote:
        reader.take()
        if (yield from reader.peek()) != quote:
            return True
        reader.take()
        triple = True
    closing = 0
    while character := (yield from reader.peek()):
        reader.take()
        if character == quote:
            closing += 1
            if not triple or closing == 3:
                return True
            continue
        if closing:
            emit(escaped(quote * closing))
            closing = 0
        if character != "\\":
            emit(escaped(character))
            continue
        following = yield from reader.peek()
        if not following:
            return False
        reader.take()
        if raw:
            emit(escaped("\\" + following))
        elif following in _CODE_POINTS:
            code_point = yield from read_code_point(reader, _CODE_POINTS[following])
            # Halves of a pair stay escapes, so that who reads the JSON puts them together.
            surrogate = "\ud800" <= code_point <= "\udfff"
            emit(f"\\u{ord(code_point):04x}" if surrogate else escaped(code_point))
        elif following in "01234567":
            emit(escaped((yield from _octal(reader, following))))
        else:
            emit(escaped(_ESCAPES.get(following, "\\" + following)))
    return False


def _octal(reader: PieceReader, number: str) -> Reading[str]:
    while len(number) < 3:
        digit = yield from reader.peek()
        if not digit or digit not in "01234567":
            break
        number += reader.take()
    return chr(int(number, 8))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _atom(word: str) -> str:
    """A word outside of quotes, as JSON."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if len(word) <= _LONGEST_NUMBER:
        for number in (lambda: int(word, 0), lambda: float(word)):
            try:
                value = number()
            except ValueError:
                continue
            if math.isfinite(value) if isinstance(value, float) else value.bit_length() < 4000:
                return repr(value)
    return _quoted(word)
