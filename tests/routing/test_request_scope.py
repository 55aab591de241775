"""A request's capacity is given back once, and not before the engine has let go of it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dflash_trio.engine.client import EngineClient
from dflash_trio.generation.errors import EngineFailed
from dflash_trio.generation.events import Retired
from dflash_trio.routing.request_scope import RETIRE_BOUND, RequestScope
from dflash_trio.routing.router import Router
from dflash_trio.routing.served_model import ServedModel
from tests.support.http_client import PATIENCE
from tests.support.scripted import Gate, scripted_config, scripted_load

from .bench import HandModel, ask, bench, check_counters_zero, new_router


async def test_closing_twice_gives_back_once(autojump_clock: MockClock) -> None:
    only = HandModel("only", slots=2)
    router = new_router([only])
    async with RequestScope(router) as other, RequestScope(router) as scope:
        await other.reserve(ask())
        await scope.reserve(ask())
        await scope.close()
        await scope.close()
        assert only.free[0] == 1
    check_counters_zero(router)


async def test_a_scope_without_a_reservation_closes(autojump_clock: MockClock) -> None:
    router = new_router([HandModel("only")])
    async with RequestScope(router) as scope:
        assert scope.reservation is None
        assert scope.router is router
    check_counters_zero(router)


async def test_what_is_to_happen_at_the_end_happens_once_and_before_capacity_is_back(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    router = new_router([only])
    free: list[int] = []
    async with RequestScope(router) as scope:
        await scope.reserve(ask())
        scope.at_close(lambda: free.append(only.free[0]))
        assert free == []
        await scope.close()
        await scope.close()
    assert free == [0]
    check_counters_zero(router)


async def test_a_reservation_that_was_never_submitted_is_given_back(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", retires_cancelled=False)
    router = new_router([only])
    async with RequestScope(router) as scope:
        reservation = await scope.reserve(ask())
        assert reservation.phase == "reserved"
    assert reservation.released
    assert only.engine.cancelled == []
    check_counters_zero(router)


async def test_an_error_in_the_body_cancels_the_generation_and_comes_out_unchanged(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    router = new_router([only])
    error = RuntimeError("from the body")

    async def body() -> None:
        async with RequestScope(router) as scope:
            await scope.reserve(ask())
            scope.submit()
            raise error

    with pytest.raises(RuntimeError) as caught:
        await body()
    assert caught.value is error
    assert only.engine.cancelled == [1]
    check_counters_zero(router)


async def test_closing_waits_for_the_retirement_and_only_then_gives_back(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", retires_cancelled=False)
    router = new_router([only])
    async with RequestScope(router) as scope, trio.open_nursery() as nursery:
        await scope.reserve(ask())
        scope.submit()
        nursery.start_soon(scope.close)
        await trio.sleep(RETIRE_BOUND - 1)
        assert (only.engine.cancelled, only.free[0]) == ([1], 0)
        only.engine.retire_all()
        await wait_all_tasks_blocked()
        assert only.free[0] == 1
    assert only.healthy
    check_counters_zero(router)


async def test_closing_waits_also_when_it_is_cancelled(autojump_clock: MockClock) -> None:
    only = HandModel("only", retires_cancelled=False)
    router = new_router([only])
    start = trio.current_time()

    async def retire_later() -> None:
        await trio.sleep(5)
        assert only.free[0] == 0
        only.engine.retire_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(retire_later)
        with trio.CancelScope() as connection:
            async with RequestScope(router) as scope:
                await scope.reserve(ask())
                scope.submit()
                connection.cancel()
    assert trio.current_time() == start + 5
    check_counters_zero(router)


async def test_an_answer_that_ended_by_itself_is_not_cancelled(autojump_clock: MockClock) -> None:
    only = HandModel("only")
    router = new_router([only])
    async with RequestScope(router) as scope:
        reservation = await scope.reserve(ask())
        generation = scope.submit()
        assert reservation.phase == "prefill"
        only.engine.retire(generation.id)
        assert reservation.phase == "draining"
        # Held while the client reads what is left.
        await trio.sleep(100)
        assert only.free[0] == 0
    assert only.engine.cancelled == []
    check_counters_zero(router)


async def test_an_engine_that_does_not_let_go_is_unhealthy_and_its_capacity_never_shown_free(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", slots=2, retires_cancelled=False)
    router = new_router([only])
    start = trio.current_time()
    async with RequestScope(router, retire_bound=7) as scope:
        reservation = await scope.reserve(ask())
        scope.submit()
    assert trio.current_time() == start + 7
    assert not only.healthy
    assert "7 s" in (only.client.unhealthy_reason or "")
    assert not reservation.released
    assert reservation in router.reservations
    assert only.free[0] == 1
    # Should it let go after all, the capacity comes back and the model with it.
    only.engine.retire_all()
    assert reservation.released
    assert only.healthy
    check_counters_zero(router)


async def test_an_engine_that_stalls_ends_the_wait_at_once_and_the_release_is_left_to_it(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", retires_cancelled=False)
    router = new_router([only])
    start = trio.current_time()
    async with RequestScope(router) as scope:
        reservation = await scope.reserve(ask())
        generation = scope.submit()
        generation.settled.set()
    assert trio.current_time() == start
    assert not reservation.released
    assert not only.healthy
    only.engine.retire_all()
    assert reservation.released
    check_counters_zero(router)


async def test_submitting_to_a_dead_engine_fails_and_the_capacity_is_given_back_at_once(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", retires_cancelled=False)
    router = new_router([only])
    start = trio.current_time()
    async with RequestScope(router) as scope:
        await scope.reserve(ask())
        only.client.mark_unhealthy("the engine died: test")
        with pytest.raises(EngineFailed, match="the engine died: test"):
            scope.submit()
    assert trio.current_time() == start
    check_counters_zero(router)


async def test_a_reservation_is_submitted_once(autojump_clock: MockClock) -> None:
    only = HandModel("only")
    router = new_router([only])
    async with RequestScope(router) as scope:
        await scope.reserve(ask())
        scope.submit()
        with pytest.raises(RuntimeError):
            scope.submit()
    assert len(only.engine.cancelled) == 1
    check_counters_zero(router)


async def test_a_scope_holds_one_reservation_at_most_and_none_once_closed(
    autojump_clock: MockClock,
) -> None:
    router = new_router([HandModel("only", slots=2)])
    async with RequestScope(router) as scope:
        await scope.reserve(ask())
        with pytest.raises(RuntimeError):
            await scope.reserve(ask())
        await scope.close()
    with pytest.raises(RuntimeError):
        await scope.reserve(ask())
    check_counters_zero(router)


async def test_a_release_wakes_a_waiter_before_the_scope_is_left(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only")) as b, RequestScope(b.router) as scope:
        await scope.reserve(ask())
        waiter = await b.arrive()
        await scope.close()
        await wait_all_tasks_blocked()
        assert waiter.state == "served"


# ------------------------------------------------- the same with a real worker thread, real time


async def test_a_real_engine_and_real_preparation_threads_keep_the_same_promises() -> None:
    gate = Gate()
    client = EngineClient("real", scripted_load(slots=1, before_decode=gate))
    async with trio.open_nursery() as engines:
        ready = await engines.start(client.run)
        model = ServedModel(
            scripted_config("real"),
            client,
            info=ready.info,
            vocabulary=ready.vocabulary,
            ledger=ready.ledger,
        )
        router = Router(queue_limit=1)
        router.open([model])
        with trio.fail_after(PATIENCE):
            async with RequestScope(router) as scope:
                reservation = await scope.reserve(ask(10, 3))
                generation = scope.submit()
                received = [event async for event in _until_retired(generation.events)]
                assert isinstance(received[-1], Retired)
                assert reservation.phase == "draining"
            check_counters_zero(router)

            # Left in the middle of a step: held until the step has ended.
            gate.close()
            gate.reached.clear()
            async with trio.open_nursery() as nursery:

                async def leave_early() -> None:
                    async with RequestScope(router) as scope:
                        await scope.reserve(ask(10, 1000))
                        scope.submit()
                        assert await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)

                nursery.start_soon(leave_early)
                assert await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)
                await wait_all_tasks_blocked(0.05)
                assert model.ledger.statistics().slots_reserved == 1
                gate.open()
            check_counters_zero(router)
            client.stop()


async def _until_retired(events: trio.MemoryReceiveChannel):  # type: ignore[no-untyped-def, type-arg]
    async for event in events:
        yield event
        if isinstance(event, Retired):
            return
