"""TOML documents, and their entries as the command line would spell them.

Written out again as text, an entry is read and checked by the option's own type, so a file and the
command line have one set of ranges and messages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trio.cli.errors import refusal
from dflash_trio.cli.option import Option

_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a float",
    list: "an array",
    dict: "a table",
}
_ENORMOUS = 10**30


def parse_toml(content: bytes, source: str, where: str = "") -> dict[str, Any]:
    """The document in a file's bytes. ``source`` is the file as messages name it."""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"{source} is not UTF-8 at line {line}"
        raise refusal(problem, "save it as UTF-8", where) from None
    except tomllib.TOMLDecodeError as error:
        # Its text ends with "(at line L, column C)", save for one case.
        last = content.count(b"\n") + 1
        problem = str(error).replace("at end of document", f"at the end, line {last}")
        raise refusal(f"{source} is not TOML, {problem}", "correct that line", where) from None
    except (ValueError, RecursionError) as error:
        # An integer of thousands of digits, or brackets nested as deep.
        problem = f"{source} cannot be read as TOML, {type(error).__name__}"
        raise refusal(problem, "look for a huge number or deep nesting", where) from None


def texts_of(option: Option, entry: Any, where: str) -> Iterable[str]:
    """The entry's values as texts; UsageError for an entry of the wrong type."""
    if option.takes is None:
        _check_type(option, entry, (bool,), where)
        return []
    if not option.is_list:
        _check_type(option, entry, option.takes.toml, where)
        return [_text(entry)]
    _check_type(option, entry, (list,), where)
    for element in entry:
        _check_type(option, element, option.takes.toml, where, " of strings")
    return [_text(element) for element in entry]


def _text(scalar: Any) -> str:
    if isinstance(scalar, int):
        # Hexadecimal may be longer than Python is willing to write out in decimal; what is cut
        # off here is out of every range anyway.
        return str(min(max(scalar, -_ENORMOUS), _ENORMOUS))
    return scalar if isinstance(scalar, str) else repr(scalar)


def _check_type(
    option: Option, entry: Any, allowed: tuple[type, ...], where: str, elements: str = ""
) -> None:
    # The exact type: TOML's true is a Python bool, and so an int.
    if type(entry) in allowed:
        return
    found = _NAMES.get(type(entry), "a date or time")
    if elements:
        raise refusal(f"{option.name} has {found} in its array", f"write an array{elements}", where)
    wanted = " or ".join(_NAMES[kind] for kind in allowed)
    raise refusal(f"{option.name} is {found}", f"write {wanted}", where)
