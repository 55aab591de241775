"""The shutdown check pointed at the servers of these tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import trio

from dflash_trio.testing import CheckOptions, Result, ServerFailed, UsageError, check

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED_MEMORY_NAME = "bad-server-of-tests"


def python_module(module: str, *words: str) -> tuple[str, ...]:
    """A command that runs a module of the tests, wherever it is started."""
    variables = (f"PYTHONPATH={ROOT}", f"BAD_SERVER_NAME={SHARED_MEMORY_NAME}")
    return ("env", *variables, sys.executable, "-m", module, *words)


def scripted(model: dict[str, Any], **listener: Any) -> tuple[str, ...]:
    """Our own server on a scripted engine, as a command with {port} in its JSON."""
    specification = json.dumps({"models": [model], "listener": {"port": "PORT", **listener}})
    return python_module("tests.support.scripted_server", specification.replace('"PORT"', "{port}"))


def bad_server(fault: str, policy: str = "drain", place: str = "{port}") -> tuple[str, ...]:
    return python_module("tests.testing.bad_servers", fault, place, policy)


QUICK = CheckOptions(
    ("{port}",),
    answer_tokens=120,
    long_answer_tokens=500,
    prefill_tokens=300,
    slack=1.5,
    timeout=60.0,
)
"""For the small servers: a hundred words a second, a prefill of half a second."""
PATIENT = attrs.evolve(
    QUICK, answer_tokens=200, long_answer_tokens=800, prefill_tokens=800, slack=4.0
)
"""For those that have to be found right, on a machine that does something else as well."""


def changed(options: CheckOptions, **changes: Any) -> CheckOptions:
    return attrs.evolve(options, **changes)


async def settled(options: CheckOptions) -> list[Result]:
    """As ``check``, but what was not reached gets two more chances, measured against a golden run
    of their own. A phase is missed when the machine stands still in it, or stood still in the
    golden run; no server is wrong, or right, because of that."""
    results = {result.scenario.name: result for result in await check(options)}
    for _ in range(2):
        missed = [name for name, r in results.items() if r.verdict.kind == "not reached"]
        if not missed:
            break
        again = await check(changed(options, scenarios=tuple(missed)))
        results |= {result.scenario.name: result for result in again}
    return list(results.values())


async def check_all(
    checks: dict[str, CheckOptions], unreached: Collection[str] = ()
) -> dict[str, list[Result] | Exception]:
    """Several checks side by side, since most of their time is waiting. Of those in ``unreached``
    it is expected that something is not reached."""
    results: dict[str, list[Result] | Exception] = {}
    limiter = trio.CapacityLimiter(10)

    async def run(name: str, options: CheckOptions) -> None:
        async with limiter:
            try:
                results[name] = await (check if name in unreached else settled)(options)
            except (ServerFailed, UsageError) as error:
                results[name] = error

    async with trio.open_nursery() as nursery:
        for name, options in checks.items():
            nursery.start_soon(run, name, options)
    return results
