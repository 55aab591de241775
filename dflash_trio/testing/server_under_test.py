"""The server's process: start it, wait for it, signal it, and look for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import trio

from .client import Address, fetch
from .options import CheckOptions

MARK = "DFLASH_SHUTDOWN_CHECK"
"""An environment variable that the server's children inherit: they are found by its value."""
POLL_SECONDS = 0.02
CHILD_GRACE = 0.5
"""Seconds that children may take to follow their parent."""
KILL_PATIENCE = 5.0
HALT_PATIENCE = 1.0
MOST_DRAWS = 1000
"""Of a free port, before it is given up. Few ports are given at a time, so one or two will do."""
SHARED_MEMORY = "/dev/shm/"
LOG_TAIL_BYTES = 2000


class ServerFailed(Exception):
    """The server did not come up. Says why, with the end of its output."""


class ServerUnderTest:
    """One process of the server command, alive or ended. Made by :func:`serve`, which owns it."""

    def __init__(self, process: trio.Process, address: Address, mark: str, log_path: Path) -> None:
        self.address = address
        self._process = process
        self._mark = mark
        self._log_path = log_path
        self._shared_memory: set[str] = set()
        self._halted = False
        self.answered_while_loading = False
        """Whether its ready path answered something else before it answered 200."""
        self.signals_at: list[float] = []
        """When signals were sent, on trio's clock."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server's own process. Never waits; harmless after its end."""
        self.signals_at.append(trio.current_time())
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def halt(self) -> None:
        """Stop the process until :meth:`go_on`, so that signals sent meanwhile reach it together.

        Otherwise the first of them may wake a server that takes the processor from us, and ends
        before the next is sent.
        """
        self._halted = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
        with trio.move_on_after(HALT_PATIENCE):
            while self.alive and not _is_stopped(self._process.pid):  # noqa: ASYNC110
                await trio.sleep(POLL_SECONDS)

    def go_on(self) -> None:
        """Let the process go on if it was halted. Harmless after its end."""
        if self._halted:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
        self._halted = False

    async def exit_code(self, patience: float) -> int | None:
        """The exit code, negative for death by a signal; ``None`` if it lives on for that long."""
        with trio.move_on_after(patience):
            return await self._process.wait()
        return None

    async def until_ready(self, options: CheckOptions) -> float:
        """Wait until the ready path answers 200; the seconds that took. Raises ServerFailed."""
        begin = trio.current_time()
        with trio.move_on_after(options.timeout):
            # Another process's state: nobody here could set an event.
            while self.alive:
                seen = await fetch(self.address, options.ready, dict(options.headers))
                if seen.status == 200:
                    return trio.current_time() - begin
                self.answered_while_loading |= seen.status is not None
                await trio.sleep(POLL_SECONDS)
            code = self._process.returncode
            raise ServerFailed(f"the server ended with {code} while starting: {self.log_tail()}")
        raise ServerFailed(
            f"{options.ready} did not answer 200 within {options.timeout:g} s: {self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The end of what the server wrote."""
        data = self._log_path.read_bytes()[-LOG_TAIL_BYTES:]
        return data.decode("utf-8", "replace").strip()

    # ------------------------------------------------------------------ what is left behind

    def take_inventory(self) -> None:
        """Note which shared memory the server and its children hold: to be called while they live,
        before a signal. Only what was seen here can be found left over."""
        pids = [self._process.pid, *(pid for pid, _ in self._children())]
        for pid in pids:
            self._shared_memory |= _shared_memory_of(Path("/proc", str(pid)))

    async def leftovers(self) -> list[str]:
        """What the ended server left behind, in words. Gives children a moment to end."""
        with trio.move_on_after(CHILD_GRACE):
            while self._children():  # noqa: ASYNC110
                await trio.sleep(POLL_SECONDS)
        found = [f"process {pid} ({name})" for pid, name in self._children()]
        return [*found, *self._left_names()]

    def _left_names(self) -> Iterator[str]:
        path = self.address.socket_path
        if path is not None and os.path.lexists(path):
            yield f"socket file {path}"
        if self.address.port is not None and self._port_is_bound():
            yield f"port {self.address.port} still bound"
        left = {name for name in self._shared_memory if os.path.lexists(name)}
        if left:
            held = set().union(*map(_shared_memory_of, Path("/proc").glob("[0-9]*")))
            yield from (f"shared memory {name}" for name in sorted(left - held))

    def _children(self) -> list[tuple[int, str]]:
        """Processes with our mark, or in the server's session, that are no zombies."""
        found = []
        needle = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            if pid == self._process.pid:
                continue
            try:
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                state, _, _, session = rest.split()[:4]
                marked = int(session) == self._process.pid
                marked = marked or needle in (folder / "environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if marked and state not in "ZX":
                found.append((pid, name))
        return found

    def _port_is_bound(self) -> bool:
        with socket.socket() as probe:
            # Connections in TIME_WAIT do not matter with this; a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.address.port))
            except OSError:
                return True
        return False

    def kill_everything(self) -> None:
        """SIGKILL for the server and whatever it started."""
        if self.alive:
            self._process.kill()
        for pid, _ in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _shared_memory_of(process: Path) -> set[str]:
    """Paths in /dev/shm that a process has mapped or open; ``process``: its folder in /proc."""
    held = set()
    with contextlib.suppress(OSError, ValueError):
        for line in (process / "maps").read_text().splitlines():
            _, found, name = line.partition(SHARED_MEMORY)
            if found:
                held.add(f"{SHARED_MEMORY}{name}")
        for descriptor in (process / "fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith(SHARED_MEMORY):
                held.add(target)
    return held


_given_ports: set[int] = set()
"""Ports of this process's servers that have not ended: no more than run side by side."""


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that nobody used a moment ago, and that nobody else in this process
    is given within the block. A server binds its port much later than it is drawn."""
    for _ in range(MOST_DRAWS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            break
    else:
        raise ServerFailed("there is no free port")
    _given_ports.add(port)
    try:
        yield port
    finally:
        _given_ports.discard(port)


def _substituted(words: Sequence[str], address: Address) -> list[str]:
    return [
        word.replace("{port}", str(address.port)).replace("{socket}", str(address.socket_path))
        for word in words
    ]


@contextlib.asynccontextmanager
async def serve(options: CheckOptions, name: str) -> AsyncIterator[ServerUnderTest]:
    """A fresh process of the server command; it and its children are killed with the block.

    ``name`` is for the log file. Raises ServerFailed when the command cannot be run.
    """
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="shutdown-check-"))
        if any("{socket}" in word for word in options.server):
            address = Address(socket_path=f"{scratch}/socket")
        else:
            address = Address(port=stack.enter_context(free_port()))
        folder = options.log_folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / f"{name.replace('/', '-')}.log"
        mark = secrets.token_hex(8)
        with log_path.open("wb") as log:
            try:
                process = await trio.lowlevel.open_process(
                    _substituted(options.server, address),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, MARK: mark},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"the server cannot be started: {error}") from error
        server = ServerUnderTest(process, address, mark, log_path)
        try:
            yield server
        finally:
            server.kill_everything()
            # Bounded by KILL_PATIENCE: only a process stuck in the kernel outlives SIGKILL.
            with trio.CancelScope(shield=True), trio.move_on_after(KILL_PATIENCE):
                await process.wait()
