"""A router with models whose engines are driven by hand, and clients to crowd them.

Everything of the product is real but two things: the worker thread behind an engine client, and
the threads that prepare prompts. Both have stand-ins without a thread, so that tests can run on a
mock clock; ``test_request_scope`` and ``test_router`` run some of the same promises with the real
ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NoReturn

import trio
import trio.testing

from dflash_trio.config import SigtermPolicy
from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.client import EngineClient, Generation
from dflash_trio.engine.model_runner import ModelInfo
from dflash_trio.engine.scripted_runner import VOCAB_SIZE, ScriptedVocabulary
from dflash_trio.engine.worker import LoadedModel, Outgoing, Ready
from dflash_trio.generation.errors import GenerationError
from dflash_trio.generation.events import Finished, Retired, Usage
from dflash_trio.generation.request import GenerationRequest, PreparedPrompt
from dflash_trio.generation.status import EngineStatistics
from dflash_trio.routing.request_scope import RequestScope
from dflash_trio.routing.reservation import Reservation
from dflash_trio.routing.router import Router
from dflash_trio.routing.served_model import ServedModel
from tests.support.scripted import PLAIN_TEMPLATE, scripted_config

REFUSING_TEMPLATE = "{{ raise_exception('no system turns here') }}"
TEMPLATE_TOKENS = 3
"""What BOS and the plain template add to a single message's bytes."""


class HandEngine:
    """Stands where an engine client expects its worker. Notes what it is told."""

    def __init__(self, *, retires_cancelled: bool) -> None:
        self.retires_cancelled = retires_cancelled
        self.deliver: Callable[[Outgoing], None] = lambda _: None
        self.submitted: dict[int, Hold] = {}
        """Not retired yet."""
        self.cancelled: list[int] = []
        self.finalized = 0
        self.stopped = False
        self.statistics = EngineStatistics()

    def submit(self, generation_id: int, prepared: PreparedPrompt, hold: Hold) -> None:
        self.submitted[generation_id] = hold

    def cancel(self, generation_id: int) -> None:
        self.cancelled.append(generation_id)
        if self.retires_cancelled:
            # Later, as a thread would.
            token = trio.lowlevel.current_trio_token()
            token.run_sync_soon(self.retire, generation_id)

    def finalize_all(self) -> None:
        self.finalized += 1

    def stop(self) -> None:
        self.stopped = True

    def retire(self, generation_id: int) -> None:
        """The engine ends a sequence and lets go of it. Once: later calls do nothing."""
        if self.submitted.pop(generation_id, None) is not None:
            self.deliver(
                [
                    (generation_id, Finished("stop", Usage(1, 1))),
                    (generation_id, Retired()),
                ]
            )

    def retire_all(self) -> None:
        for generation_id in list(self.submitted):
            self.retire(generation_id)


def never_loaded(*_: object) -> LoadedModel:
    raise AssertionError("this engine is driven by hand")


class HandModel(ServedModel):
    """A served model with a hand-driven engine and room for ``pool`` cells."""

    def __init__(
        self,
        name: str,
        *,
        slots: int = 1,
        max_ctx: int = 1000,
        pool: int | None = None,
        headroom: int = 100,
        template: str = PLAIN_TEMPLATE,
        on_sigterm: SigtermPolicy | None = None,
        retires_cancelled: bool = True,
    ) -> None:
        cells = slots * max_ctx if pool is None else pool
        info = ModelInfo("scripted", "scripted", max_ctx, VOCAB_SIZE, template, "cpu:0", 1, 0)
        vocabulary = ScriptedVocabulary()
        ledger = KVLedger(slots=slots, pool=cells, max_ctx=max_ctx, decode_headroom=headroom)
        self.engine = HandEngine(retires_cancelled=retires_cancelled)
        client = EngineClient(name, never_loaded)
        client._handle(Ready(info, vocabulary, ledger, ()))
        client._worker = self.engine  # type: ignore[assignment]
        self.engine.deliver = client._dispatch
        self.scripted_vocabulary = vocabulary
        self.times_prepared = 0
        super().__init__(
            scripted_config(name, max_concurrency=slots, on_sigterm=on_sigterm),
            client,
            info=info,
            vocabulary=vocabulary,
            ledger=ledger,
        )

    def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        self.times_prepared += 1
        return super().prepare(request)

    def stall(self) -> None:
        self.client.mark_unhealthy("it has stalled", may_recover=True)

    def come_back(self) -> None:
        """Its stalled step has returned."""
        self.client._recover()

    @property
    def free(self) -> tuple[int, int]:
        """Slots and cells that nobody has now."""
        statistics = self.ledger.statistics()
        return (
            statistics.slots - statistics.slots_reserved,
            statistics.pool - statistics.committed,
        )


class Preparer:
    """``trio.to_thread.run_sync`` without threads: the same checkpoints, limiter and shield."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self._gates: dict[str, trio.Event] = {}

    def hold(self, model: str) -> trio.Event:
        """Let preparations for a model begin, but end only when the returned event is set."""
        self._gates[model] = trio.Event()
        return self._gates[model]

    def let_go(self) -> None:
        for gate in self._gates.values():
            gate.set()

    async def __call__(
        self,
        function: Callable[[GenerationRequest], PreparedPrompt],
        request: GenerationRequest,
        /,
        *,
        limiter: trio.CapacityLimiter,
    ) -> PreparedPrompt:
        await trio.lowlevel.checkpoint_if_cancelled()
        model: Any = getattr(function, "__self__", None)
        async with limiter:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            try:
                # Not to be interrupted, like a thread.
                with trio.CancelScope(shield=True):
                    if model.name in self._gates:
                        await self._gates[model.name].wait()
                    else:
                        await trio.lowlevel.checkpoint()
                return function(request)
            finally:
                self.running -= 1


def ask(
    prompt: int = 10, max_tokens: int = 10, *, n: int = 1, body_bytes: int = 100
) -> GenerationRequest:
    """A request of so many prompt tokens on a plain model."""
    content = "x" * (prompt - TEMPLATE_TOKENS)
    return GenerationRequest(
        messages=({"role": "user", "content": content},),
        body_bytes=body_bytes,
        max_tokens=max_tokens,
        n=n,
    )


State = Literal["undecided", "served", "refused", "gone"]


class Caller:
    """A client: reserves in a scope of its own and stays until its answer is done or it leaves."""

    def __init__(self, router: Router, request: GenerationRequest) -> None:
        self.router = router
        self.request = request
        self.state: State = "undecided"
        self.reservation: Reservation | None = None
        self.generation: Generation | None = None
        self.error: GenerationError | None = None
        self.served_at: float | None = None
        self.decided = trio.Event()
        """Served or refused."""
        self.gone = trio.Event()
        self.connection = trio.CancelScope()
        self._done = trio.Event()

    async def run(self) -> None:
        try:
            with self.connection:
                async with RequestScope(self.router) as scope:
                    await self.use(scope)
        finally:
            if self.state != "refused":
                self.state = "gone"
            self.gone.set()

    async def use(self, scope: RequestScope) -> None:
        """Everything between the opening and the closing of its scope."""
        scope.hold_body(self.request.body_bytes)
        try:
            self.reservation = await scope.reserve(self.request)
            self.served_at = trio.current_time()
            self.generation = scope.submit()
        except GenerationError as error:
            self.error = error
            self.state = "refused"
            self.decided.set()
            return
        self.state = "served"
        self.decided.set()
        await self._done.wait()

    @property
    def model(self) -> str:
        """The name of the model that serves it."""
        assert self.reservation is not None, f"{self.state}: {self.error!r}"
        return self.reservation.model.name

    async def finish(self) -> None:
        """The engine ends the answer, the client has read it; returns when all is given back."""
        assert self.reservation is not None
        assert self.generation is not None
        model = self.reservation.model
        assert isinstance(model, HandModel)
        model.engine.retire(self.generation.id)
        self._done.set()
        await self.gone.wait()

    async def hang_up(self) -> None:
        """The client goes away, at whatever stage; returns when nothing of it is left."""
        self.connection.cancel()
        await self.gone.wait()


class Bench:
    """One router, its models, its callers."""

    def __init__(self, nursery: trio.Nursery, router: Router, preparer: Preparer) -> None:
        self.nursery = nursery
        self.router = router
        self.preparer = preparer
        self.callers: list[Caller] = []

    def start(self, request: GenerationRequest) -> Caller:
        """A client that has just arrived."""
        caller = Caller(self.router, request)
        self.callers.append(caller)
        self.nursery.start_soon(caller.run)
        return caller

    async def arrive(
        self, prompt: int = 10, max_tokens: int = 10, *, n: int = 1, body_bytes: int = 100
    ) -> Caller:
        """A client, when it is served, refused, waiting or being prepared."""
        caller = self.start(ask(prompt, max_tokens, n=n, body_bytes=body_bytes))
        await trio.testing.wait_all_tasks_blocked()
        return caller

    @property
    def waiting(self) -> int:
        return self.router.statistics().waiting

    def check_counters_zero(self) -> None:
        check_counters_zero(self.router)


def new_router(
    models: Sequence[ServedModel],
    *,
    queue_limit: int = 32,
    prepare_limit: int | None = None,
    preparer: Preparer | None = None,
) -> Router:
    router = Router(
        queue_limit=queue_limit,
        prepare_limit=prepare_limit,
        run_in_thread=preparer or Preparer(),
    )
    router.open(models)
    return router


@asynccontextmanager
async def bench(
    *models: ServedModel, queue_limit: int = 32, prepare_limit: int | None = None
) -> AsyncIterator[Bench]:
    """Everybody leaves at the end, and then nothing may be counted any more."""
    preparer = Preparer()
    router = new_router(
        models, queue_limit=queue_limit, prepare_limit=prepare_limit, preparer=preparer
    )
    # Waiters look again and again: on a mock clock, a test that never ends would spin.
    with trio.fail_after(20_000):
        async with trio.open_nursery() as nursery:
            the_bench = Bench(nursery, router, preparer)
            try:
                yield the_bench
            finally:
                preparer.let_go()
                nursery.cancel_scope.cancel()
    check_counters_zero(router)


def check_counters_zero(router: Router) -> None:
    """Nobody holds, waits for, or prepares anything."""
    statistics = router.statistics()
    assert (statistics.waiting, statistics.preparing) == (0, 0)
    assert router.reservations == set()
    assert router._held_body_bytes == 0
    assert router._prepare_limiter.borrowed_tokens == 0
    for model in router.models:
        ledger = model.ledger.statistics()
        assert (ledger.slots_reserved, ledger.committed) == (0, 0), model.name


class FakeConnections:
    """The listener floor, as a shutdown sees it: a list of what it was told."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def stop_accepting(self) -> None:
        self._told.append("stop accepting")

    def close_idle(self) -> None:
        self._told.append("close idle")

    def abort_connections(self) -> None:
        self._told.append("abort connections")


class ProcessEnded(BaseException):
    """Raised in place of ending the process."""


def exit_now() -> NoReturn:
    raise ProcessEnded
