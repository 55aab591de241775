"""The refusal of a schema or grammar that cannot be enforced."""

from __future__ import annotations

_MESSAGE_CHARACTERS = 300


class BadConstraint(ValueError):
    """A constraint that is broken, too large, or not enforceable. Its fault is the client's.

    ``str()`` is one printable sentence of bounded length, fit for a 400.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MESSAGE_CHARACTERS))


def printable(text: str, limit: int) -> str:
    """``text`` on one line, with everything unprintable replaced, cut to ``limit`` characters."""
    # Cut first: the text may be a client's megabyte.
    line = " ".join(text[: 4 * limit].split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def quoted(name: object) -> str:
    """A name from a client, for use inside of a message."""
    return repr(printable(str(name), 60))
