"""The command line of scripts/soak."""

from __future__ import annotations

import argparse
import functools
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import trio

from .bursts import LIMITS, run_bursts
from .cancelled import run_cancelled
from .chaos import run_chaos
from .connections import run_connections
from .report import Report
from .server import ServerGone
from .setup import DEMO_MODELS, one_slot, two_models

CONNECTIONS_SECONDS = 20.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Random clients of every kind against a dflash-server with two models, which "
        "is started for it. Exit code 0: no violation; 1: some; 2: it could not run.",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--connections", type=int, metavar="N", help="instead: N connections at a time"
    )
    modes.add_argument(
        "--cancelled", type=int, metavar="N", help="instead: N cancelled requests, and the memory"
    )
    modes.add_argument(
        "--bursts", action="store_true", help="instead: bursts at queue limits 0, 1, 2 and 32"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="how long (default 3)")
    parser.add_argument("--seed", type=int, help="of all chances (default: a new one, printed)")
    parser.add_argument("--clients", type=int, default=12, help="at a time (default 12)")
    parser.add_argument(
        "--patience", type=float, default=90.0, help="seconds for a client to end (default 90)"
    )
    parser.add_argument("--scripted", action="store_true", help="scripted engines, no models")
    parser.add_argument("--model-a", type=Path, metavar="PATH", help="default: the demo's first")
    parser.add_argument("--model-b", type=Path, metavar="PATH", help="default: the demo's second")
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="do not compare answers: for a first model whose text depends on its neighbours",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for machines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; the exit code."""
    arguments = parser().parse_args(argv)
    models: tuple[Path, Path] | None = None
    if not arguments.scripted:
        models = (
            (arguments.model_a or DEMO_MODELS[0]).absolute(),
            (arguments.model_b or DEMO_MODELS[1]).absolute(),
        )
        missing = [str(path) for path in models if not path.is_file()]
        if missing:
            parser().error(
                f"there is no {' and no '.join(missing)}: run scripts/demo once, or give "
                "--model-a and --model-b, or --scripted"
            )
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    if arguments.connections is not None:
        report = Report(f"soak: {arguments.connections} connections, seed {seed}")
        setup = two_models(models, queue_limit=32, stall_timeout=60.0)
        run = functools.partial(
            run_connections,
            setup,
            report,
            count=arguments.connections,
            seconds=CONNECTIONS_SECONDS,
            seed=seed,
        )
    elif arguments.cancelled is not None:
        report = Report(f"soak: {arguments.cancelled} cancelled requests, seed {seed}")
        run = functools.partial(
            run_cancelled,
            two_models(models, queue_limit=32),  # a refused request is none that was cancelled
            report,
            count=arguments.cancelled,
            seed=seed,
            clients=arguments.clients,
            patience=arguments.patience,
        )
    elif arguments.bursts:
        report = Report("soak: bursts")

        async def run_all() -> None:
            for limit in LIMITS:
                await run_bursts(one_slot(models and models[0], queue_limit=limit), report)

        run = functools.partial(run_all)

    else:
        report = Report(f"soak: {arguments.minutes:g} minutes of chaos, seed {seed}")
        run = functools.partial(
            run_chaos,
            two_models(models),
            report,
            minutes=arguments.minutes,
            seed=seed,
            clients=arguments.clients,
            patience=arguments.patience,
            compare=not arguments.no_compare,
        )
    try:
        trio.run(until_told_to_stop, run, report)
    except* (ServerGone, OSError, trio.TooSlowError, psutil.Error) as group:
        for error in group.exceptions:
            report.violation("soak", repr(error))
    print(report.table(), flush=True)
    if arguments.json is not None:
        report.write_json(arguments.json)
    return 1 if report.violation_count else 0


async def until_told_to_stop(run: Callable[[], Awaitable[None]], report: Report) -> None:
    """Run a mode. A signal ends it, and its server with it: nothing is left behind."""
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    report.violation("soak", f"stopped by {signal.Signals(number).name}")
                    nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        await run()
        nursery.cancel_scope.cancel()
