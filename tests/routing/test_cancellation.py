"""Cancelled anywhere, a request leaves nothing behind and wakes whoever comes next.

The sweeps cancel at every schedule point of every way through the routing package; the last test
holds that no await of it was left out. Each sweep also has somebody who waits behind the cancelled
request and must be served at the very moment it makes way: the retry may not paper over a lost
wake-up.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dflash_trio.generation.errors import GenerationError
from dflash_trio.routing.drain import DrainController
from dflash_trio.routing.request_scope import RequestScope
from dflash_trio.routing.router import RETRY_INTERVAL

from .bench import (
    REFUSING_TEMPLATE,
    Bench,
    Caller,
    FakeConnections,
    HandModel,
    ask,
    bench,
    exit_now,
)
from .cancel_everywhere import CancelAt, Place, awaits_of, cancel_everywhere

Scenario = Callable[[CancelAt], Awaitable[None]]

PAUSE = 0.1
"""Seconds before the world moves on; less than the retry interval."""


async def whole_life(b: Bench, *, answer_takes: float = 0.0) -> None:
    """A request from the body to the last byte, its engine done after ``answer_takes`` seconds."""
    async with RequestScope(b.router) as scope:
        scope.hold_body(50)
        try:
            reservation = await scope.reserve(ask())
        except GenerationError:
            return
        generation = scope.submit()
        await trio.sleep(answer_takes)
        model = reservation.model
        assert isinstance(model, HandModel)
        model.engine.retire(generation.id)
        await generation.retired.wait()
        await scope.close()


async def served_at_once(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        await cancelled_at(lambda: whole_life(b))
        b.check_counters_zero()


async def served_by_the_second_model(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("first"), HandModel("second")) as b:
        holder = await b.arrive()
        await cancelled_at(lambda: whole_life(b))
        await holder.finish()
        b.check_counters_zero()


async def served_while_others_wait(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        start = trio.current_time()
        younger: list[Caller] = []

        async def others_come() -> None:
            await trio.sleep(PAUSE)
            for _ in range(3):
                younger.append(await b.arrive())

        b.nursery.start_soon(others_come)
        await cancelled_at(lambda: whole_life(b, answer_takes=2 * PAUSE))
        left = trio.current_time()
        await trio.sleep(start + 2 * PAUSE - left)
        await wait_all_tasks_blocked()
        # However it ended, the first of them follows on its heels.
        assert [c.state for c in younger] == ["served", "undecided", "undecided"]
        assert younger[0].served_at is not None
        assert younger[0].served_at <= max(left, start + PAUSE)


async def waits_between_others(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        start = trio.current_time()
        holder = await b.arrive()
        older = await b.arrive()
        younger: list[Caller] = []

        async def world() -> None:
            await trio.sleep(PAUSE)
            younger.append(await b.arrive())
            await holder.finish()
            await older.decided.wait()
            await older.finish()

        b.nursery.start_soon(world)
        await cancelled_at(lambda: whole_life(b))
        await trio.sleep(start + PAUSE - trio.current_time())
        await trio.sleep(PAUSE / 2)
        assert [c.served_at for c in younger] == [start + PAUSE]
        await younger[0].finish()
        b.check_counters_zero()


async def waits_through_retries(cancelled_at: CancelAt) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        hold = only.ledger.try_reserve(10, 10)
        assert hold is not None
        released = trio.Event()

        async def release_unannounced() -> None:
            await trio.sleep(1.5 * RETRY_INTERVAL)
            only.ledger.release(hold)
            released.set()

        b.nursery.start_soon(release_unannounced)
        await cancelled_at(lambda: whole_life(b))
        await released.wait()
        b.check_counters_zero()


async def waits_until_the_server_drains(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        holder = await b.arrive()
        drained = trio.Event()

        async def drain_soon() -> None:
            await trio.sleep(PAUSE)
            await b.router.drain()
            drained.set()

        b.nursery.start_soon(drain_soon)
        await cancelled_at(lambda: whole_life(b))
        await drained.wait()
        await holder.finish()
        b.check_counters_zero()


async def waits_until_its_model_dies(cancelled_at: CancelAt) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        holder = await b.arrive()

        async def die_soon() -> None:
            await trio.sleep(PAUSE)
            only.client.mark_unhealthy("test")

        b.nursery.start_soon(die_soon)
        await cancelled_at(lambda: whole_life(b))
        await holder.hang_up()
        b.check_counters_zero()


async def refused_by_a_full_queue(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only"), queue_limit=0) as b:
        holder = await b.arrive()
        await cancelled_at(lambda: whole_life(b))
        await holder.finish()
        b.check_counters_zero()


async def comes_when_a_full_queue_is_about_to_move(cancelled_at: CancelAt) -> None:
    only = HandModel("only")
    async with bench(only, queue_limit=1) as b:
        hold = only.ledger.try_reserve(10, 10)
        assert hold is not None
        waiter = await b.arrive()
        only.ledger.release(hold)

        async def world() -> None:
            await waiter.decided.wait()
            await trio.sleep(PAUSE)
            await waiter.finish()

        b.nursery.start_soon(world)
        await cancelled_at(lambda: whole_life(b))
        await waiter.decided.wait()
        assert waiter.served_at is not None
        await trio.sleep(2 * PAUSE)
        b.check_counters_zero()


async def refused_by_a_template(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only", template=REFUSING_TEMPLATE)) as b:
        await cancelled_at(lambda: whole_life(b))
        b.check_counters_zero()


async def in_line_for_preparation(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only", slots=4), prepare_limit=1) as b:
        gate = b.preparer.hold("only")
        before = await b.arrive()

        async def open_soon() -> None:
            await trio.sleep(PAUSE)
            gate.set()

        b.nursery.start_soon(open_soon)
        behind: list[Caller] = []

        async def one_more() -> None:
            await trio.sleep(PAUSE / 2)
            behind.append(b.start(ask()))

        b.nursery.start_soon(one_more)
        await cancelled_at(lambda: whole_life(b))
        await trio.sleep(2 * PAUSE)
        await before.finish()
        await behind[0].finish()
        b.check_counters_zero()


async def the_engine_retires_late(cancelled_at: CancelAt) -> None:
    only = HandModel("only", retires_cancelled=False)
    async with bench(only) as b:

        async def engine() -> None:
            await trio.sleep(5)
            # Whoever submitted is closing its scope by now, and held until the engine lets go.
            assert only.free[0] == (0 if only.engine.submitted else 1)
            only.engine.retire_all()

        b.nursery.start_soon(engine)
        await cancelled_at(lambda: whole_life(b, answer_takes=PAUSE))
        b.check_counters_zero()


async def leaves_while_the_engine_works(cancelled_at: CancelAt) -> None:
    only = HandModel("only", retires_cancelled=False)
    async with bench(only) as b:

        async def engine() -> None:
            await trio.sleep(5)
            assert only.free[0] == (0 if only.engine.submitted else 1)
            only.engine.retire_all()

        async def operation() -> None:
            async with RequestScope(b.router) as scope:
                await scope.reserve(ask())
                scope.submit()

        b.nursery.start_soon(engine)
        await cancelled_at(operation)
        b.check_counters_zero()


async def router_drains(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        holder = await b.arrive()
        waiters = [await b.arrive() for _ in range(3)]

        async def operation() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(b.router.wait_draining)
                await trio.sleep(PAUSE)
                await b.router.drain()

        await cancelled_at(operation)
        await wait_all_tasks_blocked()
        # Both or neither: never draining with waiters who were not told.
        told = [w.state == "refused" for w in waiters]
        assert told == [b.router.draining] * 3
        await holder.finish()


async def waits_for_a_model_that_comes_back(cancelled_at: CancelAt) -> None:
    stalled = HandModel("stalled")
    async with bench(stalled, HandModel("busy")) as b:
        stalled.stall()
        holder = await b.arrive()
        younger: list[Caller] = []

        async def world() -> None:
            await trio.sleep(PAUSE)
            younger.append(await b.arrive())
            stalled.come_back()

        b.nursery.start_soon(world)
        await cancelled_at(lambda: whole_life(b))
        await trio.sleep(2 * RETRY_INTERVAL)
        assert [c.model for c in younger] == ["stalled"]
        await younger[0].finish()
        await holder.finish()
        b.check_counters_zero()


async def asked_again_before_it_would_wait(cancelled_at: CancelAt) -> None:
    stalled = HandModel("stalled")
    async with bench(stalled, HandModel("busy")) as b:
        stalled.stall()
        holder = await b.arrive()
        gate = b.preparer.hold("busy")

        async def world() -> None:
            await trio.sleep(PAUSE)
            stalled.come_back()
            gate.set()

        b.nursery.start_soon(world)
        await cancelled_at(lambda: whole_life(b))
        await trio.sleep(2 * PAUSE)
        await holder.finish()
        b.check_counters_zero()


async def waits_in_a_crowd(cancelled_at: CancelAt) -> None:
    """Many are woken at once, so that the condition's lock has a line."""
    async with bench(HandModel("only", slots=2, max_ctx=100, pool=100)) as b:
        start = trio.current_time()
        holder = await b.arrive(90, 10)
        others = [await b.arrive() for _ in range(3)]

        async def world() -> None:
            await trio.sleep(PAUSE)
            for _ in range(3):
                others.append(await b.arrive())
            await holder.finish()

        b.nursery.start_soon(world)
        b.nursery.start_soon(leave_when_served, others)
        await cancelled_at(lambda: whole_life(b))
        await trio.sleep(start + PAUSE - trio.current_time())
        await wait_all_tasks_blocked()
        await trio.sleep(PAUSE)
        assert {c.served_at for c in others} == {start + PAUSE}
        b.check_counters_zero()


async def leave_when_served(callers: list[Caller]) -> None:
    for caller in callers:
        await caller.decided.wait()
        await caller.finish()


async def signals_at(*times: float) -> AsyncIterator[int]:
    begin = trio.current_time()
    for at in times:
        await trio.sleep_until(begin + at)
        yield 15
    await trio.sleep_forever()


async def shutdown_is_watched(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        told: list[str] = []
        controller = DrainController(
            b.router, FakeConnections(told), drain_timeout=1.0, exit_now=exit_now
        )
        holder = await b.arrive()
        waiter = await b.arrive()

        async def operation() -> None:
            with trio.move_on_after(10):
                await controller.watch(signals_at(PAUSE, 2 * PAUSE))

        await cancelled_at(operation)
        await wait_all_tasks_blocked()
        if b.router.draining:
            assert waiter.state == "refused"
            assert told[:2] == ["stop accepting", "close idle"]
            assert controller.draining.is_set()
        await holder.finish()


async def a_shutdown_was_asked_for_before_anybody_watched(cancelled_at: CancelAt) -> None:
    async with bench(HandModel("only")) as b:
        controller = DrainController(
            b.router, FakeConnections([]), drain_timeout=None, exit_now=exit_now
        )
        holder = await b.arrive()
        waiter = await b.arrive()

        async def operation() -> None:
            with trio.move_on_after(10):
                await controller.watch(signals_at(), received=2)

        await cancelled_at(operation)
        await wait_all_tasks_blocked()
        if b.router.draining:
            assert waiter.state == "refused"
        await holder.finish()


SCENARIOS: list[Scenario] = [
    served_at_once,
    served_by_the_second_model,
    served_while_others_wait,
    waits_between_others,
    waits_through_retries,
    waits_until_the_server_drains,
    waits_until_its_model_dies,
    waits_for_a_model_that_comes_back,
    asked_again_before_it_would_wait,
    waits_in_a_crowd,
    refused_by_a_full_queue,
    comes_when_a_full_queue_is_about_to_move,
    refused_by_a_template,
    in_line_for_preparation,
    the_engine_retires_late,
    leaves_while_the_engine_works,
    router_drains,
    shutdown_is_watched,
    a_shutdown_was_asked_for_before_anybody_watched,
]


@functools.cache
def sweep(scenario: Scenario) -> frozenset[Place]:
    return frozenset(cancel_everywhere(scenario))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_cancelled_at_any_point_everything_is_given_back_and_the_next_is_woken(
    scenario: Scenario,
) -> None:
    assert sweep(scenario)


@pytest.mark.parametrize("file", ["router.py", "reservation.py", "request_scope.py", "drain.py"])
def test_no_await_of_the_routing_package_was_left_out(file: str) -> None:
    hit = {line for scenario in SCENARIOS for name, line in sweep(scenario) if name == file}
    missed = [line for line, lines in awaits_of(file).items() if not hit & set(lines)]
    assert not missed, f"never cancelled in {file}, lines {missed}"


# ------------------------------------------------------------------- the important ones, by name


async def test_a_waiter_cancelled_together_with_the_release_that_woke_it_passes_it_on(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only")) as b:
        holder, first, second = await b.arrive(), await b.arrive(), await b.arrive()
        start = trio.current_time()
        first.connection.cancel()
        await holder.finish()
        await second.decided.wait()
        assert (first.state, second.served_at) == ("gone", start)


async def test_a_reservation_made_in_the_moment_of_cancellation_has_an_owner(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        gate = b.preparer.hold("only")
        caller = await b.arrive()
        # A thread that prepares cannot be interrupted, so it reserves although it is cancelled.
        caller.connection.cancel()
        await wait_all_tasks_blocked()
        gate.set()
        await caller.gone.wait()
        assert caller.reservation is not None
        assert caller.reservation.released
        b.check_counters_zero()


async def test_a_cancelled_request_keeps_its_capacity_until_the_engine_let_go(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", retires_cancelled=False)
    async with bench(only) as b:
        caller, waiter = await b.arrive(), await b.arrive()
        caller.connection.cancel()
        await trio.sleep(10)
        assert (only.free[0], waiter.state) == (0, "undecided")
        only.engine.retire_all()
        await waiter.decided.wait()
        assert waiter.state == "served"
        only.engine.retires_cancelled = True


async def test_a_release_is_complete_before_its_first_checkpoint(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        caller = await b.arrive()
        assert caller.reservation is not None
        assert caller.generation is not None
        only.engine.retire(caller.generation.id)
        with trio.CancelScope() as scope:
            scope.cancel()
            await caller.reservation.release()
        assert (caller.reservation.released, only.free[0]) == (True, 1)
        # And once is enough.
        await caller.reservation.release()
        assert only.free[0] == 1
