"""Words for the terminal that may be gone: a closed or full stream must not end the server.

Each write is tried by itself. What cannot be written now is lost, and the next words get their
chance: a disk has room again, a terminal goes on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO


def occupy_standard_streams() -> None:
    """Put the null device where the process was started with a standard stream closed.

    Else the next thing opened, perhaps a client's connection, takes the number, and what a library
    writes there on its own goes to that client.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


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
    # A locale that cannot spell something is no reason to say nothing.
    encoding = stream.encoding or "utf-8"
    data = text.encode(encoding, "backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:  # text in memory
            stream.write(data.decode(encoding))
            return
        # Past the stream's buffer. What could not be written would stay in there, come out in the
        # middle of something later, and raise again at the interpreter's end.
        while data:
            data = data[os.write(descriptor, data) :]
