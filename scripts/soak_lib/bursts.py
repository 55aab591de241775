"""The queue's limit, exactly: bursts of limit + 5 requests while the only slot is held."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from .asking import stream_body
from .judge import QUEUE_FULL, Goldens, Question, Violation, check_answer
from .monitor import Status, ask, broken_invariants, not_idle
from .report import Report
from .server import Server, running
from .setup import Setup
from .streams import check_whole
from .town import CHAT
from .wire import Malformed, Wire, connect

LIMITS = (0, 1, 2, 32)
BEYOND = 5
"""Requests more than the queue takes."""
ROUND_BOUND = 120.0
PAGE_BOUND = 10.0
"""Seconds for the status page to become what it must be."""
LOOK_AGAIN_AFTER = 0.6
"""Seconds, longer than the router's own retry, after which the count must still be the same."""


async def run_bursts(setup: Setup, report: Report, *, rounds: int = 20) -> None:
    """``rounds`` bursts on a server with the queue limit of ``setup``. Every second round the
    waiting clients leave, in the others they are served."""
    limit = setup.queue_limit
    async with running(setup, report) as server:
        for number in range(rounds):
            kind = f"limit {limit}"
            how = "violation"
            try:
                with trio.fail_after(ROUND_BOUND):
                    how = await _round(server, report, limit, leave=number % 2 == 1)
            except Violation as error:
                report.violation(f"{kind}, round {number + 1}", str(error))
            except (Malformed, OSError, trio.TooSlowError) as error:
                report.violation(f"{kind}, round {number + 1}", repr(error))
            report.outcome(kind, how)
    report.say(f"limit {limit}: {rounds} rounds")


async def _round(server: Server, report: Report, limit: int, *, leave: bool) -> str:
    question = Question("hi", 2)
    refused: list[str] = []
    served: list[str] = []
    problems: list[str] = []
    goldens = Goldens()

    async def one(wire: Wire, gate: trio.Event) -> None:
        await gate.wait()
        try:
            answer = await (await wire.request("POST", CHAT, question.body())).rest()
            if answer.status == 503:
                refused.append(check_answer(answer, {503}))
            else:
                check_answer(answer, {200})
                served.append(check_whole(answer, question, goldens))
        except (Violation, Malformed) as error:
            problems.append(str(error))

    async with trio.open_nursery() as nursery, connect(server.port) as holder:
        held = await holder.request("POST", CHAT, stream_body(Question("hold", 1900)))
        if await held.head() != 200 or not await held.part():
            problems.append(f"the only slot was not to be had: {held.status}")
        # All connections first, so that the requests come as close together as they can.
        gate = trio.Event()
        for _ in range(limit + BEYOND):
            await nursery.start(_connected, server.port, one, gate)
        gate.set()
        page = await _until_page(server, lambda page: _settled(page, limit, refused))
        await trio.sleep(LOOK_AGAIN_AFTER)
        for look in (page, await _status(server)):
            problems += broken_invariants(look)
            if look["routing"]["waiting"] != limit:
                problems.append(f"{look['routing']['waiting']} wait, not {limit}")
        if len(refused) != BEYOND or set(refused) != {QUEUE_FULL} or served:
            problems.append(f"refused {refused}, served {len(served)}, not {BEYOND} refused")
        if leave:
            nursery.cancel_scope.cancel()
    if not leave and len(served) != limit:
        problems.append(f"{len(served)} of {limit} waiting requests were served")
    page = await _until_page(server, lambda page: not not_idle(page))
    problems += not_idle(page)
    if problems:
        raise Violation("; ".join(problems))
    return "waiting ones left" if leave else "waiting ones served"


def _settled(page: Status, limit: int, refused: list[str]) -> bool:
    routing = page["routing"]
    return bool(len(refused) >= BEYOND and routing["waiting"] == limit and not routing["preparing"])


async def _connected(
    port: int,
    one: Callable[[Wire, trio.Event], Awaitable[None]],
    gate: trio.Event,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    async with connect(port) as wire:
        task_status.started()
        await one(wire, gate)


async def _status(server: Server) -> Status:
    probe = await trio.to_thread.run_sync(ask, server.port, "/status/json")
    if probe.status != 200:
        raise ConnectionError(f"/status/json: {probe.status} {probe.body}")
    return dict(probe.body)


async def _until_page(server: Server, what: Callable[[Status], bool]) -> Status:
    """The first status page for which ``what`` is true, or the last one within some seconds."""
    page = await _status(server)
    with trio.move_on_after(PAGE_BOUND):
        while not what(page):
            page = await _status(server)
    return page
