"""Sends the cases to a server, a few at a time, and looks at it before, meanwhile and after."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psutil
import trio
from soak_lib.judge import Violation
from soak_lib.monitor import ask, not_idle
from soak_lib.report import Report
from soak_lib.server import running
from soak_lib.setup import ModelSetup, Setup
from soak_lib.wire import Malformed, connect

from .cases import Case, make_case
from .judge import judge, parse
from .shapes import MODEL, SHAPES

PATIENCE = 60.0
"""Seconds for one request; longer is a hang."""
SETTLE_BOUND = 10.0
HEALTH_BOUND = 0.25
"""Seconds of its own work that the server may put before ``/health``, but for a single time. Those
in which a machine with other work let it do nothing are not counted."""
MEMORY_BOUND = 400 * 2**20
"""Bytes by which the server may grow: the kept responses (64 MiB), compiled grammars, and what
the allocator holds of the bodies before."""
PLAIN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def own_server(path: Path | None) -> Setup:
    """A model with some slots. ``None``: scripted."""
    model = ModelSetup(MODEL, 4, 2048, path)
    return Setup((model,), queue_limit=64, stall_timeout=20, step_seconds=0)


async def run_own(
    setup: Setup, report: Report, routes: Sequence[str], *, count: int, seed: int, clients: int
) -> None:
    """Fuzz a server that is started for it. Its log and its end are judged too."""
    async with running(setup, report) as server:
        report.say(f"ready on port {server.port}, seed {seed}")
        with _memory(server.measure(), report) as look:
            await run_at(
                server.port, report, routes, count=count, seed=seed, clients=clients, look=look
            )


async def run_at(
    port: int,
    report: Report,
    routes: Sequence[str],
    *,
    count: int,
    seed: int,
    clients: int,
    look: _Look | None = None,
) -> None:
    """Fuzz whatever listens on a port of this machine."""
    await _check_routes(port, report)
    # By number first, so that every route is fuzzed all the time, next to all others.
    cases = ((route, number) for number in range(count) for route in routes)
    pid = look.pid if look is not None else None
    async with _probing(port, report, pid), trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(_send_cases, port, report, cases, seed, look)
    await _check_end(port, report)


async def replay(port: int, report: Report, route: str, *, seed: int, number: int) -> None:
    """Send one case, and print it and its answer."""
    case = make_case(route, seed, number)
    print(f"POST {case.path} {case.headers}\n{case.body!r}")
    await send(port, report, case, show=True)


async def _send_cases(
    port: int, report: Report, cases: Iterator[tuple[str, int]], seed: int, look: _Look | None
) -> None:
    for route, number in cases:
        await send(port, report, make_case(route, seed, number))
        if look is not None and number % 10 == 0:
            look()


async def send(port: int, report: Report, case: Case, *, show: bool = False) -> None:
    """One case on a connection of its own; what came of it goes into the report."""
    how = "violation"
    where = f"{case.route} number {case.number}"
    try:
        with trio.fail_after(PATIENCE):
            async with connect(port) as wire:
                response = await wire.request("POST", case.path, case.body, case.headers)
                answer = await response.rest()
        if show:
            print(answer.status, answer.headers, answer.body[:5000], sep="\n")
        how = judge(case, answer)
    except trio.TooSlowError:
        report.violation(where, f"no whole answer within {PATIENCE:g} s")
    except (Violation, Malformed, OSError) as error:
        report.violation(where, f"{error!r}"[:600])
    report.outcome(case.route, how)


async def _check_routes(port: int, report: Report) -> None:
    """That no POST route is left out, by the server's own description."""
    page = await trio.to_thread.run_sync(ask, port, "/openapi.json")
    if page.status != 200:
        report.violation("routes", f"/openapi.json: {page.status} {page.body}")
        return
    posts = {path for path, item in page.body["paths"].items() if "post" in item}
    known = set(SHAPES) | {path.removeprefix("/v1") for path in SHAPES}
    for path in sorted(posts - known):
        report.violation("routes", f"POST {path} is not fuzzed")


async def _check_end(port: int, report: Report) -> None:
    """All counters are zero, and a plain request is answered."""
    left = ["no status"]
    with trio.move_on_after(SETTLE_BOUND):
        while left:
            page = await trio.to_thread.run_sync(ask, port, "/status/json")
            left = not_idle(page.body) if page.status == 200 else [str(page)]
            await trio.sleep(0.05)
    if left:
        report.violation("end", f"{SETTLE_BOUND:g} s without clients, and still {', '.join(left)}")
    async with connect(port) as wire:
        body = json.dumps(PLAIN).encode()
        answer = await (await wire.request("POST", "/v1/chat/completions", body)).rest()
    if answer.status != 200 or not parse(answer.body)["choices"]:
        report.violation("end", f"a plain request gets {answer.status} {answer.body[:300]!r}")


# ------------------------------------------------------------------------------- meanwhile


@contextlib.asynccontextmanager
async def _probing(port: int, report: Report, pid: int | None) -> AsyncIterator[None]:
    """Ask for the health meanwhile, and judge it at the end."""
    command = [sys.executable, str(Path(__file__).with_name("prober.py")), str(port)]
    command += [str(pid)] if pid is not None else []
    # Blocks for a moment, before anything else runs.
    start = functools.partial(
        subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with start() as prober:
        output = b""
        try:
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    nonlocal output
                    assert prober.stdout is not None
                    output = await trio.to_thread.run_sync(prober.stdout.read)

                nursery.start_soon(read)
                try:
                    yield
                finally:
                    assert prober.stdin is not None
                    prober.stdin.close()
        finally:
            prober.kill()
    lines = [line.split() for line in output.decode().splitlines()]
    judge_health([(int(status), float(took), float(own)) for status, took, own in lines], report)


def judge_health(probes: Sequence[tuple[int, float, float]], report: Report) -> None:
    """``probes``: the status, the seconds and the server's own of each, in their order."""
    if not probes:
        report.violation("health", "it was never asked for")
        return
    for status, _, _ in probes:
        if status != 200:
            report.violation("health", f"status {status}")
    for (_, first, own), (_, second, own_then) in itertools.pairwise(probes):
        if min(own, own_then) > HEALTH_BOUND:
            report.violation("health", f"took {first:.3f} s and then {second:.3f} s")
    ordered = sorted(seconds for _, seconds, _ in probes)
    shown = [ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.99, 1)]
    figures = " / ".join(f"{1000 * taken:.0f}" for taken in shown)
    report.figures[f"/health p50 / p99 / max of {len(probes)}, ms"] = figures


class _Look:
    """Remembers the most memory that was ever seen."""

    def __init__(self, measure: psutil.Process) -> None:
        self._measure = measure
        self.pid = measure.pid
        self.first = self.most = self.last = 0

    def __call__(self) -> None:
        self.last = int(self._measure.memory_info().rss)
        self.first = self.first or self.last
        self.most = max(self.most, self.last)


@contextlib.contextmanager
def _memory(measure: psutil.Process, report: Report) -> Iterator[_Look]:
    look = _Look(measure)
    look()
    yield look
    with contextlib.suppress(psutil.Error):
        look()
    mib = functools.partial("{:.0f}".format)
    figures = [mib(size / 2**20) for size in (look.first, look.most, look.last)]
    report.figures["RSS at first / most / last, MiB"] = " / ".join(figures)
    if look.most - look.first > MEMORY_BOUND:
        report.violation("memory", f"grew from {figures[0]} to {figures[1]} MiB")
