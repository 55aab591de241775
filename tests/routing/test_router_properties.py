"""Whatever comes in whatever order, the router keeps its promises after every single step.

Hypothesis chooses the steps. The router lives in a ``trio.run`` of its own on a mock clock that
only the steps move; every step is carried out in there and returns when all tasks are blocked, so
the other thread adds no nondeterminism.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from dflash_trio.generation.errors import (
    Draining,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    Unhealthy,
)
from dflash_trio.routing.policy import Offer
from dflash_trio.routing.reservation import Reservation
from dflash_trio.routing.router import Router, Waiter
from tests.support.http_client import PATIENCE

from .bench import Bench, Caller, HandModel, Preparer, ask, check_counters_zero

T = TypeVar("T")

A_RETRY = 0.26
QUEUE_LIMIT = 4


class Loop:
    """A trio run in another thread that does one thing at a time and then stands still."""

    def __init__(self) -> None:
        self.clock = MockClock()
        self._started: queue.SimpleQueue[trio.lowlevel.TrioToken] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._token = self._started.get(timeout=PATIENCE)

    def _run(self) -> None:
        trio.run(self._main, clock=self.clock)

    async def _main(self) -> None:
        self._end = trio.Event()
        async with trio.open_nursery() as self.nursery:
            self._started.put(trio.lowlevel.current_trio_token())
            await self._end.wait()
            self.nursery.cancel_scope.cancel()

    def do(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run ``step``, and then everybody until nobody can go on."""

        async def stepping() -> T:
            result = await step()
            await wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(stepping, trio_token=self._token)

    def close(self) -> None:
        trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join(PATIENCE)


class WatchedRouter(Router):
    """Checks every single grant against the state right before it."""

    def _take(
        self,
        candidates: object,
        offers: Sequence[Offer],
        waiter: Waiter | None,
        adopt: Callable[[Reservation], None],
    ) -> Reservation | None:
        assert isinstance(candidates, tuple | list)
        free = {model: model.free for model in self.models if isinstance(model, HandModel)}
        now = trio.current_time()
        older = self._waiters[: self._waiters.index(waiter)] if waiter else list(self._waiters)
        oldest = self._waiters[0] if self._waiters else None
        reservation = super()._take(candidates, offers, waiter, adopt)
        passed_by = candidates
        if reservation is not None:
            models = [offer.model for offer in candidates]
            passed_by = candidates[: models.index(reservation.model)]
            assert reservation.model.healthy
            assert not self.draining
            for elder in older:
                assert not could_use(elder, reservation.model, free), "overtook a waiter"
            if oldest is not None and oldest is not waiter:
                assert held_by(oldest, now) is not reservation.model, "took a held model"
        for offer in passed_by:
            # In the order of priority: whatever was passed by was not to be had.
            model = offer.model
            assert (
                not model.healthy
                or not enough(offer, free[model])
                or any(could_use(elder, model, free) for elder in older)
                or (oldest is not waiter and oldest is not None and held_by(oldest, now) is model)
            ), f"passed by {model.name}"
        return reservation


def enough(offer: Offer, free: tuple[int, int]) -> bool:
    """Said again in other words than the product's: slots and cells for all of the request."""
    statistics = offer.model.ledger.statistics()
    prompt, n = offer.prepared.prompt_tokens, offer.prepared.n
    each = min(
        offer.prepared.max_tokens,
        offer.model.ledger.decode_headroom,
        offer.model.ledger.max_ctx - prompt,
        (statistics.pool - prompt) // n,
    )
    return each > 0 and free[0] >= n and free[1] >= prompt + n * each


def could_use(waiter: Waiter, model: object, free: dict[HandModel, tuple[int, int]]) -> bool:
    return any(
        offer.model is model and offer.model.healthy and enough(offer, free[offer.model])  # type: ignore[index]
        for offer in waiter.candidates
    )


def held_by(waiter: Waiter, now: float) -> object:
    """Written with the promised numbers, not with the product's constants."""
    if waiter.overtaken < 16 and now - waiter.waiting_since < 30:
        return None
    return next((offer.model for offer in waiter.candidates if offer.model.healthy), None)


class Routing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.callers: list[Caller] = []
        self.dead = 0
        self.stolen: list[tuple[HandModel, object]] = []

    # ------------------------------------------------------------------------------- the steps

    @initialize(
        sizes=st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from([40, 100, 200]), st.integers(50, 100)),
            min_size=2,
            max_size=3,
        )
    )
    def load(self, sizes: list[tuple[int, int, int]]) -> None:
        self.models = [
            HandModel(
                f"m{index}",
                slots=slots,
                max_ctx=max_ctx,
                pool=max(max_ctx // 2, slots * max_ctx * percent // 100),
                headroom=20,
                retires_cancelled=False,
            )
            for index, (slots, max_ctx, percent) in enumerate(sizes)
        ]
        preparer = Preparer()

        async def step() -> None:
            self.router = WatchedRouter(
                queue_limit=QUEUE_LIMIT, prepare_limit=2, run_in_thread=preparer
            )
            self.router.open(self.models)
            self.bench = Bench(self.loop.nursery, self.router, preparer)

        self.loop.do(step)

    @rule(
        prompt=st.one_of(st.integers(3, 30), st.integers(30, 210)),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        count=st.sampled_from([1, 1, 2, 7]),
    )
    def arrive(self, prompt: int, max_tokens: int, n: int, count: int) -> None:
        async def step() -> None:
            self.callers += [self.bench.start(ask(prompt, max_tokens, n=n)) for _ in range(count)]

        self.loop.do(step)

    def of_state(self, state: str) -> list[Caller]:
        return [caller for caller in self.callers if caller.state == state]

    @precondition(lambda self: self.of_state("served"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(self.of_state("served")))
        self.loop.do(caller.finish)

    @precondition(lambda self: self.of_state("served") or self.of_state("undecided"))
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        alive = self.of_state("served") + self.of_state("undecided")
        caller = data.draw(st.sampled_from(alive))

        async def step() -> None:
            caller.connection.cancel()

        self.loop.do(step)

    async def retire_the_cancelled(self) -> None:
        for model in self.models:
            for generation_id in model.engine.cancelled:
                model.engine.retire(generation_id)
            model.engine.cancelled.clear()
        await wait_all_tasks_blocked()

    @rule()
    def engines_work(self) -> None:
        self.loop.do(self.retire_the_cancelled)

    @rule(seconds=st.sampled_from([0.1, A_RETRY, 31.0]))
    def time_passes(self, seconds: float) -> None:
        async def step() -> None:
            # Engines are never so slow here that they would count as stuck.
            await self.retire_the_cancelled()
            self.loop.clock.jump(seconds)

        self.loop.do(step)

    @rule(data=st.data(), cells=st.integers(1, 50))
    def the_pool_shrinks_unannounced(self, data: st.DataObject, cells: int) -> None:
        model = data.draw(st.sampled_from(self.models))

        async def step() -> None:
            hold = model.ledger.try_reserve(cells, 1)
            if hold is not None:
                self.stolen.append((model, hold))

        self.loop.do(step)

    @precondition(lambda self: self.stolen)
    @rule()
    def the_pool_grows_unannounced(self) -> None:
        model, hold = self.stolen.pop()

        async def step() -> None:
            model.ledger.release(hold)  # type: ignore[arg-type]
            await wait_all_tasks_blocked()
            self.loop.clock.jump(A_RETRY)

        self.loop.do(step)

    @precondition(lambda self: self.dead == 0)
    @rule(data=st.data(), rarely=st.integers(0, 7))
    def a_model_dies(self, data: st.DataObject, rarely: int) -> None:
        model = data.draw(st.sampled_from(self.models))
        if rarely:
            return
        self.dead += 1

        async def step() -> None:
            model.client.mark_unhealthy("test")
            self.loop.clock.jump(A_RETRY)

        self.loop.do(step)

    @rule(rarely=st.integers(0, 15))
    def drain(self, rarely: int) -> None:
        if rarely == 0:
            self.loop.do(self.router.drain)

    # -------------------------------------------------------------------------- what must hold

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        for model in self.models:
            statistics = model.ledger.statistics()
            assert 0 <= statistics.slots_reserved <= statistics.slots
            assert 0 <= statistics.committed <= statistics.pool

    @invariant()
    def no_more_than_the_limit_wait(self) -> None:
        assert self.router.statistics().waiting <= QUEUE_LIMIT
        assert self.router.statistics().waiting == len(self.of_state("undecided"))

    @invariant()
    def every_reservation_has_an_owner(self) -> None:
        owned = {
            caller.reservation
            for caller in self.callers
            if caller.reservation is not None and not caller.reservation.released
        }
        assert self.router.reservations == owned
        for model in self.models:
            holds = sum(r.hold.slots for r in owned if r.model is model)
            stolen = sum(hold.slots for m, hold in self.stolen if m is model)  # type: ignore[attr-defined]
            assert model.ledger.statistics().slots_reserved == holds + stolen

    @invariant()
    def nobody_waits_for_what_is_free_and_not_held(self) -> None:
        waiters = self.router._waiters
        now = self.loop.clock.current_time()
        free = {model: model.free for model in self.models}
        held = held_by(waiters[0], now) if waiters else None
        for waiter in waiters:
            for model in self.models:
                if held is model and waiter is not waiters[0]:
                    continue
                assert not could_use(waiter, model, free), "left waiting beside free capacity"

    @invariant()
    def once_it_drains_nobody_waits(self) -> None:
        if self.router.draining:
            assert self.router.statistics().waiting == 0

    @invariant()
    def refusals_have_a_true_reason(self) -> None:
        for caller in self.of_state("refused"):
            error = caller.error
            most = max(model.ledger.slots for model in self.models)
            assert isinstance(
                error, QueueFull | PromptTooLong | InvalidRequest | Draining | Unhealthy
            )
            if isinstance(error, InvalidRequest):
                assert caller.request.n > most
            if isinstance(error, Draining):
                assert self.router.draining
            if isinstance(error, Unhealthy):
                assert self.dead
            if isinstance(error, PromptTooLong):
                prompt, n = len(str(caller.request.messages[0]["content"])) + 3, caller.request.n
                for model in self.models:
                    pool = model.ledger.statistics().pool
                    assert (
                        prompt + 1 > model.ledger.max_ctx
                        or prompt + n > pool
                        or n > model.ledger.slots
                    )

    @invariant()
    def each_model_prepares_a_request_once_at_most(self) -> None:
        for model in self.models:
            assert model.times_prepared <= len(self.callers)

    def teardown(self) -> None:
        try:
            if hasattr(self, "models"):
                self.everybody_leaves()
        finally:
            self.loop.close()

    def everybody_leaves(self) -> None:
        async def step() -> None:
            for model, hold in self.stolen:
                model.ledger.release(hold)  # type: ignore[arg-type]
            for caller in self.callers:
                caller.connection.cancel()
            await wait_all_tasks_blocked()
            for model in self.models:
                model.engine.retire_all()

        self.loop.do(step)
        assert all(caller.gone.is_set() for caller in self.callers)
        check_counters_zero(self.router)


Routing.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRouting = Routing.TestCase
