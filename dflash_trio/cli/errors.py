"""The one error of this package, and how its single line is put together.

A refusal reads ``what (where): what to do``. Whatever an operator typed may end up in it, so
everything here keeps the line a line: characters that do not print are escaped, long texts cut.
"""

from __future__ import annotations

_SHOWN_CHARACTERS = 80


class UsageError(Exception):
    """A launch that cannot start as it is written.

    ``str(error)`` is one printable line without the program's name; the exit code is 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def refusal(what: str, remedy: str, where: str = "") -> UsageError:
    """The error that says what is wrong, where it stands, and what to do about it."""
    place = f" ({where})" if where else ""
    return UsageError(f"{what}{place}: {remedy}")


def printable(text: str) -> str:
    """The text with every character that does not print written as an escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def shortened(text: str) -> str:
    """The text, cut where it would fill more than a line."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def shown(text: str) -> str:
    """What an operator wrote, ready to stand inside a sentence: quoted where it needs to be."""
    text = shortened(text)
    if text and text.isprintable() and not any(letter.isspace() for letter in text):
        return text
    return repr(text)
