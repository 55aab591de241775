"""EngineClient: the event loop's side of a worker thread. The only trio import on this floor.

Everything that happens on the thread arrives here as data, once per step, through a
``LoopMailbox``; everything the loop wants goes into the worker's inbox. Nothing here
ever waits for an engine step, except the two things that must: ``run`` for the loading, and
``Generation.retired`` for whoever gives capacity back.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from operator import itemgetter

import attrs
import trio
from attrs import define, field

from ..generation.errors import EngineFailed
from ..generation.events import Event, Failed, Finished, Retired, TextDelta
from ..generation.request import PreparedPrompt
from ..generation.status import EngineStatistics, EngineTimings
from .admission import Hold
from .direct_text import DirectText
from .health import EngineHealth, Health
from .loop_mailbox import LoopMailbox, MailboxClosed
from .model_runner import ModelLoadError
from .scheduler import Delivery
from .step_clock import StandingStill
from .step_meter import StepMeter
from .worker import Died, Ended, EngineWorker, Load, LoadProgress, LoopGone, Outgoing, Ready

log = logging.getLogger("dflash_trio.engine")

WORKER_STOP_BOUND = 10.0
"""Seconds a worker may take to end after being told to, before it is abandoned."""
STALL_CHECK_INTERVAL = 1.0
"""Seconds between two looks at how long the step under way has taken."""


@define(eq=False)
class Generation:
    """A submitted sequence, as its request sees it. Owned by the request's scope."""

    id: int
    prepared: PreparedPrompt
    events: trio.MemoryReceiveChannel[Event]
    retired: trio.Event = field(factory=trio.Event)
    """Set when the engine holds nothing of it any more: only then may its capacity be shown."""
    settled: trio.Event = field(factory=trio.Event)
    """Set when it is retired, or when its engine has stalled and may never say so. Whoever is to
    give capacity back waits here, and leaves it to ``on_retired`` if it is not retired then."""
    on_retired: Callable[[], object] | None = None
    """Called once, on the event loop, if the retirement comes after all. Must not raise."""
    on_first_token: Callable[[], object] | None = None
    """Called once, on the event loop, with its first text. Must not raise."""
    direct: DirectText = field(factory=DirectText)
    """Armed by a reader that is waiting on ``events``, with nothing in it, for as long as it waits
    and no longer. Disarmed as well as soon as something goes to ``events``."""
    started_decoding: bool = False
    ended: bool = False
    """All its answers finished, or it failed, as far as the engine is concerned."""
    ended_at: float | None = None
    """When, on trio's clock in seconds; ``None``: it has not."""
    endings: list[Finished] = field(factory=list)
    """Of its answers, in the order in which they ended."""
    failed: Failed | None = None
    completion_tokens: int = 0
    """Of its answers that have ended, cancelled ones included."""
    _running: int = field(init=False)
    """Answers that have not finished."""
    _suffices: bool = field(init=False, default=False)
    """What is told already is all that is wanted."""
    _send: trio.MemorySendChannel[Event] = field(kw_only=True)
    _cancel: Callable[[int], None] = field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._running = self.prepared.n

    def cancel(self) -> None:
        """Ask the engine to drop it; ``retired`` tells when it has. Idempotent, never blocks."""
        if not self.ended:
            self._cancel(self.id)

    def suffice(self) -> None:
        """As :meth:`cancel`, of which its client knows nothing: what it has of each answer is all
        that it wants. So they end as if the model had stopped there. From any thread."""
        if not self._suffices:
            self._suffices = True
            self.cancel()

    @property
    def finished(self) -> Finished | None:
        """The ending of the answer that ended last; ``None``: none has."""
        return self.endings[-1] if self.endings else None

    def _end(self) -> None:
        self.ended = True
        self.ended_at = trio.current_time()

    def deliver_all(self, events: Sequence[Event]) -> None:
        """Called by the client for what one step brought, as far as it was not taken directly."""
        for event in events:
            self.deliver(event)
        self.direct.arrived(len(events))

    def deliver(self, event: Event) -> None:
        """Called by the client for each event, in order. After an ending only Retired counts."""
        if self.ended and not isinstance(event, Retired):
            return
        if self._suffices and isinstance(event, Finished) and event.reason == "cancelled":
            event = attrs.evolve(event, reason="stop")
        match event:
            case TextDelta():
                if not self.started_decoding:
                    self.started_decoding = True
                    if self.on_first_token is not None:
                        self.on_first_token()
            case Finished(usage=usage):
                self.endings.append(event)
                self.completion_tokens += usage.completion_tokens
                self._running -= 1
                if not self._running:
                    self._end()
            case Failed():
                self.failed = event
                self._end()
            case Retired():
                self.retired.set()
                self.settled.set()
                if self.on_retired is not None:
                    self.on_retired()
        # From here on there is something to be read first.
        self.direct.disarm()
        # A request that is gone reads no more; only `retired` still matters then.
        with contextlib.suppress(trio.BrokenResourceError):
            self._send.send_nowait(event)


class EngineClient:
    """One model's engine, from the event loop. Run :meth:`run` in the server's outer nursery."""

    def __init__(
        self,
        name: str,
        load: Load,
        *,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.ready: Ready | None = None
        """Set once the model is loaded."""
        self.health = EngineHealth()
        self.abandoned = False
        """The thread did not end when told to."""
        self._load = load
        self._on_progress = on_progress
        self._worker: EngineWorker | None = None
        self._ids = count(1)
        # Submitted and not yet retired.
        self._live: dict[int, Generation] = {}
        # The loading is over: ready, failed or given up.
        self._loaded = trio.Event()
        self._stop_requested = trio.Event()
        self._ended = trio.Event()
        self._load_error: str | None = None

    # --------------------------------------------------------------------------- lifetime

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model, report it as started, serve until :meth:`stop` or cancellation.

        Raises ModelLoadError when it cannot be loaded. Stopped before it is loaded, it returns
        without having started. However this ends, the thread was told to end and had
        WORKER_STOP_BOUND seconds for it; a thread that did not is left behind, with ``abandoned``
        set.
        """
        if self._stop_requested.is_set():
            return
        mailbox = LoopMailbox[Outgoing]()
        # Until the loop ends: a thread that is left behind may still say something.
        trio.lowlevel.spawn_system_task(self._read, mailbox)

        def deliver(message: Outgoing) -> None:
            if isinstance(message, list):
                message = self._hand_over(message)
                if not message:
                    return
            try:
                mailbox.post(message)
            except MailboxClosed:
                raise LoopGone from None

        self._worker = EngineWorker(self.name, self._load, deliver)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_thread, self._worker, deliver)
            nursery.start_soon(self._watch, self._worker)
            try:
                await self._loaded.wait()
                if self.ready is not None:
                    task_status.started(self.ready)
                if self._load_error is None:
                    await self._stop_requested.wait()
            finally:
                self.stop()
                # Shielded for WORKER_STOP_BOUND at most: device memory is freed by the thread.
                with trio.move_on_after(WORKER_STOP_BOUND, shield=True) as scope:
                    await self._ended.wait()
                self.abandoned = scope.cancelled_caught
                if self.abandoned:
                    # Nobody will say any more what becomes of these.
                    reason = "the engine did not end in time and was abandoned"
                    self.health.enter(Health.LOST, reason)  # its owner logs it
                    self._give_up(reason)
                nursery.cancel_scope.cancel()  # lets go of a thread that is still there
        if self._load_error is not None:
            raise ModelLoadError(self._load_error)

    async def _run_thread(self, worker: EngineWorker, deliver: Callable[[Outgoing], None]) -> None:
        started = False

        def run() -> None:
            nonlocal started
            started = True
            worker.run()

        try:
            # A limiter of its own: the default one has 40 places for everybody.
            await trio.to_thread.run_sync(
                run,
                limiter=trio.CapacityLimiter(1),
                abandon_on_cancel=True,
                thread_name=f"engine {self.name}",
            )
        finally:
            if not started:
                # Cancelled before there was a thread: nobody else will ever say that it has ended.
                deliver(Ended())

    async def _watch(self, worker: EngineWorker) -> None:
        """Look out for a step that does not end. Runs until cancelled."""
        stood_still = StandingStill()
        looked = trio.current_time()
        while True:
            await trio.sleep(STALL_CHECK_INTERVAL)
            now = trio.current_time()
            stood_still.looked(max(0.0, now - looked - STALL_CHECK_INTERVAL))
            looked = now
            step = worker.clock.stalled(stood_still)
            if step is None or self.unhealthy_reason is not None:
                continue
            reason = f"the engine has stalled: {step} has taken more than {step.limit:.0f} s"
            self.mark_unhealthy(reason, may_recover=True)
            self._give_up(reason)
            for generation_id in self._live:
                # Should the step return after all, its sequences are retired before another.
                worker.cancel(generation_id)

    def _give_up(self, reason: str) -> None:
        """Fail everybody who is in the engine, without saying that they are out of it."""
        for generation in self._live.values():
            generation.deliver(Failed(reason))
            generation.settled.set()

    def stop(self) -> None:
        """End :meth:`run`, or the loading. What still generates is failed. Idempotent."""
        self._stop_requested.set()
        self._loaded.set()
        if self._worker is not None:
            self._worker.stop()

    # ------------------------------------------------------------------------ generations

    @property
    def healthy(self) -> bool:
        return self.health.state is Health.HEALTHY

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it takes no new requests; ``None`` while it is well."""
        return self.health.reason

    def mark_unhealthy(self, reason: str, *, may_recover: bool = False) -> None:
        """Take no new requests from now on. The first reason stays.

        ``may_recover``: until everybody who is in the engine now has been retired after all.
        """
        was_well = self.unhealthy_reason is None
        if self.health.enter(Health.STALLED if may_recover else Health.LOST, reason) and was_well:
            log.error("%s is unhealthy: %s", self.name, reason)

    def _recover(self) -> None:
        if (
            not self._live
            and self.health.state is Health.STALLED
            and self.health.enter(Health.HEALTHY)
        ):
            log.warning("%s is healthy again: its stalled step has returned", self.name)

    def submit(self, prepared: PreparedPrompt, hold: Hold) -> Generation:
        """Hand a sequence to the engine. Does not wait. Raises EngineFailed when it is dead."""
        if self._worker is None or self._stop_requested.is_set() or not self.healthy:
            reason = self.unhealthy_reason or (
                "it is stopping" if self._stop_requested.is_set() else "it is not loaded"
            )
            raise EngineFailed(f"{self.name} is not available: {reason}")
        # Unbounded, but bounded by the generation: max_tokens deltas for each answer, their ends
        # and Retired. The engine must never wait for a slow reader.
        send, receive = trio.open_memory_channel[Event](math.inf)
        generation = Generation(
            next(self._ids), prepared, receive, send=send, cancel=self._worker.cancel
        )
        self._live[generation.id] = generation
        self._worker.submit(generation.id, prepared, hold)
        return generation

    def finalize_all(self) -> None:
        """End every generation properly at the next step, and each later one at once."""
        if self._worker is not None:
            self._worker.finalize_all()

    @property
    def statistics(self) -> EngineStatistics:
        return self._worker.statistics if self._worker is not None else EngineStatistics()

    @property
    def timings(self) -> EngineTimings:
        """A snapshot, taken without waiting for the step under way."""
        return self._worker.timings if self._worker is not None else StepMeter().timings()

    # ------------------------------------------------------------ deliveries of the thread

    def _hand_over(self, delivery: Delivery) -> Delivery:
        """What is left for the event loop of a delivery. Called on the thread."""
        left: Delivery = []
        for generation_id, events in _by_generation(delivery):
            generation = self._live.get(generation_id)
            if generation is None or not generation.direct.offer(events):
                left += [(generation_id, event) for event in events]
        return left

    async def _read(self, mailbox: LoopMailbox[Outgoing]) -> None:
        """Handle what the thread says, until it has said that it ends."""
        fd = mailbox.fileno()
        try:
            while not self._ended.is_set():
                await trio.lowlevel.wait_readable(fd)
                for message in mailbox.take():
                    self._dispatch(message)
        finally:
            # The loop is ending, or the thread has nothing more to say.
            mailbox.close()
            for message in mailbox.take():
                self._dispatch(message)

    def _dispatch(self, message: Outgoing) -> None:
        # An exception that leaves a system task ends the whole program.
        try:
            self._handle(message)
        except Exception:
            log.exception("a delivery of %s could not be handled", self.name)

    def _handle(self, message: Outgoing) -> None:
        match message:
            case list():
                for generation_id, events in _by_generation(message):
                    generation = self._live.get(generation_id)
                    if generation is None:
                        continue
                    if isinstance(events[-1], Retired):
                        del self._live[generation_id]
                    generation.deliver_all(events)
                self._recover()
            case LoadProgress(fraction):
                self._on_progress(fraction)
            case Ready():
                self.ready = message
                self.health.enter(Health.HEALTHY)
                self._loaded.set()
            case Died(reason, while_loading):
                if while_loading or self.ready is None:
                    self._load_error = reason
                    self._loaded.set()
                else:
                    self.mark_unhealthy(f"the engine died: {reason}")
            case Ended():
                # Nothing of these is on the device any more, whatever the thread came to say.
                for generation in list(self._live.values()):
                    if not generation.ended:
                        generation.deliver(Failed("the engine ended"))
                    generation.deliver(Retired())
                self._live.clear()
                if not self._stop_requested.is_set() and self.ready is not None:
                    self.mark_unhealthy("the engine ended")  # for good, whatever it was before
                self._loaded.set()
                self._ended.set()


def _by_generation(delivery: Delivery) -> Iterator[tuple[int, list[Event]]]:
    """Neighbours of one generation together, in order."""
    if len(delivery) == 1:
        yield delivery[0][0], [delivery[0][1]]
        return
    for generation_id, pairs in groupby(delivery, itemgetter(0)):
        yield generation_id, [event for _, event in pairs]
