"""DiskCache: a folder in which what is kept of prompts survives the process.

One file is one state of a row. Its name begins with the key: a digest of everything that the bytes
of a state depend on, so that a server never so much as opens what another model or configuration
left there, and folders can be shared by blocks and by processes. Nobody locks anything: files
appear whole, by renaming, and whoever finds one gone goes on without it.

Files are written by a thread of the cache's own, from a bounded queue; what does not fit there is
not stored. They are read by whoever asks. No failure ever leaves this module: a full disk or a
damaged file costs a line in the log and the entry.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from attrs import frozen

from .disk_entry import (
    BadEntry,
    Entry,
    entry_digest,
    open_entry,
    read_entry,
    read_head,
    write_entry,
)
from .prefix_store import LEAST_SHARE, Gone, Stored, Tokens

log = logging.getLogger("dflash_trio.engine")

MOST_BYTES = 4 << 30
"""Of all entries in a folder, whoever's they are; those unused for longest go first."""
MOST_ENTRIES = 512
"""In a folder."""
MOST_QUEUED_BYTES = 256 << 20
"""Of states that wait for being written; one that is larger waits alone."""
MOST_QUEUED = 64
_LEFT_BEHIND = 3600.0
"""Seconds after which an unfinished file is nobody's any more."""

_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}
"""What fails for want of something in this process or machine says nothing about the file."""

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_UNFINISHED = ".unfinished"
_ENDS = 1 << 20  # bytes


class FolderError(Exception):
    """A folder that cannot be used. ``str()`` is one line for the operator."""


# -------------------------------------------------------------------------------- the folder


def check_folder(path: str) -> None:
    """Check that a folder can be used, or made, for entries. Changes nothing. Raises FolderError.

    One that others may read or write is refused rather than narrowed: it may be shared on purpose
    for something else, and a slip of the pen must not take ``/tmp`` from everybody.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise FolderError(
                f"{path} is a link to {os.readlink(path)}, which is not there: make that folder, "
                "with mode 0700, or name another"
            ) from None
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
            raise FolderError(
                f"{path} does not exist and cannot be made in {parent}: make it, with mode 0700"
            ) from None
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FolderError(f"{path} cannot be used: {reason}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise FolderError(f"{path} is not a folder: name one")
    if status.st_uid != os.geteuid():
        raise FolderError(f"{path} belongs to another user: name a folder of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise FolderError(
            f"{path} is open to others, and prompts would lie in it in the clear: "
            "chmod 700 it, or name a new folder"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise FolderError(f"{path} cannot be written to: chmod 700 it")


def make_folder(path: str) -> None:
    """Make it if it is not there, and check it. Raises FolderError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise FolderError(f"{path} cannot be made: {error.strerror}") from None
    check_folder(path)


def state_key(parts: Iterable[str], facts: Iterable[str]) -> bytes:
    """The key of states of a model in a configuration: its files (``parts``), and ``facts`` about
    everything else.

    A file is known by its size, its time of change, its first MiB, which has the header, and its
    last. Not by its path, since a model that is moved is the same; and not by all of its content,
    which would be read for minutes. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
            digest.update(hashlib.sha256(file.read(_ENDS)).digest())
            file.seek(max(0, status.st_size - _ENDS))
            digest.update(hashlib.sha256(file.read(_ENDS)).digest())
    for fact in facts:
        digest.update(f"{len(fact)} {fact}\n".encode())
    return digest.digest()


# --------------------------------------------------------------------------------- the cache


@frozen
class _Waiting:
    name: str
    entry: Entry
    state: bytes


class DiskCache:
    """A PrefixStore in a folder. Made and used on the worker's thread."""

    def __init__(self, folder: str, key: bytes) -> None:
        """Reads what is there of this key, states excepted. Raises FolderError."""
        make_folder(folder)
        self._folder = folder
        self._key = key
        self._prefix = key.hex()[:16] + "-"
        # Guards all below. Held for bookkeeping only, never while a file is read or written.
        self._lock = threading.Condition()
        self._index: dict[str, Entry] = {}
        self._size_bytes = 0
        self._changes: list[Stored | Gone] = []
        self._queue: deque[_Waiting] = deque()
        self._writing: str | None = None
        self._closed_at: float | None = None
        self._writer: threading.Thread | None = None
        self._is_failing = False  # has said so, and says no more until a write succeeds
        self._tidy_up()
        self._read_index()

    # ----------------------------------------------------------------- for the prefix cache

    @property
    def entries(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def changes(self) -> list[Stored | Gone]:
        if not self._changes:
            return []
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def knows(self, tokens: Tokens, *, is_prompt: bool) -> bool:
        name = self._name(tokens, is_prompt=is_prompt)
        with self._lock:
            return name in self._index or self._is_under_way(name)

    def put(
        self, tokens: Tokens, state: bytes, *, is_prompt: bool, deadline: float | None = None
    ) -> bool:
        entry = Entry(tokens, is_prompt, len(state))
        waiting = _Waiting(self._name(tokens, is_prompt=is_prompt), entry, state)
        if entry.file_bytes > MOST_BYTES:
            return False
        with self._lock:
            if waiting.name in self._index or self._is_under_way(waiting.name):
                return True
            while not self._has_room(len(state)):
                left = deadline - time.monotonic() if deadline is not None else 0
                if left <= 0:
                    return False
                self._lock.wait(left)
            if self._closed_at is not None:
                return False
            self._queue.append(waiting)
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_all, name="disk prefix cache", daemon=True
                )
                self._writer.start()
            self._lock.notify_all()
        return True

    def load(self, name: str) -> bytes | None:
        with self._lock:
            entry = self._index.get(name)
        if entry is None:
            return None
        path = self._path(name)
        try:
            with open_entry(path) as file:
                state = read_entry(file, self._key, entry)
        except FileNotFoundError:
            self._forget(name)  # another process has made room
            return None
        except (OSError, BadEntry, MemoryError) as error:
            if _is_ours(error):
                log.warning("the prefix cache cannot read %s now: %s", path, _reason(error))
                self._forget(name)  # it lies there for the next process, or until it comes again
                return None
            log.warning("the prefix cache drops %s: %s", path, _reason(error))
            self.drop(name)
            return None
        with contextlib.suppress(OSError):  # only the order in which they go suffers
            os.utime(path)
        return state

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))
        self._forget(name)

    def close(self, deadline: float) -> None:
        with self._lock:
            self._closed_at = deadline
            self._lock.notify_all()
            writer = self._writer
        if writer is not None:
            # The writer looks at the deadline between pieces of some megabytes.
            writer.join(max(0.0, deadline - time.monotonic()) + 0.5)

    # ------------------------------------------------------------------- the writer's thread

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._queue and self._closed_at is None:
                    self._lock.wait()
                if not self._queue:
                    return
                if not self._may_go_on():
                    log.warning(
                        "the prefix cache left %d entries unwritten at the end", len(self._queue)
                    )
                    self._queue.clear()
                    return
                waiting = self._queue.popleft()
                self._writing = waiting.name
            try:
                written = self._write(waiting)
            except Exception as error:
                written = False
                if not self._is_failing:
                    reason = _reason(error)
                    log.warning("the prefix cache cannot write to %s: %s", self._folder, reason)
                self._is_failing = True
            with self._lock:
                self._writing = None
                if written:
                    self._know(waiting.name, waiting.entry)
                self._lock.notify_all()
            if written:
                self._is_failing = False
                self._drop_what_it_contains(waiting.entry)
                self._keep_within_bounds()
            del waiting  # the state: not held while waiting for the next

    def _may_go_on(self) -> bool:
        return self._closed_at is None or time.monotonic() < self._closed_at

    def _write(self, waiting: _Waiting) -> bool:
        descriptor, path = self._new_file()
        try:
            with open(descriptor, "wb") as file:
                whole = write_entry(file, self._key, waiting.entry, waiting.state, self._may_go_on)
            if whole:
                os.rename(path, self._path(waiting.name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        if not whole:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return whole

    def _new_file(self) -> tuple[int, str]:
        """Mode 0600. In a folder that somebody took away it is made in a new one."""
        try:
            return tempfile.mkstemp(suffix=_UNFINISHED, dir=self._folder)
        except FileNotFoundError:
            make_folder(self._folder)
            return tempfile.mkstemp(suffix=_UNFINISHED, dir=self._folder)

    def _drop_what_it_contains(self, entry: Entry) -> None:
        """A conversation that went on takes the place of what it was before, unless it has become
        too long to be read for that."""
        with self._lock:
            contained = [
                name
                for name, other in self._index.items()
                if not other.is_prompt
                and not entry.is_prompt
                and len(other.tokens) < len(entry.tokens) <= len(other.tokens) * LEAST_SHARE
                and other.tokens[-1] == entry.tokens[len(other.tokens) - 1]
                and other.tokens == entry.tokens[: len(other.tokens)]
            ]
        for name in contained:
            self.drop(name)

    def _keep_within_bounds(self) -> None:
        """Delete what was unused for longest, of any key, until the folder is within bounds."""
        files = sorted(
            (status.st_mtime_ns, entry.name, status.st_size)
            for entry, status in self._files()
            if _NAME.fullmatch(entry.name)
        )
        size = sum(size for _, _, size in files)
        count = len(files)
        for _, name, file_size in files:
            if size <= MOST_BYTES and count <= MOST_ENTRIES:
                return
            self.drop(name)
            size -= file_size
            count -= 1

    # ------------------------------------------------------------------------------ the index

    def _read_index(self) -> None:
        found = sorted(
            (status.st_mtime_ns, entry.name)
            for entry, status in self._files()
            if _NAME.fullmatch(entry.name) and entry.name.startswith(self._prefix)
        )
        for _, name in found:  # those used last come last
            path = self._path(name)
            try:
                with open_entry(path) as file:
                    entry = read_head(file, self._key)
                # The name is a digest of the tokens, so that only good ones are ever matched.
                if self._name(entry.tokens, is_prompt=entry.is_prompt) != name:
                    raise BadEntry("it is damaged")
            except FileNotFoundError:
                continue
            except (OSError, BadEntry) as error:
                if _is_ours(error):
                    log.warning("the prefix cache cannot read %s now: %s", path, _reason(error))
                    continue
                log.warning("the prefix cache drops %s: %s", path, _reason(error))
                with contextlib.suppress(OSError):
                    os.unlink(path)
                continue
            self._know(name, entry)

    def _tidy_up(self) -> None:
        """Delete what processes that are gone left unfinished."""
        for entry, status in self._files():
            if entry.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _LEFT_BEHIND:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """Regular files in the folder that do not vanish under the look."""
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_file(follow_symlinks=False):
                            yield entry, entry.stat(follow_symlinks=False)
        except OSError as error:
            log.warning("the prefix cache cannot read %s: %s", self._folder, _reason(error))

    def _forget(self, name: str) -> None:
        with self._lock:
            entry = self._index.pop(name, None)
            if entry is not None:
                self._size_bytes -= entry.file_bytes
                self._changes.append(Gone(name))

    # ----------------------------------------------------------------------------- with _lock

    def _know(self, name: str, entry: Entry) -> None:
        self._index[name] = entry
        self._size_bytes += entry.file_bytes
        self._changes.append(Stored(name, entry.tokens))

    def _is_under_way(self, name: str) -> bool:
        return name == self._writing or any(waiting.name == name for waiting in self._queue)

    def _has_room(self, size: int) -> bool:
        if not self._queue:
            return True
        queued = sum(len(waiting.state) for waiting in self._queue)
        return len(self._queue) < MOST_QUEUED and queued + size <= MOST_QUEUED_BYTES

    # ---------------------------------------------------------------------------------- names

    def _name(self, tokens: Tokens, *, is_prompt: bool) -> str:
        return f"{self._prefix}{entry_digest(self._key, tokens, is_prompt=is_prompt)}.kv"

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def _is_ours(error: Exception) -> bool:
    """It is no fault of the file that was to be read."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _OURS


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
