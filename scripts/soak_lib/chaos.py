"""The default mode: all kinds of clients at once, for a while."""

from __future__ import annotations

import os
from typing import Any

import trio

from .clients import KINDS
from .judge import Goldens
from .monitor import AlterStatus, Monitor, rate, slope
from .report import Report
from .server import ServerGone, running
from .setup import Setup
from .town import Town

SETTLE_BOUND = 10.0
"""Seconds beyond the stall timeout for everything to become zero."""
RSS_ALLOWANCE = 16 * 1024 * 1024
"""Bytes by which memory may have grown from the second quarter to the last, whatever the number of
requests: the allocator's own ups and downs."""
RSS_SLOPE = 1024
"""Bytes per request beyond which growth that is larger than the allowance is a leak."""
JUDGED_FROM = 120.0
"""Seconds of a run from which on its throughput is judged: below, a quarter is mostly chance."""
THROUGHPUT_FLOOR = 0.5
"""Of the first quarter's throughput that the last quarter must have. Low, since a random mix and
the machine's other work move it by a third either way."""


async def run_chaos(
    setup: Setup,
    report: Report,
    *,
    minutes: float,
    seed: int,
    clients: int = 12,
    patience: float = 90.0,
    compare: bool = True,
    alter_status: AlterStatus = lambda status: status,
) -> None:
    """Send ``clients`` at a time for ``minutes``, look every second, judge the end."""
    async with running(setup, report) as server:
        report.say(f"ready after {server.started_in:.1f} s on port {server.port}, seed {seed}")
        town = Town(server.port, setup, report, seed, patience, KINDS, Goldens(compare=compare))
        monitor = Monitor(server, report, alter_status=alter_status)
        seconds = minutes * 60
        try:
            async with trio.open_nursery() as watch:
                watch.start_soon(monitor.run)
                watch.start_soon(say_progress, report)
                end = trio.current_time() + seconds
                async with trio.open_nursery() as crowd:
                    for _ in range(clients):
                        crowd.start_soon(town.keep_sending, lambda: trio.current_time() < end)
                watch.cancel_scope.cancel()
        except* ServerGone as group:
            report.violation("server", str(group.exceptions[0]))
        if not server.alive:
            return
        report.say("no clients any more")
        judge_trends(report, seconds)
        monitor.health.finish()
        monitor.status.finish()
        await monitor.settle(setup.stall_timeout + SETTLE_BOUND)
        report.figures["answers compared with an earlier one"] = town.goldens.compared


async def say_progress(report: Report, interval: float = 10.0) -> None:
    """A line now and then, until cancelled."""
    while True:
        await trio.sleep(interval)
        sample = report.samples[-1] if report.samples else {}
        report.say(
            f"{report.requests} clients, {report.violation_count} violations; "
            f"in flight {sample.get('in_flight')}, waiting {sample.get('waiting')}, "
            f"cells {sample.get('committed')}, RSS {sample.get('rss', 0) / 2**20:.1f} MiB, "
            f"{sample.get('threads')} threads, {sample.get('files')} files, "
            f"health {sample.get('health_ms')} ms, load {sample.get('load', 0):.1f}"
        )


def judge_trends(report: Report, seconds: float) -> None:
    """Memory and throughput over the run, from the samples."""
    samples = [sample for sample in report.samples if "rss" in sample]
    figures = report.figures
    figures["clients"] = report.requests
    figures["cores, load at the end"] = f"{os.cpu_count()}, {os.getloadavg()[0]:.1f}"
    if len(samples) < 8:
        return
    begin = samples[0]["at"]
    quarters: list[list[dict[str, Any]]] = [[], [], [], []]
    for sample in samples:
        part = int(4 * (sample["at"] - begin) / seconds)
        if part < 4:
            quarters[part].append(sample)
    after_warm_up = [sample for quarter in quarters[1:] for sample in quarter]
    growth_per_request = slope([(sample["requests"], sample["rss"]) for sample in after_warm_up])
    growth = mean(quarters[3], "rss") - mean(quarters[1], "rss")
    figures["RSS slope after warm-up, bytes per client"] = round(growth_per_request)
    figures["RSS, MiB: first, peak, last"] = " ".join(
        f"{value / 2**20:.1f}"
        for value in (samples[0]["rss"], max(s["rss"] for s in samples), samples[-1]["rss"])
    )
    if growth_per_request > RSS_SLOPE and growth > RSS_ALLOWANCE:
        report.violation("drift", f"memory grew by {growth_per_request:.0f} bytes per client")
    for what, name in (("requests", "clients"), ("tokens", "tokens")):
        first, last = rate(quarters[0], what), rate(quarters[3], what)
        figures[f"{name} per second, first and last quarter"] = f"{first:.1f} {last:.1f}"
        judged = what == "requests" and seconds >= JUDGED_FROM
        if judged and last < THROUGHPUT_FLOOR * first:
            report.violation("drift", f"throughput fell from {first:.1f} to {last:.1f} per second")


def mean(samples: list[dict[str, Any]], what: str) -> float:
    return float(sum(sample[what] for sample in samples)) / max(1, len(samples))
