"""Small files that a launch needs before any model: read whole, and only if they are files.

A path may name a FIFO that nobody writes to, or a device that never ends. Opening without
blocking and asking the open descriptor what it is leaves no moment in which the path can change.
"""

from __future__ import annotations

import os
import stat

from dflash_trio.cli.errors import refusal, shown

LARGEST_FILE = 2**24
"""Bytes; these files are written by hand, so a larger one is a mistaken path."""


def read_file(path: str, spelling: str, where: str = "") -> bytes:
    """The bytes of a regular file; UsageError says which option named it and why it fails."""
    what = f"{spelling} {shown(path)}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise refusal(f"{what} does not exist", "name an existing file", where) from None
    except PermissionError:
        raise refusal(f"{what} may not be read", "give this user the permission", where) from None
    except OSError as error:
        problem = f"{what} cannot be opened, {error.strerror}"
        raise refusal(problem, "name a readable file", where) from None
    except ValueError:  # a NUL, or text that no file name can hold
        raise refusal(f"{what} is no file name", "name an existing file", where) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise refusal(f"{what} is {kind}", "name a file", where)
        content = _read_up_to(descriptor, LARGEST_FILE + 1)
    except OSError as error:
        problem = f"{what} cannot be read, {error.strerror}"
        raise refusal(problem, "name a readable file", where) from None
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_FILE:
        raise refusal(
            f"{what} is larger than {LARGEST_FILE} bytes", "name the file that was meant", where
        )
    return content


def _read_up_to(descriptor: int, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit
    while left > 0 and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
