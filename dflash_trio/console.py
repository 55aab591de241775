"""Words for the terminal that may be gone: a closed or full stream must not end the server."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """Write to standard output at once, if anybody is there to read it."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """The same for standard error."""
    _write(sys.stderr, text)


def write(stream: TextIO | None, text: str) -> None:
    """The same for any stream, which may be none."""
    _write(stream, text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # the process was started with it closed
        return
    try:
        # A locale that cannot spell something is no reason to say nothing.
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        # What is left in its buffer would raise again at the interpreter's end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
