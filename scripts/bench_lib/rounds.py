"""Taking turns: A B, B A, A B, ... until the ratios are known narrowly enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import attrs
import trio

from .contestants import Contestant
from .figures import Interval, Round, Series, ratio_of_pairs
from .workload import Workload, prompts_of

_PAUSE = 0.2
"""Seconds between two turns: threads that spin for a while after their work come to rest."""


@attrs.frozen
class Stopping:
    """When there have been enough pairs."""

    margin: float
    """Width of the 95 % interval, as a share of the ratio."""
    min_pairs: int
    max_pairs: int
    deadline: float
    """On Trio's clock: no pair begins behind it, once there have been two."""


@attrs.define
class Measured:
    """A workload and what it showed."""

    workload: Workload
    series: list[Series]
    baseline: Series
    narrow: bool = False
    """It ended because the intervals were narrow, not because of a limit."""

    @property
    def pairs(self) -> int:
        return min(len(series.rounds) for series in self.series)

    def drop_half_pair(self) -> None:
        """Of a pair that not all could finish, nothing counts."""
        for series in self.series:
            del series.rounds[self.pairs :]


def intervals(measured: Measured) -> list[Interval]:
    """What must become narrow: the ratios to the baseline; of one alone, its rate."""
    base = measured.baseline
    if len(measured.series) == 1:
        return [ratio_of_pairs(base.rates, [1.0] * len(base.rates))]
    return [ratio_of_pairs(s.rates, base.rates) for s in measured.series if s is not base]


async def measure(
    measured: Measured,
    contestants: Sequence[Contestant],
    stopping: Stopping,
    *,
    seed: int,
    warm_up: int,
    sample_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Fill in the series. Raises Gone when a contestant fails; what was measured stays."""
    workload = measured.workload
    for number in range(warm_up):
        for contestant in contestants:
            await contestant.prepare(workload, prompts_of(workload, seed, f"warm-up {number}"))
            await contestant.run()
    pairs = list(zip(contestants, measured.series, strict=True))
    for number in range(stopping.max_pairs):
        if number >= 2 and trio.current_time() > stopping.deadline:
            break
        prompts = prompts_of(workload, seed, f"round {number}")
        for contestant, series in pairs if number % 2 == 0 else reversed(pairs):
            await contestant.prepare(workload, prompts)
            await trio.sleep(_PAUSE)
            series.rounds.append(await _turn(contestant, series, sample_seconds))
        say(_progress(measured))
        found = intervals(measured)
        if number + 1 >= stopping.min_pairs and all(i.width <= stopping.margin for i in found):
            measured.narrow = True
            break


async def _turn(contestant: Contestant, series: Series, sample_seconds: float) -> Round:
    async with trio.open_nursery() as nursery:
        if contestant.running is not None:
            nursery.start_soon(_sample, contestant, series, sample_seconds)
        turn = await contestant.run()
        nursery.cancel_scope.cancel()
    await _look(contestant, series)
    turn.load = os.getloadavg()[0]
    return turn


async def _sample(contestant: Contestant, series: Series, seconds: float) -> None:
    while True:
        await trio.sleep(seconds)
        await _look(contestant, series)


async def _look(contestant: Contestant, series: Series) -> None:
    if contestant.running is None:
        return
    # On a thread: the kernel walks all of the process's pages for this, and tokens arrive.
    pss, rss = await trio.to_thread.run_sync(contestant.running.memory)
    series.peak_rss = max(series.peak_rss or 0, rss)
    if pss is not None:
        series.peak_pss_anon = max(series.peak_pss_anon or 0, pss)


def _progress(measured: Measured) -> str:
    rates = ", ".join(f"{s.name} {s.rates[-1]:.1f}" for s in measured.series)
    line = f"{measured.workload.streams} streams, pair {measured.pairs}: {rates} tokens/s"
    if measured.pairs > 1:
        widths = ", ".join(f"{100 * i.width:.1f} %" for i in intervals(measured))
        line += f"; interval's width {widths}"
    return line
