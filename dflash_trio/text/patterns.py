"""Regular expressions of clients: refused where their meaning would not be what they say."""

from __future__ import annotations

import re

from .bad_constraint import BadConstraint, quoted

MAX_PATTERN = 16_384
"""Characters of one expression."""
MAX_REPEAT = 100_000
"""The largest count in ``{n,m}``."""

_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_COUNT_BEFORE = re.compile(r"\{\d+(?:,\d*)?\}\Z")
_GROUP = re.compile(r"\(\?(?::|<[A-Za-z_]\w*>)")
_ECMA_LETTERS = "dDwWsSnrtfvxupPbB"
"""Letters that may follow a backslash; ``b`` and ``B`` are refused when it is compiled."""
_ESCAPED = re.compile(r"(?s)\\.")
_WORDS = re.compile(r"(?s)\\.|\[(?:\\.|[^\]\\])*\]|\.")
"""What is or has a word of an expression; a dot in a class stands for itself."""
_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# The engine's dot leaves out \n alone, and its space is Unicode's: U+0085 is one, U+FEFF is not.
_ECMA_WORDS = {".": r"[^\n\r\u2028\u2029]", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}


def check_pattern(pattern: str, *, schema: bool) -> None:
    """Refuse what the engine would read differently, or not at all. Raises BadConstraint.

    ``schema``: it stands in a JSON Schema, whose expressions are JavaScript's; inline flags and
    the engine's own escapes are then refused, because JavaScript has none of them.
    """
    if len(pattern) > MAX_PATTERN:
        raise BadConstraint(f"a pattern is longer than {MAX_PATTERN} characters")
    at, in_class, shown = 0, False, quoted(pattern)
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            _check_escape(pattern[at + 1 : at + 2], schema, shown)
            at += 2
            continue
        if in_class:
            # Set operations and nested classes are the engine's; elsewhere they are characters.
            if char == "[" or pattern[at : at + 2] in ("&&", "--", "~~"):
                raise BadConstraint(
                    f"the pattern {shown} has {char!r} in a class, which needs a backslash"
                )
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if pattern[at + 1 : at + 2] == "^":
                at += 1
            if pattern[at + 1 : at + 2] == "]":
                raise BadConstraint(f"the pattern {shown} has an empty class")
        elif char == "(" and pattern[at + 1 : at + 2] == "?":
            _check_group(pattern, at, schema, shown)
        elif char == "{":
            _check_counts(_COUNTED.match(pattern, at), shown)
        elif char == "+" and at and _is_quantifier(pattern, at - 1):
            # Python's possessive one; to the engine it repeats what was repeated already.
            raise BadConstraint(f"the pattern {shown} has a possessive quantifier")
        at += 1


def _is_quantifier(pattern: str, at: int) -> bool:
    """Whether the character, which is in no class, ends a quantifier."""
    escaped = (at - len(pattern[:at].rstrip("\\"))) % 2 == 1
    if pattern[at] == "}":
        return not escaped and _COUNT_BEFORE.search(pattern, 0, at + 1) is not None
    return pattern[at] in "?*+" and not escaped


def _check_escape(escaped: str, schema: bool, shown: str) -> None:
    if not escaped or not (escaped.isascii() and escaped.isprintable()):
        raise BadConstraint(f"the pattern {shown} has a backslash before nothing it could escape")
    if escaped.isdigit():
        raise BadConstraint(f"the pattern {shown} refers back to a group, which is not supported")
    if schema and escaped.isalpha() and escaped not in _ECMA_LETTERS:
        raise BadConstraint(f"the pattern {shown} has the unknown escape \\{escaped}")


def _check_group(pattern: str, at: int, schema: bool, shown: str) -> None:
    if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
        raise BadConstraint(f"the pattern {shown} looks around, which is not supported")
    if schema and not _GROUP.match(pattern, at):
        raise BadConstraint(f"the pattern {shown} has a group of an unknown kind")


def _check_counts(counted: re.Match[str] | None, shown: str) -> None:
    for count in counted.groups() if counted else ():
        if count and (len(count) > 7 or int(count) > MAX_REPEAT):
            raise BadConstraint(f"the pattern {shown} repeats more than {MAX_REPEAT} times")


def engine_pattern(pattern: str) -> str:
    """A checked expression of a schema, with JavaScript's words spelled out for the engine."""
    return _WORDS.sub(_spelled_out, pattern)


def _spelled_out(found: re.Match[str]) -> str:
    text = found.group()
    if text[0] == "[":
        return "[" + _ESCAPED.sub(_spelled_out, text[1:])
    return _ECMA_WORDS.get(text, text)


def pattern_source(pattern: str) -> str:
    """A checked expression as a terminal of a Lark grammar."""
    if not pattern:
        return '""'  # two slashes would begin a comment
    out, at = "", 0
    for found in re.finditer(r"\\.|/|\n|\r", pattern, re.DOTALL):
        text = found.group()
        text = {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(text, text)
        out += pattern[at : found.start()] + text
        at = found.end()
    return f"/{out}{pattern[at:]}/"
