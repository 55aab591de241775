"""Which model answers, who waits, who is refused, and in which order they are served."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dflash_trio.generation.errors import (
    Draining,
    InvalidRequest,
    Loading,
    PreparationFull,
    PromptTooLong,
    QueueFull,
    Unhealthy,
)
from dflash_trio.generation.request import GenerationRequest
from dflash_trio.routing import policy
from dflash_trio.routing.request_scope import RequestScope
from dflash_trio.routing.router import MAX_HELD_BODY_BYTES, RETRY_INTERVAL, Router

from .bench import (
    REFUSING_TEMPLATE,
    Bench,
    Caller,
    HandModel,
    ask,
    bench,
    check_counters_zero,
    new_router,
)

ONE_RETRY = RETRY_INTERVAL + 0.001


# -------------------------------------------------------------------------- which model serves


async def test_the_primary_serves_while_it_has_a_slot_and_cells(autojump_clock: MockClock) -> None:
    async with bench(HandModel("primary", slots=2), HandModel("second")) as b:
        assert [(await b.arrive()).model for _ in range(2)] == ["primary", "primary"]


async def test_a_busy_model_passes_on_to_the_next_in_priority_order(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("a"), HandModel("b"), HandModel("c")) as b:
        assert [(await b.arrive()).model for _ in range(3)] == ["a", "b", "c"]


async def test_too_few_cells_make_a_model_busy_like_too_few_slots(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("a", slots=4, max_ctx=100, pool=100), HandModel("b")) as b:
        assert (await b.arrive(80)).model == "a"
        assert (await b.arrive(20)).model == "b"


async def test_a_request_waits_when_every_model_that_fits_is_busy_and_takes_what_frees_first(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("a"), HandModel("b")) as b:
        _, on_b = await b.arrive(), await b.arrive()
        waiter = await b.arrive()
        assert (waiter.state, b.waiting) == ("undecided", 1)
        await on_b.finish()
        await waiter.decided.wait()
        assert (waiter.model, b.waiting) == ("b", 0)


async def test_it_waits_for_the_only_model_that_fits_although_another_is_idle(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("large"), HandModel("small", max_ctx=50)) as b:
        holder = await b.arrive(100)
        waiter = await b.arrive(100)
        assert waiter.state == "undecided"
        await holder.finish()
        await waiter.decided.wait()
        assert waiter.model == "large"


async def test_what_fits_only_a_later_model_goes_there_at_once(autojump_clock: MockClock) -> None:
    async with bench(HandModel("small", max_ctx=50), HandModel("large")) as b:
        assert (await b.arrive(100)).model == "large"


async def test_models_with_the_whole_headroom_come_before_those_with_less(
    autojump_clock: MockClock,
) -> None:
    # 10 more tokens is all that the primary has for this prompt, and 50 are asked for.
    async with bench(HandModel("snug", max_ctx=100), HandModel("roomy")) as b:
        assert (await b.arrive(90, 50)).model == "roomy"
        # Busy is no reason to do with less.
        waiter = await b.arrive(90, 50)
        assert waiter.state == "undecided"
        # Asking for no more than there is has all the headroom it needs.
        assert (await b.arrive(90, 10)).model == "snug"


async def test_less_headroom_is_good_enough_when_no_model_has_all_of_it(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("a", max_ctx=80), HandModel("b", max_ctx=100)) as b:
        assert (await b.arrive(90, 50)).model == "b"


async def test_a_model_that_freed_while_a_later_one_prepared_still_comes_first(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("primary"), HandModel("second")) as b:
        holder = await b.arrive()
        gate = b.preparer.hold("second")
        newcomer = await b.arrive()
        await holder.finish()
        gate.set()
        await newcomer.decided.wait()
        assert newcomer.model == "primary"


async def test_each_model_prepares_a_request_once_however_long_it_waits(
    autojump_clock: MockClock,
) -> None:
    a, b_model = HandModel("a"), HandModel("b")
    async with bench(a, b_model) as b:
        await b.arrive()
        holder = await b.arrive()
        prepared = (a.times_prepared, b_model.times_prepared)
        assert prepared == (2, 1)
        waiter = await b.arrive()
        await trio.sleep(5)
        await holder.finish()
        await waiter.decided.wait()
        assert (a.times_prepared, b_model.times_prepared) == (3, 2)


async def test_a_model_after_the_one_that_serves_prepares_nothing(
    autojump_clock: MockClock,
) -> None:
    a, b_model = HandModel("a"), HandModel("b")
    async with bench(a, b_model) as b:
        assert (await b.arrive()).model == "a"
        assert b_model.times_prepared == 0


# ---------------------------------------------------------------------- what is refused, and how


async def test_what_fits_no_model_is_told_its_tokens_and_each_room_even_with_a_full_queue(
    autojump_clock: MockClock,
) -> None:
    models = HandModel("a", max_ctx=50), HandModel("b", max_ctx=60, pool=40)
    async with bench(*models, queue_limit=0) as b:
        holders = [await b.arrive(), await b.arrive()]
        assert {holder.model for holder in holders} == {"a", "b"}
        error = (await b.arrive(100)).error
        assert isinstance(error, PromptTooLong)
        assert [(r.name, r.prompt_tokens, r.room) for r in error.rooms] == [
            ("a", 100, 50),
            ("b", 100, 40),
        ]
        for part in ("a: 100 prompt tokens, room 50", "b: 100 prompt tokens, room 40"):
            assert part in str(error)


@pytest.mark.parametrize(("prompt", "fits"), [(49, True), (50, False)])
async def test_a_prompt_needs_one_token_of_room_for_the_answer(
    prompt: int, fits: bool, autojump_clock: MockClock
) -> None:
    async with bench(HandModel("a", max_ctx=50)) as b:
        caller = await b.arrive(prompt)
        assert caller.state == ("served" if fits else "refused")


async def test_more_alternatives_than_any_model_has_slots_names_n_and_the_largest(
    autojump_clock: MockClock,
) -> None:
    a, b_model = HandModel("a", slots=2), HandModel("b", slots=3)
    async with bench(a, b_model) as b:
        assert (await b.arrive(n=3)).model == "b"
        error = (await b.arrive(n=4)).error
        assert isinstance(error, InvalidRequest)
        assert error.param == "n"
        assert "4" in str(error)
        assert "3 at a time" in str(error)
        assert a.times_prepared == 1


async def test_a_body_beyond_64_bytes_for_each_token_of_room_is_refused_unread(
    autojump_clock: MockClock,
) -> None:
    a = HandModel("a", max_ctx=50)
    async with bench(a, HandModel("b", max_ctx=100)) as b:
        assert (await b.arrive(body_bytes=6400)).state == "served"
        error = (await b.arrive(body_bytes=6401)).error
        assert isinstance(error, PromptTooLong)
        for part in ("6401 bytes", "6400 bytes", "a: room 50", "b: room 100"):
            assert part in str(error)
        assert a.times_prepared == 1


async def test_an_error_on_the_primary_ends_the_request_without_a_second_try(
    autojump_clock: MockClock,
) -> None:
    second = HandModel("second")
    async with bench(HandModel("primary", template=REFUSING_TEMPLATE), second) as b:
        assert isinstance((await b.arrive()).error, InvalidRequest)
        assert second.times_prepared == 0


async def test_an_error_on_the_first_model_that_could_take_it_ends_the_request(
    autojump_clock: MockClock,
) -> None:
    async with bench(
        HandModel("small", max_ctx=50),
        HandModel("refusing", template=REFUSING_TEMPLATE),
        HandModel("third"),
    ) as b:
        assert isinstance((await b.arrive(100)).error, InvalidRequest)


async def test_a_later_refusal_only_drops_that_model_with_one_line_while_an_earlier_is_busy(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "dflash_trio.routing")
    async with bench(
        HandModel("primary"),
        HandModel("refusing", template=REFUSING_TEMPLATE),
        HandModel("third"),
    ) as b:
        holder = await b.arrive()
        assert (await b.arrive()).model == "third"
        assert len(caplog.records) == 1
        assert "refusing" in caplog.text
        waiter = await b.arrive()
        await trio.sleep(1)
        await holder.finish()
        await waiter.decided.wait()
        assert waiter.model == "primary"
        assert len(caplog.records) == 2


async def test_before_the_models_are_loaded_a_request_is_told_so(autojump_clock: MockClock) -> None:
    router = Router(queue_limit=1)
    async with RequestScope(router) as scope:
        with pytest.raises(Loading):
            await scope.reserve(ask())
    check_counters_zero(router)


# ---------------------------------------------------------------------------- unhealthy models


async def test_an_unhealthy_model_is_not_there(autojump_clock: MockClock) -> None:
    primary = HandModel("primary")
    async with bench(primary, HandModel("second")) as b:
        primary.client.mark_unhealthy("test")
        assert (await b.arrive()).model == "second"
        assert primary.times_prepared == 0


@pytest.mark.parametrize("queue_limit", [0, 1])
async def test_what_could_fit_only_an_unhealthy_model_is_unhealthy_and_never_too_long(
    queue_limit: int, autojump_clock: MockClock
) -> None:
    large = HandModel("large", slots=2)
    async with bench(HandModel("small", max_ctx=50), large, queue_limit=queue_limit) as b:
        large.client.mark_unhealthy("test")
        for caller in (await b.arrive(100), await b.arrive(10, n=2)):
            assert isinstance(caller.error, Unhealthy)
            assert "large" in str(caller.error)


async def test_with_every_model_unhealthy_everybody_is_told_so(autojump_clock: MockClock) -> None:
    a, b_model = HandModel("a"), HandModel("b")
    async with bench(a, b_model) as b:
        a.client.mark_unhealthy("test")
        b_model.client.mark_unhealthy("test")
        assert isinstance((await b.arrive()).error, Unhealthy)


async def test_a_model_that_dies_while_it_prepares_makes_no_invalid_request(
    autojump_clock: MockClock,
) -> None:
    primary = HandModel("primary")
    async with bench(primary, HandModel("second")) as b:
        gate = b.preparer.hold("primary")
        caller = await b.arrive()
        primary.client.mark_unhealthy("test")
        primary.scripted_vocabulary.closed = True  # tokenizing raises from now on
        gate.set()
        await caller.decided.wait()
        assert caller.model == "second"


async def test_the_only_model_dying_while_it_prepares_is_unhealthy_not_a_bad_request(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    async with bench(only, queue_limit=0) as b:
        gate = b.preparer.hold("only")
        caller = await b.arrive()
        only.client.mark_unhealthy("test")
        only.scripted_vocabulary.closed = True
        gate.set()
        await caller.decided.wait()
        assert isinstance(caller.error, Unhealthy)


async def test_a_model_that_died_does_not_keep_one_with_less_headroom_from_serving(
    autojump_clock: MockClock,
) -> None:
    roomy = HandModel("roomy")
    async with bench(roomy, HandModel("snug", max_ctx=100)) as b:
        gate = b.preparer.hold("snug")
        holder = await b.arrive(90, 50)
        newcomer = await b.arrive(90, 50)
        roomy.client.mark_unhealthy("test")
        gate.set()
        await newcomer.decided.wait()
        assert newcomer.model == "snug"
        await holder.finish()


async def test_a_waiter_whose_model_dies_goes_to_one_with_less_headroom(
    autojump_clock: MockClock,
) -> None:
    roomy = HandModel("roomy")
    async with bench(roomy, HandModel("snug", max_ctx=100)) as b:
        await b.arrive(90, 50)
        waiter = await b.arrive(90, 50)
        assert waiter.state == "undecided"
        roomy.client.mark_unhealthy("test")
        with trio.fail_after(ONE_RETRY):
            await waiter.decided.wait()
        assert waiter.model == "snug"


async def test_waiters_whose_every_model_died_are_told_within_the_retry_interval(
    autojump_clock: MockClock,
) -> None:
    a, b_model = HandModel("a"), HandModel("b")
    async with bench(a, b_model) as b:
        await b.arrive(), await b.arrive()
        waiter = await b.arrive()
        a.client.mark_unhealthy("test")
        await trio.sleep(1)
        assert waiter.state == "undecided"
        b_model.client.mark_unhealthy("test")
        with trio.fail_after(ONE_RETRY):
            await waiter.decided.wait()
        assert isinstance(waiter.error, Unhealthy)


async def test_a_waiter_is_served_by_a_model_that_came_back_before_any_newcomer(
    autojump_clock: MockClock,
) -> None:
    primary, second = HandModel("primary"), HandModel("second")
    async with bench(primary, second) as b:
        primary.stall()
        holder = await b.arrive()
        waiter = await b.arrive()
        assert (holder.model, waiter.state) == ("second", "undecided")
        primary.come_back()
        with trio.fail_after(ONE_RETRY):
            await waiter.decided.wait()
        assert waiter.model == "primary"
        newcomer = await b.arrive()
        assert newcomer.state == "undecided"
        await waiter.finish()
        await newcomer.decided.wait()
        assert newcomer.model == "primary"
        await holder.finish()


async def test_a_waiter_keeps_its_place_while_a_model_that_came_back_is_asked(
    autojump_clock: MockClock,
) -> None:
    primary, second = HandModel("primary"), HandModel("second")
    async with bench(primary, second) as b:
        primary.stall()
        holder = await b.arrive()
        waiter = await b.arrive()
        younger = await b.arrive()
        gate = b.preparer.hold("primary")
        primary.come_back()
        await trio.sleep(2 * RETRY_INTERVAL)
        assert b.router.statistics().waiting == 2
        await holder.finish()
        await wait_all_tasks_blocked()
        assert (waiter.state, younger.state) == ("undecided", "undecided")
        gate.set()
        await waiter.decided.wait()
        await younger.decided.wait()
        assert (waiter.model, younger.model) == ("primary", "second")


async def test_a_waiter_whose_model_dies_goes_to_one_that_came_back(
    autojump_clock: MockClock,
) -> None:
    primary, second = HandModel("primary"), HandModel("second")
    async with bench(primary, second) as b:
        primary.stall()
        await b.arrive()
        waiter = await b.arrive()
        primary.come_back()
        second.client.mark_unhealthy("test")
        with trio.fail_after(ONE_RETRY):
            await waiter.decided.wait()
        assert waiter.model == "primary"


async def test_a_model_that_comes_back_while_another_prepares_is_asked_before_anybody_gives_up(
    autojump_clock: MockClock,
) -> None:
    primary = HandModel("primary")
    async with bench(primary, HandModel("small", max_ctx=20)) as b:
        primary.stall()
        gate = b.preparer.hold("small")
        caller = await b.arrive(90, 50)
        primary.come_back()
        gate.set()
        await caller.decided.wait()
        assert (caller.model, caller.error) == ("primary", None)


# ------------------------------------------------------------------------------ the queue limit


@pytest.mark.parametrize("limit", [0, 1, 2, 32])
async def test_of_a_burst_exactly_the_limit_waits_and_the_rest_is_refused_at_once(
    limit: int, autojump_clock: MockClock
) -> None:
    async with bench(HandModel("only"), queue_limit=limit) as b:
        holder = await b.arrive()
        start = trio.current_time()
        burst = [b.start(ask()) for _ in range(limit + 5)]
        await wait_all_tasks_blocked()
        refused = [caller for caller in burst if caller.state == "refused"]
        waiting = [caller for caller in burst if caller.state == "undecided"]
        assert (len(refused), len(waiting), b.waiting) == (5, limit, limit)
        assert all(isinstance(caller.error, QueueFull) for caller in refused)
        assert trio.current_time() == start
        # All who wait are served in the end.
        await holder.finish()
        while waiting:
            await wait_all_tasks_blocked()
            (served,) = [caller for caller in waiting if caller.state == "served"]
            waiting.remove(served)
            await served.finish()
        assert b.waiting == 0


async def test_the_burst_is_counted_right_also_when_preparation_ends_for_all_at_once(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only"), queue_limit=2, prepare_limit=64) as b:
        await b.arrive()
        gate = b.preparer.hold("only")
        burst = [await b.arrive() for _ in range(7)]
        assert b.router.statistics().preparing == 7
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(caller.state for caller in burst) == ["refused"] * 5 + ["undecided"] * 2


async def test_a_cancelled_waiter_frees_its_place_at_once(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only"), queue_limit=1) as b:
        await b.arrive()
        waiter = await b.arrive()
        assert isinstance((await b.arrive()).error, QueueFull)
        start = trio.current_time()
        await waiter.hang_up()
        assert b.waiting == 0
        assert (await b.arrive()).state == "undecided"
        assert trio.current_time() == start


async def test_a_waiter_that_leaves_wakes_younger_ones_it_stood_before(
    autojump_clock: MockClock,
) -> None:
    # The oldest is entitled and holds the model; the younger one would fit all along.
    async with bench(HandModel("only", slots=4, max_ctx=100, pool=100)) as b:
        await b.arrive(40)
        big = await b.arrive(80)
        await trio.sleep(policy.SECONDS_BEFORE_HOLD + 0.1)
        small = await b.arrive(10)
        assert small.state == "undecided"
        start = trio.current_time()
        await big.hang_up()
        await small.decided.wait()
        assert (small.state, small.served_at) == ("served", start)


# ---------------------------------------------------------------------------- waking, and order


async def test_a_release_wakes_waiters_at_once(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only")) as b:
        holder, waiter = await b.arrive(), await b.arrive()
        await trio.sleep(0.1)
        start = trio.current_time()
        await holder.finish()
        await waiter.decided.wait()
        assert waiter.served_at == start


async def test_waiters_are_served_oldest_first(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only")) as b:
        serving = await b.arrive()
        waiters = [await b.arrive() for _ in range(8)]
        for expected in waiters:
            await serving.finish()
            await wait_all_tasks_blocked()
            assert [w for w in waiters if w.state == "served"] == [expected]
            serving = expected


async def test_oldest_first_among_those_whom_the_capacity_fits(autojump_clock: MockClock) -> None:
    # 100 cells: 60 + 30 are taken; when the 30 leave, 40 are free.
    async with bench(HandModel("only", slots=4, max_ctx=100, pool=100)) as b:
        await b.arrive(55, 5)
        leaving = await b.arrive(25, 5)
        too_big = await b.arrive(45, 5)
        older, younger = await b.arrive(30, 5), await b.arrive(20, 5)
        assert b.waiting == 3
        await leaving.finish()
        await wait_all_tasks_blocked()
        assert [w.state for w in (too_big, older, younger)] == ["undecided", "served", "undecided"]


async def test_one_release_serves_as_many_waiters_as_it_has_capacity_for(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only", slots=3, max_ctx=100, pool=100)) as b:
        holder = await b.arrive(90, 10)
        waiters = [await b.arrive(20, 10) for _ in range(4)]
        start = trio.current_time()
        await holder.finish()
        await wait_all_tasks_blocked()
        assert [w.state for w in waiters] == ["served", "served", "served", "undecided"]
        assert {w.served_at for w in waiters[:3]} == {start}


async def test_a_newcomer_does_not_overtake_a_waiter_who_could_use_the_capacity_now(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    async with bench(only, queue_limit=2) as b:
        hold = only.ledger.try_reserve(10, 10)
        assert hold is not None
        waiter = await b.arrive()
        # Not announced: the waiter sleeps on, but its claim stands.
        only.ledger.release(hold)
        newcomer = await b.arrive()
        assert (waiter.state, newcomer.state) == ("undecided", "undecided")
        await waiter.decided.wait()
        assert (waiter.state, newcomer.state) == ("served", "undecided")


async def test_a_newcomer_takes_what_no_waiter_can_use(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only", slots=4, max_ctx=100, pool=100)) as b:
        await b.arrive(40)
        big = await b.arrive(80)
        assert (await b.arrive(10)).state == "served"
        assert big.state == "undecided"


async def test_the_retry_sees_capacity_that_nobody_announced(autojump_clock: MockClock) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        hold = only.ledger.try_reserve(10, 10)
        assert hold is not None
        waiter = await b.arrive()
        await trio.sleep(10.1)
        only.ledger.release(hold)
        assert waiter.state == "undecided"
        with trio.fail_after(ONE_RETRY):
            await waiter.decided.wait()
        assert waiter.state == "served"


async def test_waiting_has_no_deadline(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only")) as b:
        holder, waiter = await b.arrive(), await b.arrive()
        await trio.sleep(3600)
        assert waiter.state == "undecided"
        await holder.finish()
        await waiter.decided.wait()
        assert waiter.state == "served"


# ----------------------------------------------------------------------------------- starvation


class SmallFlow:
    """Small requests for ever, overlapping, so that the model is never empty."""

    def __init__(self, b: Bench, *, every: float, lasting: float) -> None:
        self.callers: list[Caller] = []
        self._bench = b
        self._every = every
        self._lasting = lasting
        b.nursery.start_soon(self._run)

    async def _run(self) -> None:
        while True:
            caller = self._bench.start(ask(200, 50))
            self.callers.append(caller)
            self._bench.nursery.start_soon(self._leave, caller)
            await trio.sleep(self._every)

    async def _leave(self, caller: Caller) -> None:
        await caller.decided.wait()
        await trio.sleep(self._lasting)
        await caller.finish()


async def test_a_request_for_nearly_the_whole_pool_is_served_in_a_constant_flow_of_small_ones(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only", slots=8, max_ctx=1000, pool=1000), queue_limit=64) as b:
        flow = SmallFlow(b, every=1.0, lasting=2.5)
        await trio.sleep(5.1)
        before = len(flow.callers)
        big = await b.arrive(900, 50)
        with trio.fail_after(policy.OVERTAKINGS_BEFORE_HOLD + 2.5 + 1):
            await big.decided.wait()
        assert big.state == "served"
        later = flow.callers[before:]
        assert sum(c.served_at is not None for c in later) == policy.OVERTAKINGS_BEFORE_HOLD
        # And the flow goes on behind it.
        held_up = next(c for c in later if c.state == "undecided")
        await big.finish()
        await wait_all_tasks_blocked()
        assert held_up.state == "served"


async def test_thirty_seconds_of_waiting_entitle_to_the_next_capacity_without_overtakings(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only", slots=8, max_ctx=1000, pool=1000), queue_limit=64) as b:
        SmallFlow(b, every=5.0, lasting=12.0)
        await trio.sleep(15.1)
        arrived = trio.current_time()
        big = await b.arrive(900, 50)
        await big.decided.wait()
        assert big.served_at is not None
        assert 30.0 <= big.served_at - arrived <= 30.0 + 12.0 + RETRY_INTERVAL


async def test_the_oldest_holds_the_first_model_it_fits_and_others_go_to_the_next(
    autojump_clock: MockClock,
) -> None:
    first = HandModel("first", slots=4, max_ctx=100, pool=100)
    second = HandModel("second", slots=4, max_ctx=100, pool=100)
    async with bench(first, second) as b:
        staying, leaving = await b.arrive(50, 10), await b.arrive(30, 10)
        assert (await b.arrive(60, 10)).model == "second"
        big = await b.arrive(80, 10)
        await trio.sleep(policy.SECONDS_BEFORE_HOLD)
        await leaving.finish()
        assert first.free == (3, 40)
        assert (await b.arrive(10, 10)).model == "second"
        await staying.finish()
        await big.decided.wait()
        assert big.model == "first"


async def test_a_holder_takes_another_model_that_frees_first_and_the_hold_ends(
    autojump_clock: MockClock,
) -> None:
    first = HandModel("first", slots=4, max_ctx=100, pool=100)
    async with bench(first, HandModel("second", max_ctx=100)) as b:
        staying = await b.arrive(50, 10)
        on_second = await b.arrive(60, 10)
        assert (staying.model, on_second.model) == ("first", "second")
        big = await b.arrive(80, 10)
        await trio.sleep(policy.SECONDS_BEFORE_HOLD)
        small = await b.arrive(10, 10)
        assert (first.free, small.state) == ((3, 40), "undecided")
        await on_second.finish()
        await wait_all_tasks_blocked()
        assert (big.model, small.model) == ("second", "first")


async def test_what_frees_on_a_held_model_accrues_to_its_holder(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only", slots=4, max_ctx=100, pool=100)) as b:
        halves = [await b.arrive(40, 10), await b.arrive(40, 10)]
        big = await b.arrive(85, 10)
        await trio.sleep(policy.SECONDS_BEFORE_HOLD)
        small = await b.arrive(10, 10)
        await halves[0].finish()
        await trio.sleep(1)
        assert (big.state, small.state) == ("undecided", "undecided")
        await halves[1].finish()
        await wait_all_tasks_blocked()
        assert (big.state, small.state) == ("served", "undecided")


# ---------------------------------------------------------------------------------- preparation


async def test_no_more_than_the_limit_is_prepared_at_a_time_and_the_rest_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only", slots=8), queue_limit=0, prepare_limit=2) as b:
        gate = b.preparer.hold("only")
        callers = [await b.arrive() for _ in range(6)]
        assert b.preparer.running == 2
        assert (b.waiting, b.router.statistics().preparing) == (0, 6)
        gate.set()
        await wait_all_tasks_blocked()
        assert b.preparer.most_running == 2
        assert {caller.state for caller in callers} == {"served"}


async def test_a_request_in_line_for_preparation_is_gone_with_its_client(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only", slots=8)
    async with bench(only, prepare_limit=1) as b:
        gate = b.preparer.hold("only")
        prepared, in_line = await b.arrive(), await b.arrive()
        await in_line.hang_up()
        assert b.router.statistics().preparing == 1
        gate.set()
        await prepared.decided.wait()
        assert only.times_prepared == 1


async def test_the_time_of_arrival_counts_from_the_end_of_preparation(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only"), queue_limit=1) as b:
        holder = await b.arrive()
        gate = b.preparer.hold("only")
        slow = await b.arrive()
        assert b.waiting == 0
        gate.set()
        await wait_all_tasks_blocked()
        assert b.waiting == 1
        await holder.finish()
        await slow.decided.wait()


# ---------------------------------------------------------------------------------- held bodies


async def test_bodies_are_held_up_to_the_limit_and_one_byte_more_is_refused(
    autojump_clock: MockClock,
) -> None:
    router = new_router([HandModel("only")])
    async with RequestScope(router) as first, RequestScope(router) as second:
        first.hold_body(MAX_HELD_BODY_BYTES - 10)
        with pytest.raises(PreparationFull):
            second.hold_body(11)
        # The refused one counts nothing.
        second.hold_body(10)
    check_counters_zero(router)


async def test_a_body_is_let_go_with_the_reservation_not_with_the_scope(
    autojump_clock: MockClock,
) -> None:
    router = new_router([HandModel("only")])
    async with RequestScope(router) as scope:
        scope.hold_body(60)
        scope.hold_body(40)
        assert router._held_body_bytes == 100
        await scope.reserve(ask())
        assert router._held_body_bytes == 0
    check_counters_zero(router)


async def test_a_body_that_never_became_a_request_is_let_go_with_its_scope(
    autojump_clock: MockClock,
) -> None:
    router = new_router([HandModel("only")])
    async with RequestScope(router) as scope:
        scope.hold_body(100)
    check_counters_zero(router)


@pytest.mark.parametrize(
    "request_",
    [ask(2000), ask(n=9), ask(body_bytes=10**6)],
    ids=["too long", "n", "body too large"],
)
async def test_a_refused_requests_body_is_let_go(
    request_: GenerationRequest, autojump_clock: MockClock
) -> None:
    router = new_router([HandModel("only")])
    async with RequestScope(router) as scope:
        scope.hold_body(100)
        with pytest.raises((PromptTooLong, InvalidRequest)):
            await scope.reserve(request_)
        assert router._held_body_bytes == 0


# ------------------------------------------------------------------------------------- draining


async def test_waiters_and_newcomers_get_draining_at_once(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only")) as b:
        holder = await b.arrive()
        waiters = [await b.arrive() for _ in range(3)]
        start = trio.current_time()
        await b.router.drain()
        await wait_all_tasks_blocked()
        newcomer = await b.arrive()
        for caller in (*waiters, newcomer):
            assert isinstance(caller.error, Draining)
        assert trio.current_time() == start
        assert b.router.statistics().draining
        # Who is served stays.
        assert holder.state == "served"
        await holder.finish()


async def test_a_request_in_preparation_gets_draining_although_there_is_capacity(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only")) as b:
        gate = b.preparer.hold("only")
        caller = await b.arrive()
        await b.router.drain()
        gate.set()
        await caller.decided.wait()
        assert isinstance(caller.error, Draining)


async def test_a_later_models_refusal_does_not_slip_a_request_past_the_draining(
    autojump_clock: MockClock,
) -> None:
    refusing = HandModel("refusing", template=REFUSING_TEMPLATE)
    async with bench(HandModel("primary"), refusing) as b:
        holder = await b.arrive()
        gate = b.preparer.hold("refusing")
        caller = await b.arrive()
        await b.router.drain()
        await holder.finish()
        gate.set()
        await caller.decided.wait()
        assert isinstance(caller.error, Draining)


async def test_a_waiter_that_could_be_served_is_not_once_it_drains(
    autojump_clock: MockClock,
) -> None:
    only = HandModel("only")
    async with bench(only) as b:
        hold = only.ledger.try_reserve(10, 10)
        assert hold is not None
        waiter = await b.arrive()
        only.ledger.release(hold)
        await b.router.drain()
        await waiter.decided.wait()
        assert isinstance(waiter.error, Draining)


async def test_wait_draining_returns_with_the_drain(autojump_clock: MockClock) -> None:
    async with bench(HandModel("only")) as b, trio.open_nursery() as nursery:
        nursery.start_soon(b.router.wait_draining)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        await b.router.drain()


async def test_a_full_queue_that_is_about_to_move_refuses_nobody(autojump_clock: MockClock) -> None:
    only = HandModel("only", slots=2)
    async with bench(only, queue_limit=1) as b:
        holders = [await b.arrive(), await b.arrive()]
        waiter = await b.arrive()
        # Two places come free at once, and a newcomer arrives before the waiter has run.
        async with trio.open_nursery() as nursery:
            for holder in holders:
                nursery.start_soon(holder.finish)
            newcomer = b.start(ask())
        await newcomer.decided.wait()
        await waiter.decided.wait()
        assert (waiter.state, newcomer.state) == ("served", "served")


async def test_a_drain_tells_those_in_line_for_preparation_at_once(
    autojump_clock: MockClock,
) -> None:
    async with bench(HandModel("only", slots=4), prepare_limit=1) as b:
        gate = b.preparer.hold("only")
        inside = b.start(ask())
        await wait_all_tasks_blocked()
        in_line = b.start(ask())
        await wait_all_tasks_blocked()
        await b.router.drain()
        await in_line.decided.wait()
        assert in_line.state == "refused"
        assert inside.state == "undecided"
        gate.set()
        await inside.decided.wait()
        assert inside.state == "refused"
