"""Processes that are started here: their log, what they use, and their end, by their own ids."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import psutil
import trio

ROOT = Path(__file__).resolve().parent.parent.parent
EXIT_BOUND = 10.0
"""Seconds from SIGTERM to SIGKILL."""
_LOG_TAIL = 2000


class Gone(Exception):
    """A contestant cannot be used, or has ended although nobody told it to. With its log."""


class Running:
    """A process and its children."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log: Path, command: Sequence[str]
    ) -> None:
        self.name = name
        self.process = process
        self.command = shlex.join(command)
        self._log = log
        self._root = psutil.Process(process.pid)

    def tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def check(self) -> None:
        """Raises Gone when it has ended."""
        if self.process.poll() is not None:
            raise Gone(f"{self.name} ended with exit code {self.process.returncode}\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]

    def cpu_seconds(self) -> float:
        """User and system time of all of them so far, ended children included."""
        self.check()
        seconds = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
                seconds += times.children_user + times.children_system
        return seconds

    def memory(self) -> tuple[int | None, int]:
        """Bytes: Pss_Anon, what they have for themselves alone, where the system tells; and RSS,
        in which a mapped model file counts as far as it is in memory."""
        pss: int | None = None
        rss = 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                rss += process.memory_info().rss
            found = _pss_anon(process.pid)
            if found is not None:
                pss = (pss or 0) + found
        return pss, rss


def _pss_anon(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return None


@contextlib.asynccontextmanager
async def started(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    talks: bool = False,
) -> AsyncIterator[Running]:
    """Start a command; at the block's end it and its children are gone.

    ``talks``: its standard input and output are pipes. Otherwise all that it says is its log.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log_path = Path(folder, "log")
        try:
            process = _start(command, log_path, {**os.environ, **(environment or {})}, talks)
        except OSError as error:
            raise Gone(f"{name} cannot be started: {error}") from None
        running = Running(name, process, log_path, command)
        try:
            yield running
        finally:
            with trio.CancelScope(shield=True):  # bounded by EXIT_BOUND
                await _end(running)


def _start(
    command: Sequence[str], log_path: Path, environment: dict[str, str], talks: bool
) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else log,
            stderr=log,
        )


async def _end(running: Running) -> None:
    """SIGTERM to the process that was started; whatever is left of it after the bound is killed."""
    tree = running.tree()
    with contextlib.suppress(ProcessLookupError):
        running.process.terminate()
    await trio.to_thread.run_sync(_wait, running.process)
    for process in tree:  # psutil knows a process by its start time too: never somebody else's
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
    running.process.wait()
    for pipe in (running.process.stdin, running.process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _wait(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_BOUND)
