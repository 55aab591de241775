"""Thousands of requests whose clients all leave: memory must not remember them."""

from __future__ import annotations

import trio

from .chaos import SETTLE_BOUND, say_progress
from .clients import LEAVING
from .monitor import Monitor, slope
from .report import Report
from .server import ServerGone, running
from .setup import Setup
from .town import Town

WARM_UP = 1000
"""Requests before the first one that counts."""
SLOPE_LIMIT = 1024
"""Bytes of memory per request."""
EVERY = 20
"""Requests between two looks at the memory."""


async def run_cancelled(
    setup: Setup, report: Report, *, count: int, seed: int, clients: int = 12, patience: float = 90
) -> None:
    """Send ``count`` requests that are cancelled somewhere, and fit a line through the memory."""
    async with running(setup, report) as server:
        report.say(f"ready after {server.started_in:.1f} s; {WARM_UP} requests first, then {count}")
        town = Town(server.port, setup, report, seed, patience, LEAVING)
        monitor = Monitor(server, report)
        points: list[tuple[float, float]] = []

        def go_on() -> bool:
            done = cancelled(report)
            if done > WARM_UP + EVERY * len(points):
                points.append((done, monitor.rss()))
            return done < WARM_UP + count

        try:
            async with trio.open_nursery() as watch:
                watch.start_soon(monitor.run)
                watch.start_soon(say_progress, report)
                async with trio.open_nursery() as crowd:
                    for _ in range(clients):
                        crowd.start_soon(town.keep_sending, go_on)
                watch.cancel_scope.cancel()
        except* ServerGone as group:
            report.violation("server", str(group.exceptions[0]))
        if not server.alive:
            return
        growth = slope(points)
        report.figures["cancelled requests, warm-up included"] = cancelled(report)
        report.figures["RSS slope, bytes per request"] = round(growth)
        report.figures["RSS after warm-up and last, MiB"] = (
            f"{points[0][1] / 2**20:.1f} {points[-1][1] / 2**20:.1f}"
        )
        if growth > SLOPE_LIMIT:
            report.violation("drift", f"memory grew by {growth:.0f} bytes per request")
        monitor.health.finish()
        await monitor.settle(setup.stall_timeout + SETTLE_BOUND)


def cancelled(report: Report) -> int:
    """Of all outcomes, those of requests that were given up by their client."""
    return sum(
        count
        for counter in report.outcomes.values()
        for how, count in counter.items()
        if not how.startswith(("503", "finished", "answered", "violation"))
    )
