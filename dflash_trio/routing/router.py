"""Router: finds a model for a request, or a place in the queue, or the reason why neither.

Theory of operation. A request is prepared (rendered and tokenized) for the models in priority
order, until one takes it. Taking is one await-free step: policy is asked, the ledger is charged,
and the request's scope adopts the reservation, so that no cancellation can come between them. When
every model that fits is busy, the request becomes a waiter. Waiters sit on one condition; any
release wakes them all, each tries for itself, and policy lets the oldest who can use a
capacity go first. A retry every 250 ms sees what is not announced: cells that an engine gave
back, a model that became unhealthy.

Nothing but ``wait()`` is ever awaited while the condition's lock is held, so acquiring it is
bounded by the number of tasks in line, and may be shielded.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import define, field

from ..engine.admission import Fit
from ..engine.host_cores import core_quota
from ..generation.errors import (
    Draining,
    InvalidRequest,
    Loading,
    ModelRoom,
    PreparationFull,
    PromptTooLong,
    QueueFull,
    Unhealthy,
)
from ..generation.request import GenerationRequest, PreparedPrompt
from ..generation.status import RouterStatistics
from . import policy
from .policy import Offer
from .reservation import Reservation
from .served_model import ServedModel

log = logging.getLogger("dflash_trio.routing")

# For a thread whose place is held by other means.
_NO_LIMIT = trio.CapacityLimiter(math.inf)

RETRY_INTERVAL = 0.25
"""Seconds after which a waiter looks again although nobody woke it."""
MAX_HELD_BODY_BYTES = 256 * 1024 * 1024

Adopt = Callable[[Reservation], None]


RunInThread = Callable[..., Awaitable[PreparedPrompt]]
"""``trio.to_thread.run_sync``, or what behaves like it: (function, argument, limiter=...)."""


@define(eq=False)
class Waiter:
    """A request that fits some model, all of which are busy."""

    offers: Sequence[Offer]
    """In priority order. More come when models do that were not there at first."""
    waiting_since: float
    """Seconds, trio's clock."""
    overtaken: int = field(default=0, init=False)

    @property
    def candidates(self) -> tuple[Offer, ...]:
        # Not kept: when a model dies meanwhile, one with less headroom may become good enough.
        return policy.choose_candidates(self.offers)


class Router:
    """One server's models, waiters and preparations.

    ``models``: in priority order, the primary first; set when they are loaded.
    ``queue_limit``: how many may wait. ``prepare_limit``: how many are prepared at a time;
    default 2 x usable cores. ``run_in_thread``: where prompts are prepared.
    """

    def __init__(
        self,
        *,
        queue_limit: int,
        prepare_limit: int | None = None,
        run_in_thread: RunInThread = trio.to_thread.run_sync,
    ) -> None:
        self.models: tuple[ServedModel, ...] = ()
        self.reservations: set[Reservation] = set()
        """Everybody who holds capacity now."""
        self._queue_limit = queue_limit
        self._condition = trio.Condition()
        # Oldest first. Its length is the number that counts against the limit: lowered in a
        # synchronous `finally`, whatever ends the wait.
        self._waiters: list[Waiter] = []
        self._preparing = 0
        self._held_body_bytes = 0
        self._draining = trio.Event()
        self._prepare_limiter = trio.CapacityLimiter(prepare_limit or 2 * usable_cores())
        # Those who wait for a place there, so that a drain can tell them at once.
        self._in_line: set[trio.CancelScope] = set()
        self._run_in_thread = run_in_thread

    # -------------------------------------------------------------------------- lifecycle

    def open(self, models: Sequence[ServedModel]) -> None:
        """Begin to route, to loaded models in priority order."""
        self.models = tuple(models)

    async def drain(self) -> None:
        """Route nothing new; who waits, for capacity or for preparation, gets Draining."""
        self._draining.set()
        for line in self._in_line:
            line.cancel()
        await self._wake_waiters()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    async def wait_draining(self) -> None:
        """Return once :meth:`drain` has been called."""
        await self._draining.wait()

    def check_open(self) -> None:
        """Raise Draining or Loading when no request can be taken."""
        if self._draining.is_set():
            raise Draining
        if not self.models:
            raise Loading

    # ------------------------------------------------------------------------- reserving

    def check_body_size(self, body_bytes: int) -> None:
        """Raise PromptTooLong for a body that cannot fit any model, before looking into it."""
        limit = policy.largest_body(self.models)
        if body_bytes > limit:
            rooms = [ModelRoom(m.name, None, m.ledger.room) for m in self.models]
            raise PromptTooLong(rooms, body=(body_bytes, limit))

    def hold_body(self, body_bytes: int) -> None:
        """Count a body that is kept in memory. Raises PreparationFull, and then counts nothing."""
        if self._held_body_bytes + body_bytes > MAX_HELD_BODY_BYTES:
            raise PreparationFull(MAX_HELD_BODY_BYTES)
        self._held_body_bytes += body_bytes

    def drop_body(self, body_bytes: int) -> None:
        """Undo :meth:`hold_body`."""
        self._held_body_bytes -= body_bytes

    async def reserve(
        self, request: GenerationRequest, adopt: Adopt, on_wait: Callable[[], None] | None = None
    ) -> Reservation:
        """Hold capacity for a request on the first model that has it; wait if none has.

        ``adopt`` is called with the reservation in the same await-free step that makes it: from
        then on its owner must release it, whatever happens to this call. Cancelled while
        waiting, the request counts no more at once. ``on_wait`` is called when it becomes a waiter.

        Raises InvalidRequest, PromptTooLong, QueueFull, Unhealthy, Loading, Draining.
        """
        self.check_open()
        self.check_body_size(request.body_bytes)
        slots = max(model.ledger.slots for model in self.models)
        if request.n > slots:
            raise InvalidRequest(
                f"n is {request.n}, but the largest model here generates {slots} at a time.",
                param="n",
            )
        offers: list[Offer] = []
        passed_over: list[ServedModel] = []
        for model in self.models:
            offer = await self._ask(model, request, offers) if model.healthy else None
            if offer is None:
                # Asked later if it is there then. With no await in between, this tells why.
                passed_over += [] if model.healthy else [model]
                continue
            offers.append(offer)
            # Earlier models too: one may have become free while this one prepared the prompt.
            full = [offer for offer in offers if offer.fit is Fit.FULL]
            reservation = self._take(full, offers, None, adopt)
            if reservation is not None:
                return reservation
        await self._ask_who_came_back(request, offers, passed_over)
        candidates = policy.choose_candidates(offers)
        if not candidates:
            raise self._fits_nowhere(offers)
        reservation = self._take(candidates, offers, None, adopt)
        if reservation is not None:
            return reservation
        return await self._wait(request, offers, passed_over, adopt, on_wait)

    async def _ask_who_came_back(
        self, request: GenerationRequest, offers: list[Offer], passed_over: list[ServedModel]
    ) -> None:
        """Ask those of the ``passed_over`` that are healthy now, and put what they offer among the
        others. With no await behind the last look: who is left is not there."""
        while there := [model for model in passed_over if model.healthy]:
            model = there[0]
            offer = await self._ask(model, request, offers)
            if offer is None and not model.healthy:
                continue  # gone again
            passed_over.remove(model)
            if offer is not None:
                offers.append(offer)
                offers.sort(key=lambda offer: self.models.index(offer.model))

    async def _ask(
        self, model: ServedModel, request: GenerationRequest, earlier: Sequence[Offer]
    ) -> Offer | None:
        """A model's reading of the request, or ``None`` when the request goes on without it."""
        refusal: InvalidRequest | None = None
        try:
            prepared = await self._prepare(model, request)
        except InvalidRequest as error:
            refusal = error
        self.check_open()
        if not model.healthy:
            # It went away meanwhile, which may be all that it refused the request for.
            return None
        if refusal is None:
            return Offer(model, prepared, model.ledger.fit(*_demand(prepared)))
        if not policy.choose_candidates(earlier):
            raise refusal
        log.info("%s cannot serve a request that an earlier model may: %s", model.name, refusal)
        return None

    async def _prepare(self, model: ServedModel, request: GenerationRequest) -> PreparedPrompt:
        place = object()
        self._preparing += 1
        try:
            with trio.CancelScope() as line:
                self._in_line.add(line)
                try:
                    await self._prepare_limiter.acquire_on_behalf_of(place)
                finally:
                    self._in_line.discard(line)
            if line.cancelled_caught:
                raise Draining
            try:
                # Not abandoned when cancelled: the thread reads the model's vocabulary, which
                # must outlive it. Bounded by the template's and the tokenizer's own bounds.
                return await self._run_in_thread(model.prepare, request, limiter=_NO_LIMIT)
            finally:
                self._prepare_limiter.release_on_behalf_of(place)
        finally:
            self._preparing -= 1

    async def _wait(
        self,
        request: GenerationRequest,
        offers: list[Offer],
        passed_over: list[ServedModel],
        adopt: Adopt,
        on_wait: Callable[[], None] | None,
    ) -> Reservation:
        while len(self._waiters) >= self._queue_limit:
            if not self._somebody_may_go():
                raise QueueFull(self._queue_limit)
            # A place is as good as free: its waiter has capacity, and has only not run yet. It
            # does when it is woken, so this ends after a turn or two.
            await self._wake_waiters()
            self.check_open()
            reservation = self._take(policy.choose_candidates(offers), offers, None, adopt)
            if reservation is not None:
                return reservation
        # Checked and counted with no await between: a burst cannot slip past the limit.
        waiter = Waiter(offers, trio.current_time())
        self._waiters.append(waiter)
        try:
            if on_wait is not None:
                on_wait()
            while True:
                async with self._condition:
                    while not any(model.healthy for model in passed_over):
                        self.check_open()
                        candidates = waiter.candidates
                        if not candidates:
                            raise self._fits_nowhere(offers)
                        reservation = self._take(candidates, offers, waiter, adopt)
                        if reservation is not None:
                            return reservation
                        with trio.move_on_after(RETRY_INTERVAL):
                            await self._condition.wait()
                # Without the lock, as this takes a while; its place it keeps.
                await self._ask_who_came_back(request, offers, passed_over)
        finally:
            # With no await since the reservation was taken. Younger waiters that had to let this
            # one go first may be next, also when it was cancelled before the lock was its own.
            self._waiters.remove(waiter)
            await self._wake_waiters()

    def _take(
        self,
        candidates: Sequence[Offer],
        offers: Sequence[Offer],
        waiter: Waiter | None,
        adopt: Adopt,
    ) -> Reservation | None:
        """Try the candidates, who are some of the offers, in order. Await-free: decision, charge
        and adoption are one step."""
        now = trio.current_time()
        for offer in candidates:
            model = offer.model
            # Capacity first: a busy model costs each of many waiters one look, not one at
            # everybody before it.
            if not offer.has_capacity or not policy.may_take(
                offer, claimant=waiter, waiters=self._waiters, now=now
            ):
                continue
            hold = model.ledger.try_reserve(*offer.demand)
            if hold is None:
                continue
            reservation = Reservation(
                model,
                offer.prepared,
                hold,
                self.reservations.discard,
                self._wake_waiters,
                waited=now - waiter.waiting_since if waiter is not None else 0.0,
                fallback=policy.fallback_reason(model, self.models[0], offers),
            )
            self.reservations.add(reservation)
            adopt(reservation)
            for older in policy.overtaken_by(model, claimant=waiter, waiters=self._waiters):
                assert isinstance(older, Waiter)
                older.overtaken += 1
            return reservation
        return None

    def _somebody_may_go(self) -> bool:
        """Whether some waiter could take capacity now, and just has not run yet."""
        now = trio.current_time()
        return any(
            offer.has_capacity
            and policy.may_take(offer, claimant=waiter, waiters=self._waiters, now=now)
            for waiter in self._waiters
            for offer in waiter.candidates
        )

    def _fits_nowhere(self, offers: Sequence[Offer]) -> Exception:
        unhealthy = [model.name for model in self.models if not model.healthy]
        if unhealthy:
            # It may well have fitted one of these: never a 400 for that.
            return Unhealthy(unhealthy)
        return PromptTooLong(
            [
                ModelRoom(offer.model.name, offer.prepared.prompt_tokens, offer.model.ledger.room)
                for offer in offers
            ]
        )

    async def _wake_waiters(self) -> None:
        # Shielded, and bounded: under the lock nobody awaits anything but wait().
        with trio.CancelScope(shield=True):
            async with self._condition:
                self._condition.notify_all()

    # ------------------------------------------------------------------------ inspection

    def statistics(self) -> RouterStatistics:
        return RouterStatistics(
            waiting=len(self._waiters),
            waiting_limit=self._queue_limit,
            preparing=self._preparing,
            draining=self._draining.is_set(),
        )


def _demand(prepared: PreparedPrompt) -> tuple[int, int, int]:
    return (prepared.prompt_tokens, prepared.max_tokens, prepared.n)


def usable_cores() -> int:
    """Cores this process may run on, as far as its control group grants their time."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinities
        cores = os.cpu_count() or 1
    return min(cores, core_quota() or cores)
