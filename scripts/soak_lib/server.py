"""Starting the server under test, and ending it by its own process id."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import psutil
import trio

from .report import Report
from .setup import ROOT, Setup
from .wire import connect

START_BOUND = 180.0
"""Seconds for the models to load."""
EXIT_BOUND = 20.0
"""Seconds from SIGTERM, with no client left, to the exit."""
LOG_TAIL = 40

EXPECTED_LOG_LINES: tuple[re.Pattern[str], ...] = ()
"""Lines at level ERROR that are no violation. There are none: whatever clients do is their doing,
and not the server's error."""


class ServerGone(Exception):
    """The server has ended although nobody told it to."""


@attrs.define
class Server:
    """A running server."""

    setup: Setup
    process: subprocess.Popen[bytes]
    port: int
    started_in: float
    """Seconds until it was ready."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def measure(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


def check_log(log: str) -> list[str]:
    """The lines that a healthy server would not have written."""
    bad = []
    for line in log.splitlines():
        suspicious = "Traceback" in line or re.match(r"\S+ (ERROR|CRITICAL)\b", line)
        if suspicious and not any(pattern.search(line) for pattern in EXPECTED_LOG_LINES):
            bad.append(line)
    return bad


@contextlib.asynccontextmanager
async def running(setup: Setup, report: Report) -> AsyncIterator[Server]:
    """Start it, wait until it is ready, and at the block's end tell it to stop.

    How it stopped and what it logged are judged into ``report``. A server that does not stop is
    killed, whatever else happens.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        log_path = Path(folder, "server.log")
        begin = time.monotonic()
        process = _start(setup, log_path)
        try:
            port = await _until_ready(process, log_path)
            await trio.sleep(0.3)  # the server closes what asked whether it is ready
            server = Server(setup, process, port, time.monotonic() - begin)
            yield server
            await _stop(server, report)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            log_text = _read(log_path)
            bad = check_log(log_text)
            for line in bad[:10]:
                report.violation("log", line)
            if bad or process.returncode != 0:
                report.log_tail = log_text.splitlines()[-LOG_TAIL:]


def _start(setup: Setup, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            setup.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _read(log_path: Path) -> str:
    return log_path.read_text(encoding="utf-8", errors="replace")


async def _until_ready(process: subprocess.Popen[bytes], log_path: Path) -> int:
    with trio.fail_after(START_BOUND):
        while True:
            log = _read(log_path)
            if process.poll() is not None:
                raise ServerGone(f"the server ended while it started: {log[-2000:]}")
            if match := re.search(r"listens on http://\S+:(\d+)", log):
                port = int(match[1])
                async with connect(port) as wire:
                    if await (await wire.request("GET", "/health")).head() == 200:
                        return port
            await trio.sleep(0.05)


async def _stop(server: Server, report: Report) -> None:
    """SIGTERM, then exit code 0 within the bound and nothing left behind."""
    if not server.alive:
        report.violation("exit", f"the server had ended by itself: {server.process.returncode}")
        return
    children = server.measure().children(recursive=True)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with trio.move_on_after(EXIT_BOUND) as scope:
        await trio.to_thread.run_sync(server.process.wait, abandon_on_cancel=True)
    if scope.cancelled_caught:
        report.violation("exit", f"no exit within {EXIT_BOUND:g} s of SIGTERM")
        return
    report.figures["exit code"] = server.process.returncode
    report.figures["exit after SIGTERM, s"] = round(time.monotonic() - begin, 2)
    if server.process.returncode != 0:
        report.violation("exit", f"exit code {server.process.returncode} after SIGTERM")
    for child in children:
        if child.is_running():
            report.violation("exit", f"a child process is left: {child.pid}")
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", server.port)) == 0:
            report.violation("exit", "the port still accepts connections")
