"""A shutdown's phases: one signal each, and the clock."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dflash_trio.generation.errors import Draining
from dflash_trio.routing.drain import CUT_GRACE, LAWFUL, DrainController, Phase

from .bench import Bench, FakeConnections, HandModel, ProcessEnded, bench, exit_now


class Shutdown:
    """A controller that is watching, and the signals to send it."""

    def __init__(self, b: Bench, controller: DrainController, told: list[str]) -> None:
        self.bench = b
        self.controller = controller
        self.told = told
        self._send, self.signals = trio.open_memory_channel[int](math.inf)

    async def signal(self) -> None:
        self._send.send_nowait(15)
        await wait_all_tasks_blocked()

    @property
    def phase(self) -> str:
        return self.controller.phase


@asynccontextmanager
async def shutdown(
    *models: HandModel, drain_timeout: float | None = None
) -> AsyncIterator[Shutdown]:
    async with bench(*models) as b, trio.open_nursery() as nursery:
        told: list[str] = []
        controller = DrainController(
            b.router, FakeConnections(told), drain_timeout=drain_timeout, exit_now=exit_now
        )
        the_shutdown = Shutdown(b, controller, told)
        nursery.start_soon(controller.watch, the_shutdown.signals)
        await wait_all_tasks_blocked()
        yield the_shutdown
        nursery.cancel_scope.cancel()


async def test_before_a_signal_it_serves(autojump_clock: MockClock) -> None:
    async with shutdown(HandModel("only")) as s:
        await trio.sleep(1000)
        assert (s.phase, s.told, s.controller.draining.is_set()) == ("serving", [], False)
        assert (await s.bench.arrive()).state == "served"


async def test_the_first_signal_drains_and_nothing_is_cut_however_long_it_takes(
    autojump_clock: MockClock,
) -> None:
    async with shutdown(HandModel("only")) as s:
        active = await s.bench.arrive()
        await s.signal()
        assert s.controller.draining.is_set()
        await trio.sleep(10_000)
        assert (s.phase, s.told) == ("draining", ["stop accepting", "close idle"])
        assert active.state == "served"
        assert isinstance((await s.bench.arrive()).error, Draining)


async def test_accepting_stops_first_then_waiters_are_told_then_idle_connections_close(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only")) as b:
        seen: list[tuple[str, bool, int]] = []

        class Watched(FakeConnections):
            def stop_accepting(self) -> None:
                seen.append(("stop accepting", b.router.draining, b.waiting))

            def close_idle(self) -> None:
                seen.append(("close idle", b.router.draining, b.waiting))

        await b.arrive()
        waiter = await b.arrive()
        controller = DrainController(b.router, Watched([]), drain_timeout=None, exit_now=exit_now)
        await controller.begin()
        await wait_all_tasks_blocked()
        assert isinstance(waiter.error, Draining)
        assert [what for what, _, _ in seen] == ["stop accepting", "close idle"]
        assert seen[0][1:] == (False, 1)
        assert seen[1][1]


async def test_the_first_signal_finalizes_models_that_finalize_and_leaves_those_that_drain(
    autojump_clock: MockClock,
) -> None:
    # By default one slot drains and several finalize.
    one_slot, batched = HandModel("one slot"), HandModel("batched", slots=2)
    finalizing = HandModel("finalizing", on_sigterm="finalize")
    draining = HandModel("draining", slots=2, on_sigterm="drain")
    models = (one_slot, batched, finalizing, draining)
    async with shutdown(*models) as s:
        await s.signal()
        assert [model.engine.finalized for model in models] == [0, 1, 1, 0]


async def test_the_drain_timeout_finalizes_everything_and_cuts_two_seconds_later(
    autojump_clock: MockClock,
) -> None:
    model = HandModel("only")
    async with shutdown(model, drain_timeout=10.0) as s:
        await s.signal()
        await trio.sleep(9.9)
        assert (s.phase, model.engine.finalized) == ("draining", 0)
        await trio.sleep(0.2)
        assert (s.phase, model.engine.finalized) == ("finalizing", 1)
        await trio.sleep(CUT_GRACE - 0.2)
        assert "abort connections" not in s.told
        await trio.sleep(0.2)
        assert (s.phase, s.told[-1]) == ("cutting", "abort connections")


async def test_a_drain_timeout_of_zero_finalizes_at_once(autojump_clock: MockClock) -> None:
    model = HandModel("only")
    async with shutdown(model, drain_timeout=0.0) as s:
        await s.signal()
        await trio.sleep(0.001)
        assert (s.phase, model.engine.finalized) == ("finalizing", 1)


async def test_the_second_signal_finalizes_at_once_and_cuts_two_seconds_later(
    autojump_clock: MockClock,
) -> None:
    model = HandModel("only")
    async with shutdown(model) as s:
        await s.signal()
        await trio.sleep(100)
        await s.signal()
        await trio.sleep(0.001)
        assert (s.phase, model.engine.finalized) == ("finalizing", 1)
        assert "abort connections" not in s.told
        await trio.sleep(CUT_GRACE)
        assert (s.phase, s.told[-1]) == ("cutting", "abort connections")


async def test_a_second_signal_after_the_timeout_changes_nothing_for_the_worse(
    autojump_clock: MockClock,
) -> None:
    model = HandModel("only")
    async with shutdown(model, drain_timeout=10.0) as s:
        await s.signal()
        await trio.sleep(11)
        await s.signal()
        assert (s.phase, model.engine.finalized) == ("finalizing", 1)
        await trio.sleep(CUT_GRACE - 1 + 0.001)
        assert s.phase == "cutting"
        await trio.sleep(10)
        assert (s.phase, model.engine.finalized) == ("cutting", 1)


async def test_the_third_signal_ends_the_process_at_once(autojump_clock: MockClock) -> None:
    start = trio.current_time()

    async def three_signals() -> None:
        async with shutdown(HandModel("only")) as s:
            for _ in range(3):
                await s.signal()

    with pytest.raises(BaseExceptionGroup) as caught:
        await three_signals()
    assert caught.group_contains(ProcessEnded)
    assert trio.current_time() == start


async def test_draining_may_begin_without_a_signal_and_the_first_one_still_starts_the_timeout(
    autojump_clock: MockClock,
) -> None:
    model = HandModel("only", on_sigterm="finalize")
    async with shutdown(model, drain_timeout=10.0) as s:
        await s.controller.begin()
        await trio.sleep(100)
        assert s.phase == "draining"
        await s.signal()
        # Once, not twice.
        assert (s.told, model.engine.finalized) == (["stop accepting", "close idle"], 1)
        await trio.sleep(10.1)
        assert s.phase == "finalizing"


async def test_a_shutdown_while_loading_drains_a_router_without_models(
    autojump_clock: MockClock,
) -> None:
    async with shutdown() as s:
        await s.signal()
        assert s.phase == "draining"
        assert isinstance((await s.bench.arrive()).error, Draining)


async def test_a_client_that_hangs_up_while_draining_still_cancels(
    autojump_clock: MockClock,
) -> None:
    model = HandModel("only")
    async with shutdown(model) as s:
        active = await s.bench.arrive()
        await s.signal()
        await active.hang_up()
        assert model.engine.cancelled == [1]
        s.bench.check_counters_zero()


async def test_engines_are_told_to_stop_with_the_cut_and_not_before(
    autojump_clock: MockClock,
) -> None:
    models = (HandModel("first"), HandModel("second", slots=2))
    async with shutdown(*models) as s:
        await s.signal()
        await trio.sleep(100)
        await s.signal()
        await trio.sleep(CUT_GRACE - 0.1)
        assert [model.engine.stopped for model in models] == [False, False]
        await trio.sleep(0.2)
        assert s.phase == "cutting"
        assert [model.engine.stopped for model in models] == [True, True]


def test_the_phases_go_one_way_and_the_table_names_each() -> None:
    assert set(LAWFUL) == set(get_args(Phase))
    phases: list[Phase] = ["serving"]
    while LAWFUL[phases[-1]]:
        (after,) = LAWFUL[phases[-1]]
        assert after not in phases
        phases.append(after)
    assert phases == ["serving", "draining", "finalizing", "cutting"]
