"""Hundreds of connections at a time, of all sorts, while the control routes are timed."""

from __future__ import annotations

import random

import trio

from .asking import stream_body
from .judge import Question, Violation, check_answer, check_refusal
from .monitor import Latencies, Monitor, ask
from .report import Report
from .server import ServerGone, running
from .setup import Setup
from .town import CHAT
from .wire import Malformed, Wire, connect, request_bytes

PATHS = ("/health", "/status/json", "/v1/models")
PATIENCE = 60.0
ARRIVAL_INTERVAL = 0.01
"""Seconds between two arrivals. All in one moment would measure how long some hundred requests
take one after the other, which is no property of open connections."""


async def run_connections(
    setup: Setup, report: Report, *, count: int, seconds: float, seed: int
) -> None:
    """Hold ``count`` connections for ``seconds`` while every control route answers in time."""
    async with running(setup, report) as server:
        monitor = Monitor(server, report)
        latencies = [Latencies(path, report) for path in PATHS]
        try:
            async with trio.open_nursery() as crowd:
                for number in range(count):
                    await crowd.start(_visitor, server.port, report, number, seed)
                    await trio.sleep(ARRIVAL_INTERVAL)
                report.say(f"{count} connections are open")
                crowd.start_soon(monitor.run)
                with trio.move_on_after(seconds):
                    while True:
                        for latency in latencies:
                            probe = await trio.to_thread.run_sync(ask, server.port, latency.path)
                            latency.add(probe)
                        open_files = monitor.open_files() - monitor.baseline_files
                        if open_files < count:
                            report.violation("connections", f"only {open_files} are open")
                crowd.cancel_scope.cancel()
        except* ServerGone as group:
            report.violation("server", str(group.exceptions[0]))
        if not server.alive:
            return
        report.figures["connections"] = count
        report.figures["samples of each route"] = len(latencies[0].seconds)
        report.figures["waiting at the most"] = max(s.get("waiting", 0) for s in report.samples)
        for latency in latencies:
            latency.finish(judged=0.99)
        await monitor.settle(PATIENCE)


async def _visitor(
    port: int, report: Report, number: int, seed: int, *, task_status: trio.TaskStatus[None]
) -> None:
    """One connection until cancelled, whose owner does one of several things with it."""
    chance = random.Random(f"{seed}:{number}")
    async with connect(port) as wire:
        task_status.started()
        sort = ("silent", "half a request", "idle", "asking", "chatting")[number % 5]
        try:
            await _visit(wire, sort, chance)
            report.violation(f"connection {number} ({sort})", "the server has ended it")
        except (Violation, Malformed) as error:
            report.violation(f"connection {number} ({sort})", str(error))
        except trio.Cancelled:
            report.outcome(sort, "held")
            if chance.random() < 0.5:
                wire.leave("RST")
            raise


async def _visit(wire: Wire, sort: str, chance: random.Random) -> None:
    if sort == "half a request":
        await wire.send(request_bytes("GET", "/health")[:-5])
    elif sort == "idle":
        check_answer(await (await wire.request("GET", "/health")).rest(), {200})
    while sort == "asking":
        await trio.sleep(chance.uniform(1, 3))
        check_answer(await (await wire.request("GET", chance.choice(PATHS))).rest(), {200})
    while sort == "chatting":
        response = await wire.request("POST", CHAT, stream_body(Question("hi", 20)))
        answer = await response.rest()
        if answer.status != 200:
            check_refusal(answer)
        check_answer(answer, {200, 503})
        await trio.sleep(chance.uniform(0.5, 3))
    await wire.receive()
