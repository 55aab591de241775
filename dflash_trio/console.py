"""Words for the terminal that may be gone: a closed or full stream must not end the server."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Write to standard output at once, if anybody is there to read it."""
    if sys.stdout is None:  # started with it closed
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        # What is left in its buffer would raise again at the interpreter's end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
