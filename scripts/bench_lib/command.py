"""scripts/bench from its arguments to its exit code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import trio

from .arguments import Entry, baseline_of, entries, parser, prompts_in
from .contestants import Contestant, Options
from .figures import Series
from .plot import svg
from .process import Gone
from .report import as_json, machine, markdown
from .rounds import Measured, Stopping, measure
from .workload import Workload


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write down what was measured, also after a failure; the exit code."""
    arguments = parser().parse_args(argv)
    try:
        found = entries(arguments)
        prompts = prompts_in(arguments.prompts)
    except ValueError as error:
        parser().error(str(error))
    if arguments.seed is None:
        arguments.seed = random.randrange(10**6)
    place = machine(arguments.device_note)
    results: list[Measured] = []
    failures: list[str] = []
    trio.run(
        _until_told_to_stop,
        functools.partial(_measure_all, arguments, prompts, found, results),
        failures,
    )
    for measured in results:
        measured.drop_half_pair()
    commands = {entry.name: shlex.join(entry.command) or None for entry in found}
    print(markdown(results, place, commands), flush=True)
    if arguments.json is not None:
        page = as_json(results, place, commands, vars(arguments))
        arguments.json.write_text(page, encoding="utf-8")
    if arguments.plot is not None and any(measured.pairs for measured in results):
        arguments.plot.write_text(svg(results), encoding="utf-8")
    for failure in failures:
        print(f"scripts/bench: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _measure_all(
    arguments: argparse.Namespace,
    prompts: tuple[str, ...],
    found: Sequence[Entry],
    results: list[Measured],
) -> None:
    options = Options(arguments.api, arguments.model_name, arguments.start_timeout)
    base = baseline_of(arguments, found)
    _say(f"seed {arguments.seed}")
    async with contextlib.AsyncExitStack() as stack:
        contestants: list[Contestant] = []
        for entry in found:
            contestants.append(await stack.enter_async_context(entry.start(options)))
            running = contestants[-1].running
            _say(f"{entry.name} is ready" + (f", process {running.process.pid}" if running else ""))
        begin = trio.current_time()
        for place, streams in enumerate(arguments.streams):
            workload = Workload(
                streams,
                arguments.words,
                arguments.shared_words,
                arguments.tokens,
                arguments.requests,
                arguments.temperature,
                not arguments.no_ignore_eos,
                prompts,
            )
            series = [Series(entry.name) for entry in found]
            measured = Measured(workload, series, next(s for s in series if s.name == base))
            results.append(measured)
            deadline = float("inf")
            if arguments.max_minutes is not None:
                # What earlier workloads left over is for the later ones.
                left = begin + 60 * arguments.max_minutes - trio.current_time()
                deadline = trio.current_time() + left / (len(arguments.streams) - place)
            await measure(
                measured,
                contestants,
                Stopping(arguments.margin, arguments.min_pairs, arguments.max_pairs, deadline),
                seed=arguments.seed,
                warm_up=arguments.warm_up,
                sample_seconds=arguments.sample_seconds,
                say=_say,
            )


async def _until_told_to_stop(run: Callable[[], Awaitable[None]], failures: list[str]) -> None:
    """Run it. A signal ends it, and the servers with it: nothing is left behind."""
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    failures.append(f"stopped by {signal.Signals(number).name}")
                    nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            await run()
        except* Gone as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            failures.append(str(error))
        nursery.cancel_scope.cancel()
