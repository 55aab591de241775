"""EngineWorker: the operating-system thread that owns one model.

It loads the model, steps the scheduler and frees the model, all on its own thread, so that device
memory is allocated and released where it is used. The loop is: take the inbox, step, deliver. One
delivery per step, however many sequences it moved; the inbox is taken between steps, so that a
cancellation waits for the step under way at most, and its end is told before the next begins.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from attrs import frozen

from ..generation.request import PreparedPrompt
from ..generation.status import EngineStatistics, EngineTimings
from .admission import Hold, KVLedger
from .drafting.acceptance import Acceptance, TreeAcceptance
from .drafting.controller import DraftController
from .drafting.drafter import Controller, Drafter, TreeDrafter
from .drafting.lazy import LazyDraft
from .drafting.lookup_controller import LookupController
from .drafting.prompt_lookup import PromptLookup
from .drafting.provider import DraftProvider, RankingProvider
from .drafting.steady_controller import SteadyController
from .model_runner import LoadingStopped, ModelInfo, ModelLoadError, ModelRunner, Vocabulary
from .prefix_store import PrefixStore
from .scheduler import Delivery, Scheduler
from .sequence import Sequence
from .step_clock import StepClock
from .step_meter import StepMeter

log = logging.getLogger("dflash_trio.engine")


@frozen
class LoadedModel:
    """A model that is ready: what the worker runs and what the other floors may see of it."""

    runner: ModelRunner
    ledger: KVLedger
    chunk: int
    warnings: tuple[str, ...] = ()
    prefixes: int = 0
    """Ended sequences that are kept for later prompts."""
    prompts: int = 0
    """Whole prompts that are kept."""
    store: PrefixStore | None = None
    """Where what is kept outlives the process. The worker closes it."""
    drafts: DraftProvider | None = None
    """Who guesses what sequences say next. The worker closes it, before the runner."""
    draft_device: str | None = None
    """Where that computes; ``None``: on no device of its own."""
    tree_budget: int | None = None
    """Guesses are trees of at most so many tokens; ``None``: they follow one another."""
    verify_limit: int = 0
    """Tokens that a batch with guesses may have; the runner has room for an output of each."""


Load = Callable[[Callable[[float], None], threading.Event], LoadedModel]
"""(progress callback, stop event) -> loaded model. Runs on the worker's thread."""


class LoopGone(Exception):
    """Raised by ``deliver`` when the event loop has ended: the thread only cleans up then."""


# ------------------------------------------------------------------- worker -> event loop


@frozen
class LoadProgress:
    fraction: float


@frozen
class Ready:
    info: ModelInfo
    vocabulary: Vocabulary
    ledger: KVLedger
    warnings: tuple[str, ...]
    draft_device: str | None = None


@frozen
class Died:
    """The thread is about to end for a reason other than being told to."""

    message: str
    while_loading: bool


@frozen
class Ended:
    """The model is freed; nothing more comes."""


Outgoing = LoadProgress | Ready | Delivery | Died | Ended


# ------------------------------------------------------------------- event loop -> worker


@frozen
class _Submit:
    generation_id: int
    prepared: PreparedPrompt
    hold: Hold


@frozen
class _Cancel:
    generation_id: int


@frozen
class _FinalizeAll:
    pass


@frozen
class _Stop:
    pass


_BLOCKED_INTERVAL = 0.02
"""Seconds between two looks whether a paused sequence can go on."""
_STORE_BOUND = 4.0
"""Seconds at the end for storing what is kept. Well within what a worker is given to end."""
_WARM_UP = frozenset({0})  # no generation has this id


class EngineWorker:
    """One model's thread. ``deliver`` is called on it, once per step; it must not block."""

    def __init__(self, name: str, load: Load, deliver: Callable[[Outgoing], None]) -> None:
        self._name = name
        self._load = load
        self._deliver = deliver
        # Unbounded, but bounded by its writers: a few messages for each reservation, and one for
        # each signal.
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _FinalizeAll | _Stop] = (
            queue.SimpleQueue()
        )
        self._stop_loading = threading.Event()
        self._runner: ModelRunner | None = None
        self._store: PrefixStore | None = None
        self._drafts: DraftProvider | None = None
        self._drafter: Drafter | None = None
        self._store_deadline: float | None = None
        self.statistics = EngineStatistics()
        """Published whole after each step; read from any thread."""
        self.clock = StepClock()
        """Whether a step or the draft is under way, and for how long it may be; read from any
        thread."""
        self._meter = StepMeter()
        # Guards the four below, held for bookkeeping only: an abort must never hit a batch that
        # somebody else has a share in, so "who is in the batch" and the abort itself go together.
        self._batch_lock = threading.Lock()
        self._in_batch: frozenset[int] = frozenset()
        self._draft_works = False
        self._cancelled: set[int] = set()
        self._everybody_ends = False
        # Everybody is paused, and the cells they wait for are with requests that are not in the
        # engine: whose output drains, or who are about to come.
        self._blocked = False

    # ------------------------------------------------------------- called from the event loop

    @property
    def timings(self) -> EngineTimings:
        """A snapshot, taken without waiting for the step under way."""
        return self._meter.timings()

    def submit(self, generation_id: int, prepared: PreparedPrompt, hold: Hold) -> None:
        self._inbox.put(_Submit(generation_id, prepared, hold))

    def cancel(self, generation_id: int) -> None:
        """Retire a generation at the next step; at once when nobody else shares the step."""
        with self._batch_lock:
            self._cancelled.add(generation_id)
            # Before the abort: the worker looks into its inbox right after an aborted step, and
            # must find there that nobody of that batch goes on.
            self._inbox.put(_Cancel(generation_id))
            if self._in_batch and self._in_batch <= self._cancelled:
                self._abort()

    def finalize_all(self) -> None:
        """End every generation properly, at once where the device lets a step be cut short."""
        self._end_everybody(_FinalizeAll())

    def stop(self) -> None:
        """End the thread: loading is given up, running generations are failed. Idempotent."""
        self._stop_loading.set()
        self._end_everybody(_Stop())

    def _end_everybody(self, message: _FinalizeAll | _Stop) -> None:
        with self._batch_lock:
            # As in cancel(): first the message, then the abort. Nobody of the batch goes on.
            self._everybody_ends = True
            self._inbox.put(message)
            if self._in_batch:
                self._abort()

    def _abort(self) -> None:
        """Cut short what is under way for those of :attr:`_in_batch`, whichever of both it is."""
        if self._runner is not None:
            self._runner.abort()
        if self._drafts is not None and self._draft_works:
            self._drafts.abort()

    # ------------------------------------------------------------------- the thread itself

    def run(self) -> None:
        """The thread's whole life. Never raises; what goes wrong is delivered as Died."""
        with contextlib.suppress(LoopGone):
            try:
                self._run()
            except (LoadingStopped, LoopGone):
                pass
            except BaseException as error:
                self._report_death(error)
            finally:
                self._close_store()
                self._close_runner()
                self._deliver(Ended())

    def _close_store(self) -> None:
        if self._store is not None:
            # From the stop on, or from here where nobody stopped it.
            deadline = self._store_deadline or time.monotonic() + _STORE_BOUND
            self._store.close(deadline)

    def _close_runner(self) -> None:
        try:
            if self._drafts is not None:
                self._drafts.close()
        except Exception:
            log.exception("the draft of %s could not be freed", self._name)
        try:
            if self._runner is not None:
                self._runner.close()
        except Exception:
            log.exception("the engine of %s could not be freed", self._name)

    def _report_death(self, error: BaseException) -> None:
        loading = self._runner is None
        if not isinstance(error, ModelLoadError):
            log.error("the engine of %s died", self._name, exc_info=error)
        self._deliver(Died(str(error) or type(error).__name__, while_loading=loading))

    def _run(self) -> None:
        model = self._load(self._report_progress, self._stop_loading)
        self._runner = runner = model.runner
        self._store = model.store
        self._drafts = model.drafts
        with self._batch_lock:
            # Nobody's batch, but one that stop() may cut.
            runner.rearm()
            self._in_batch = _WARM_UP
        try:
            if not self._stop_loading.is_set():
                runner.warm_up()
        finally:
            with self._batch_lock:
                self._in_batch = frozenset()
        if self._stop_loading.is_set():
            raise LoadingStopped
        self._drafter = self._make_drafter(model)
        scheduler = Scheduler(
            runner,
            model.ledger,
            chunk=model.chunk,
            prefixes=model.prefixes,
            prompts=model.prompts,
            store=model.store,
            drafter=self._drafter,
            on_batch=self._on_batch,
            on_launch=lambda: self._publish(scheduler),
        )
        self.statistics = scheduler.statistics()
        self._deliver(
            Ready(
                *(runner.info, runner.vocabulary, model.ledger, model.warnings),
                draft_device=model.draft_device,
            )
        )
        try:
            while self._take_inbox(scheduler):
                # Who was cancelled is retired already: somebody may wait for that place, and
                # must not wait for the others' step as well. Delivers nothing when nobody was.
                self._publish_now(scheduler)
                if not scheduler.idle:
                    self._blocked = not scheduler.step()
                    self._meter.step_ended()
                self._publish_now(scheduler)
                if scheduler.idle:
                    scheduler.check_idle()
        except LoopGone:
            raise
        except BaseException as error:
            # First that the engine is lost: nobody may be admitted here to what the generations
            # that fail by it are about to give back.
            self._report_death(error)
            scheduler.fail_all(f"the engine failed: {error}")
            self._publish(scheduler)
            return
        scheduler.fail_all("the server stopped")
        self._publish(scheduler)
        self._store_deadline = time.monotonic() + _STORE_BOUND
        try:
            scheduler.store_idle(self._store_deadline)
        except Exception:
            log.exception("what %s kept of prompts could not be stored", self._name)

    def _take_inbox(self, scheduler: Scheduler) -> bool:
        """Handle every message that is there, waiting for one when there is nothing to run.

        False: stop.
        """
        # Nobody tells the thread that cells have come back, so it looks again after a while.
        timeout = self._rest() if scheduler.idle else _BLOCKED_INTERVAL
        block = scheduler.idle or self._blocked
        while True:
            try:
                message = self._inbox.get(block=block, timeout=timeout)
            except queue.Empty:
                return True
            block = False
            match message:
                case _Submit(generation_id, prepared, hold):
                    if isinstance(self._drafts, LazyDraft) and self._drafts.wake():
                        assert self._drafter is not None
                        self._drafter.begin_anew()
                    scheduler.add(Sequence(generation_id, prepared, hold))
                case _Cancel(generation_id):
                    scheduler.cancel(generation_id)
                    with self._batch_lock:
                        self._cancelled.discard(generation_id)
                case _FinalizeAll():
                    scheduler.finalize_all()
                case _Stop():
                    return False

    def _rest(self) -> float | None:
        """Nothing runs. Seconds until the draft wants to be looked at; ``None``: for ever."""
        return self._drafts.rest() if isinstance(self._drafts, LazyDraft) else None

    def _on_batch(self, generations: frozenset[int], tokens: int) -> None:
        with self._batch_lock:
            # An abort from here on is for this batch, also before its decoding begins; one that
            # came as the last step ended is over with that step. One that came while guesses were
            # made stands, where all are gone.
            all_are_gone = self._everybody_ends or generations <= self._cancelled
            if generations and self._runner is not None and not all_are_gone:
                self._runner.rearm()
            self._in_batch = generations
        if generations:
            self._meter.decode_begins()
            self.clock.begin(tokens)
        else:
            self.clock.end()
            self._meter.decode_ended()

    def _on_drafting(self, generations: frozenset[int] | None) -> None:
        """As :meth:`_on_batch`, for the draft."""
        with self._batch_lock:
            if self._drafts is not None:
                # When it is done, too: what it does between steps is for whoever comes next.
                self._drafts.rearm()
            self._draft_works = generations is not None
            self._in_batch = generations or frozenset()
        if generations is None:
            self.clock.end()
        else:
            self.clock.begin_draft()

    def _make_drafter(self, model: LoadedModel) -> Drafter | None:
        if model.drafts is None:
            return None
        longest, budget = model.drafts.longest, model.tree_budget
        limit, partitioned = model.verify_limit, not model.runner.shares_cells
        drafted, working = self._meter.drafted, self._on_drafting
        drafts, wants_runs = model.drafts, model.runner.wants_runs

        def controller() -> Controller:
            if drafts.steady:
                judge = Acceptance if budget is None else TreeAcceptance
                return SteadyController(budget or longest, verify_limit=limit, acceptance=judge)
            if budget is not None:
                return DraftController(
                    budget, verify_limit=limit, partitioned=partitioned, acceptance=TreeAcceptance
                )
            # What follows a match costs little to look up, and tells how sure it is.
            decide = LookupController if isinstance(drafts, PromptLookup) else DraftController
            return decide(
                longest, verify_limit=limit, partitioned=partitioned, builds_graphs=wants_runs
            )

        if budget is not None:
            assert isinstance(drafts, RankingProvider)
            return TreeDrafter(
                drafts,
                controller(),
                budget=budget,
                paths=model.runner.tree_paths,
                verify_limit=limit,
                new_controller=controller,
                on_drafted=drafted,
                on_working=working,
            )
        return Drafter(
            drafts,
            controller(),
            verify_limit=limit,
            new_controller=controller,
            on_drafted=drafted,
            on_working=working,
        )

    def _publish_now(self, scheduler: Scheduler) -> None:
        """Publish, unless the next step's launch does it in a moment.

        The event loop wants the interpreter as soon as it is told something, and this thread
        would wait for it right when the device waits for work. Told when a step begins, the loop
        has the interpreter while nobody else wants it.
        """
        assert self._runner is not None
        ahead = self._runner.launches_ahead and not scheduler.idle and not self._blocked
        if not (ahead and scheduler.only_text_waits):
            self._publish(scheduler)

    def _publish(self, scheduler: Scheduler) -> None:
        self.statistics = scheduler.statistics()
        events = scheduler.take_events()
        if events:
            self._meter.delivery_begins()
            self._deliver(events)
            self._meter.delivered(events)

    def _report_progress(self, fraction: float) -> None:
        self._deliver(LoadProgress(fraction))
