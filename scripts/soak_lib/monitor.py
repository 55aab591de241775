"""Looks at the server once a second, and at the trend of what it saw in the end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import trio
from attrs import frozen

from .report import Report
from .server import Server, ServerGone

PROBE_TIMEOUT = 10.0
"""Seconds after which a control route counts as hanging."""
LATENCY_LIMIT = 0.25
"""Seconds within which a control route answers, for 95 of 100 samples (99 in the mode
``connections``, which takes hundreds)."""
WORST_LATENCY = 1.0
"""Seconds that three samples in a row must not exceed. A single one may: on a machine with other
work, this process and the server are both not scheduled for a while now and then."""
STUCK_AFTER = 15.0
"""Seconds that somebody may wait without any engine making a step. Longer than what a client that
reads nothing can hold a slot after its last step."""
ENOUGH_SAMPLES = 20
"""From which on the 95th percentile is not the worst sample."""
MOST_ANSWERS = 2
"""Slots that one request may hold: what the clients here ask for at the most (``n``)."""
THREADS_MARGIN = 3
FILES_MARGIN = 3

Status = dict[str, Any]
AlterStatus = Callable[[Status], Status]


# ------------------------------------------------------------------------------- invariants


def broken_invariants(status: Status) -> list[str]:
    """What is wrong with a status page of a ready server, at any moment."""
    broken: list[str] = []

    def check(holds: bool, what: str) -> None:
        if not holds:
            broken.append(what)

    routing = status["routing"]
    waiting, limit = routing["waiting"], routing["waiting_limit"]
    check(status["state"] == "ready", f"the state is {status['state']}")
    check(0 <= waiting <= limit, f"{waiting} wait, the limit is {limit}")
    check(routing["preparing"] >= 0, f"{routing['preparing']} are prepared")
    for model in status["models"]:
        name = model["name"][:1]
        slots, pool, phases = model["slots"], model["kv_pool"], model["in_flight"]
        reserved, committed = slots["reserved"], pool["committed"]
        check(0 <= reserved <= slots["total"], f"{name}: {reserved} of {slots['total']} slots")
        check(0 <= committed <= pool["total"], f"{name}: {committed} of {pool['total']} cells")
        check(0 <= pool["used"] <= pool["total"], f"{name}: {pool['used']} cells used")
        check((committed > 0) == (reserved > 0), f"{name}: {committed} cells, {reserved} slots")
        check(min(phases.values()) >= 0, f"{name}: in flight {phases}")
        flights = sum(phases.values())
        check(
            flights <= reserved <= MOST_ANSWERS * flights,
            f"{name}: {flights} in flight hold {reserved} slots",
        )
        check(model["health"]["healthy"], f"{name} is unhealthy: {model['health']['reason']}")
    return broken


def not_idle(status: Status) -> list[str]:
    """What is not zero on a status page."""
    left = {"waiting": status["routing"]["waiting"], "preparing": status["routing"]["preparing"]}
    for model in status["models"]:
        name = model["name"][:1]
        left[f"{name} slots"] = model["slots"]["reserved"]
        left[f"{name} cells committed"] = model["kv_pool"]["committed"]
        left[f"{name} cells used"] = model["kv_pool"]["used"]
        left[f"{name} in flight"] = sum(model["in_flight"].values())
        left[f"{name} sequences"] = (
            model["engine"]["sequences_prefilling"] + model["engine"]["sequences_decoding"]
        )
    return [f"{what} {count}" for what, count in left.items() if count]


# ---------------------------------------------------------------------------------- probes


@frozen
class Probe:
    """One control route's answer. ``seconds``: from connect to the last byte."""

    status: int
    seconds: float
    body: Any


def ask(port: int, path: str) -> Probe:
    """Ask a control route over a connection of its own. Blocks; status 0 when it fails.

    Run on a thread: the event loop with all the clients would be part of what is measured.
    """
    begin = time.monotonic()
    data = b""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            while True:
                head, end, body = data.partition(b"\r\n\r\n")
                lower = head.lower()
                if end and len(body) >= int(lower.partition(b"content-length:")[2].split()[0]):
                    break
                sock.settimeout(max(0.01, begin + PROBE_TIMEOUT - time.monotonic()))
                more = sock.recv(65536)
                if not more:
                    raise ConnectionError("cut")
                data += more
        status, parsed = int(head.split()[1]), json.loads(body)
    except (OSError, ValueError, IndexError) as error:
        return Probe(0, time.monotonic() - begin, repr(error))
    return Probe(status, time.monotonic() - begin, parsed)


class Latencies:
    """A control route's answers so far."""

    def __init__(self, path: str, report: Report) -> None:
        self.path = path
        self.seconds: list[float] = []
        self._report = report

    def add(self, probe: Probe) -> None:
        self.seconds.append(probe.seconds)
        if probe.status != 200 or (self.path == "/health" and probe.body != {"status": "ok"}):
            self._report.violation("control", f"{self.path}: {probe.status} {probe.body}")
        if len(self.seconds) >= 3 and min(self.seconds[-3:]) > WORST_LATENCY:
            self._report.violation(
                "control", f"{self.path} took {self.seconds[-3:]} s, three times in a row"
            )

    def percentile(self, part: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0

    def finish(self, *, judged: float = 0.95) -> None:
        """Put the figures into the report. ``judged``: the percentile that has the limit."""
        shown = " / ".join(f"{1000 * self.percentile(part):.0f}" for part in (0.5, 0.95, 1))
        self._report.figures[f"{self.path} p50 / p95 / max, ms"] = shown
        enough = len(self.seconds) >= ENOUGH_SAMPLES
        if enough and self.percentile(judged) > LATENCY_LIMIT:
            self._report.violation(
                "control",
                f"{self.path}: percentile {100 * judged:g} is {self.percentile(judged):.3f} s",
            )


class Monitor:
    """Samples a server until cancelled. ``alter_status``: for tests of the monitor itself."""

    def __init__(
        self, server: Server, report: Report, *, alter_status: AlterStatus = lambda status: status
    ) -> None:
        self._server = server
        self._report = report
        self._alter_status = alter_status
        self._process = server.measure()
        self.health = Latencies("/health", report)
        self.status = Latencies("/status/json", report)
        self.baseline_threads = self._process.num_threads()
        self.baseline_files = self._process.num_fds()
        self._steps = -1
        self._step_seen = time.monotonic()

    def rss(self) -> int:
        """Bytes of resident memory now."""
        return int(self._process.memory_info().rss)

    def open_files(self) -> int:
        return int(self._process.num_fds())

    async def run(self) -> None:
        """Look once a second. Raises ServerGone."""
        while True:
            begin = trio.current_time()
            await self.look()
            await trio.sleep_until(begin + 1.0)

    async def look(self) -> dict[str, Any]:
        """Take one sample and judge it."""
        if not self._server.alive:
            raise ServerGone(f"the server ended: {self._server.process.returncode}")
        health = await trio.to_thread.run_sync(ask, self._server.port, "/health")
        self.health.add(health)
        status = await trio.to_thread.run_sync(ask, self._server.port, "/status/json")
        self.status.add(status)
        sample: dict[str, Any] = {
            "at": round(self._report.elapsed, 2),
            "requests": self._report.requests,
            "health_ms": round(1000 * health.seconds, 1),
            "load": os.getloadavg()[0],
        }
        with contextlib.suppress(psutil.Error):
            sample["rss"] = self.rss()
            sample["threads"] = self._process.num_threads()
            sample["files"] = self._process.num_fds()
        if status.status == 200:
            page = self._alter_status(status.body)
            for broken in broken_invariants(page):
                self._report.violation("invariant", broken)
            sample.update(_figures(page))
            self._check_progress(sample)
        self._report.samples.append(sample)
        return sample

    def _check_progress(self, sample: dict[str, Any]) -> None:
        now = time.monotonic()
        if sample["steps"] != self._steps or not sample["waiting"]:
            self._steps, self._step_seen = sample["steps"], now
        elif now - self._step_seen > STUCK_AFTER:
            self._report.violation(
                "progress", f"{sample['waiting']} wait, and no step for {STUCK_AFTER:g} s"
            )
            self._step_seen = now

    async def settle(self, bound: float) -> None:
        """With all clients gone, everything becomes zero, and threads and files come back."""
        begin = trio.current_time()
        left = ["no status"]
        while left and trio.current_time() < begin + bound:
            page = await trio.to_thread.run_sync(ask, self._server.port, "/status/json")
            if page.status == 200:
                left = not_idle(self._alter_status(page.body))
            await trio.sleep(0.05)
        if left:
            self._report.violation("end", f"after {bound:g} s without clients: {', '.join(left)}")
        self._report.figures["all zero after, s"] = round(trio.current_time() - begin, 2)
        # Idle threads of trio's cache end by themselves after ten seconds.
        begin = trio.current_time()
        while True:
            threads, files = self._process.num_threads(), self._process.num_fds()
            too_many = threads > self.baseline_threads + THREADS_MARGIN
            too_many |= files > self.baseline_files + FILES_MARGIN
            if not too_many or trio.current_time() > begin + bound + 15:
                break
            await trio.sleep(0.2)
        self._report.figures["threads before / after"] = f"{self.baseline_threads} / {threads}"
        self._report.figures["open files before / after"] = f"{self.baseline_files} / {files}"
        if too_many:
            self._report.violation("drift", f"{threads} threads and {files} files are left")


def _figures(page: Status) -> dict[str, Any]:
    models = page["models"]
    return {
        "waiting": page["routing"]["waiting"],
        "in_flight": sum(sum(model["in_flight"].values()) for model in models),
        "reserved": [model["slots"]["reserved"] for model in models],
        "committed": [model["kv_pool"]["committed"] for model in models],
        "used": [model["kv_pool"]["used"] for model in models],
        "steps": sum(model["engine"]["steps"] for model in models),
        "tokens": sum(model["engine"]["completion_tokens"] for model in models),
    }


# ---------------------------------------------------------------------------------- trends


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through ``points`` with the least squares; 0 for fewer than two."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def rate(samples: Sequence[dict[str, Any]], what: str) -> float:
    """How much of a counter came per second between the first and the last of some samples."""
    known = [sample for sample in samples if what in sample]
    if len(known) < 2 or known[-1]["at"] <= known[0]["at"]:
        return 0.0
    first, last = known[0], known[-1]
    return float(last[what] - first[what]) / float(last["at"] - first["at"])
