"""The file of one entry of the disk cache: a header, tokens, a state, and a digest of it all.

llama.cpp takes most damaged states for good ones, so not a byte of a file reaches it before the
digest over the whole file is right. The same digest is why nothing is ever synced to the disk: a
file that a power cut left half written is found out when it is read.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable
from typing import BinaryIO

from attrs import frozen

from .prefix_store import Tokens

_MAGIC = b"DFLASHKV"
_VERSION = 1
_HEADER = struct.Struct("<8sI32s?IQ")
"""Magic, version, key, whether it is a whole prompt, how many tokens, bytes of state."""
_DIGEST_BYTES = 32
_PIECE = 8 << 20
_MOST_TOKENS = 1 << 24


class BadEntry(Exception):
    """A file that is not what it should be. ``str()`` says why, for the log."""


@frozen
class Entry:
    """What a file says of itself before its state."""

    tokens: Tokens
    is_prompt: bool
    state_bytes: int

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + 4 * len(self.tokens) + self.state_bytes + _DIGEST_BYTES


def entry_digest(key: bytes, tokens: Tokens, *, is_prompt: bool) -> str:
    """Names an entry: the same for the same tokens of the same key."""
    digest = hashlib.sha256(key + bytes([is_prompt]))
    digest.update(_packed(tokens))
    return digest.hexdigest()[:32]


def write_entry(
    file: BinaryIO, key: bytes, entry: Entry, state: bytes, go_on: Callable[[], bool]
) -> bool:
    """Write all of it, in pieces. False: ``go_on`` said no in between. Raises OSError."""
    assert len(state) == entry.state_bytes
    head = _HEADER.pack(
        _MAGIC, _VERSION, key, entry.is_prompt, len(entry.tokens), entry.state_bytes
    ) + _packed(entry.tokens)
    digest = hashlib.sha256(head)
    file.write(head)
    view = memoryview(state)
    for at in range(0, len(view), _PIECE):
        if not go_on():
            return False
        digest.update(view[at : at + _PIECE])
        file.write(view[at : at + _PIECE])
    file.write(digest.digest())
    return True


def open_entry(path: str) -> BinaryIO:
    """Open a file of an entry, were it put there by anybody: no link is followed and no pipe waited
    for. Raises OSError and BadEntry."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadEntry("it is not a regular file")
    return open(descriptor, "rb", buffering=0)


def read_head(file: BinaryIO, key: bytes) -> Entry:
    """What stands before the state; nothing of it is verified but that the sizes fit the file.
    Raises OSError and BadEntry."""
    return _read_head(file, key)[0]


def read_entry(file: BinaryIO, key: bytes, expected: Entry) -> bytes:
    """The state of a file that should be ``expected``, verified to the last bit. Reads no more
    than that entry's size. Raises OSError and BadEntry."""
    entry, head = _read_head(file, key)
    if entry != expected:
        raise BadEntry("it is not what it was")
    digest = hashlib.sha256(head)
    state = _read(file, entry.state_bytes)
    digest.update(state)
    if _read(file, _DIGEST_BYTES) != digest.digest():
        raise BadEntry("it is damaged")
    return state


def _read_head(file: BinaryIO, key: bytes) -> tuple[Entry, bytes]:
    head = _read(file, _HEADER.size)
    magic, version, file_key, is_prompt, count, state_bytes = _HEADER.unpack(head)
    if magic != _MAGIC or version != _VERSION or file_key != key:
        raise BadEntry("it is not of this model and configuration")
    if not 0 < count <= _MOST_TOKENS:
        raise BadEntry("it is damaged")
    size = os.fstat(file.fileno()).st_size
    if size != _HEADER.size + 4 * count + state_bytes + _DIGEST_BYTES:
        raise BadEntry("it is cut short or damaged")
    packed = _read(file, 4 * count)
    entry = Entry(struct.unpack(f"<{count}i", packed), is_prompt, state_bytes)
    return entry, head + packed


def _read(file: BinaryIO, size: int) -> bytes:
    """Exactly so many bytes. One read call gives 2 GiB at most."""
    data = file.read(size)
    if len(data) == size:
        return data
    parts = [data]
    left = size - len(data)
    while left:
        data = file.read(left)
        if not data:
            raise BadEntry("it is cut short")
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def _packed(tokens: Tokens) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
