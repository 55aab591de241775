"""The command line of scripts/fuzz."""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import trio
from soak_lib.command import until_told_to_stop
from soak_lib.report import Report
from soak_lib.server import ServerGone

from .run import own_server, replay, run_at, run_own
from .shapes import SHAPES

LOCAL = ("127.0.0.1", "localhost")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Hostile bodies for every POST route of a dflash-server, which is started for "
        "it on a scripted engine. Exit code 0: no violation; 1: some; 2: it could not run.",
    )
    parser.add_argument("url", nargs="?", help="a server of this machine instead, http://HOST:PORT")
    parser.add_argument("--count", type=int, default=5000, help="bodies per route (default 5000)")
    parser.add_argument("--seed", type=int, help="of all chances (default: a new one, printed)")
    parser.add_argument(
        "--route", action="append", choices=list(SHAPES), help="only this one; may be repeated"
    )
    parser.add_argument("--number", type=int, help="only this case of the route, shown in full")
    parser.add_argument("--clients", type=int, default=6, help="at a time (default 6)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a real model, not a scripted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for machines")
    return parser


def local_port(url: str) -> int | None:
    """The port that an address of this machine names; ``None``: it is another machine's."""
    parts = urlsplit(url)
    return parts.port if parts.scheme == "http" and parts.hostname in LOCAL else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    arguments = parser().parse_args(argv)
    port = local_port(arguments.url) if arguments.url is not None else None
    if arguments.url is not None and port is None:
        parser().error(f"{arguments.url} is no http://127.0.0.1:PORT: only this machine is fuzzed")
    if arguments.model is not None and not arguments.model.is_file():
        parser().error(f"there is no {arguments.model}")
    routes = arguments.route or list(SHAPES)
    if arguments.number is not None and (port is None or len(routes) > 1 or arguments.seed is None):
        parser().error("--number goes with a URL, one --route and the --seed")
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    report = Report(f"fuzz, {arguments.count} bodies per route, seed {seed}")
    sizes = {"count": arguments.count, "seed": seed, "clients": arguments.clients}
    if arguments.number is not None:
        assert port is not None
        run = functools.partial(replay, port, report, routes[0], seed=seed, number=arguments.number)
    elif port is not None:
        run = functools.partial(run_at, port, report, routes, **sizes)
    else:
        model = arguments.model.absolute() if arguments.model is not None else None
        run = functools.partial(run_own, own_server(model), report, routes, **sizes)
    try:
        trio.run(until_told_to_stop, run, report)
    except* (ServerGone, OSError, trio.TooSlowError, psutil.Error) as group:
        for error in group.exceptions:
            report.violation("fuzz", repr(error))
    print(report.table(), flush=True)
    if arguments.json is not None:
        report.write_json(arguments.json)
    return 1 if report.violation_count else 0
