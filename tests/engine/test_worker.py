"""One model's thread: what it delivers, in which order, and how it ends."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from attrs import evolve

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.drafting.lazy import LazyDraft
from dflash_trio.engine.model_runner import (
    EngineError,
    LoadingStopped,
    ModelLoadError,
)
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.worker import (
    Died,
    Ended,
    EngineWorker,
    Load,
    LoadedModel,
    LoadProgress,
    LoopGone,
    Outgoing,
    Ready,
)
from dflash_trio.generation.events import Failed, Finished, Retired
from dflash_trio.generation.request import PreparedPrompt
from tests.engine.drafting.scripted_provider import CheckingProvider
from tests.engine.engine_helpers import Story, Turnstile, prompt, reserve
from tests.support.http_client import PATIENCE
from tests.support.scripted import Gate, scripted_load

WAIT = PATIENCE
"""Seconds after which a test gives up on a thread."""


class Thread:
    """A worker on its thread; everything it delivers can be waited for."""

    def __init__(self, load: Load, *, gone_after: int | None = None) -> None:
        """``gone_after``: deliveries after which there is no event loop any more."""
        self._queue: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()
        self._left = gone_after
        self.worker = EngineWorker("scripted", load, self._deliver)
        self.heard: list[Outgoing] = []
        self.stories: dict[int, Story] = {}
        self.deliveries = 0
        self.thread = threading.Thread(target=self.worker.run, name="worker under test")
        self.ledger: KVLedger

    def _deliver(self, message: Outgoing) -> None:
        assert threading.current_thread() is self.thread
        if self._left is not None:
            if not self._left:
                raise LoopGone
            self._left -= 1
        self._queue.put(message)

    def hear(self) -> Outgoing:
        message = self._queue.get(timeout=WAIT)
        self.heard.append(message)
        if isinstance(message, list):
            self.deliveries += 1
            for generation_id, event in message:
                self.stories.setdefault(generation_id, Story()).add(event)
        return message

    def hear_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.hear()

    def until_ready(self) -> None:
        self.hear_until(lambda: any(isinstance(message, Ready) for message in self.heard))
        ready = self.heard[-1]
        assert isinstance(ready, Ready)
        self.ledger = ready.ledger

    def submit(self, generation_id: int, prepared: PreparedPrompt) -> None:
        self.stories[generation_id] = Story()
        self.worker.submit(generation_id, prepared, reserve(self.ledger, prepared))

    def until_retired(self, *generation_ids: int) -> None:
        self.hear_until(lambda: all(self.stories[i].retired for i in generation_ids))

    def join(self) -> None:
        """Wait for the end; hear the rest."""
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        while not self._queue.empty():
            self.hear()


@contextmanager
def running(load: Load, **options: int) -> Iterator[Thread]:
    thread = Thread(load, **options)
    thread.thread.start()
    try:
        yield thread
    finally:
        thread.worker.stop()
        thread.thread.join(WAIT)
        assert not thread.thread.is_alive()


class Lost:
    """Makes the n-th decode fail."""

    def __init__(self, at: int = 1) -> None:
        self.left = at

    def __call__(self, _: object) -> None:
        self.left -= 1
        if self.left <= 0:
            raise EngineError("the device fell off")


# ------------------------------------------------------------------------------- deliveries


def test_it_reports_progress_then_readiness_then_its_end() -> None:
    with running(scripted_load()) as thread:
        thread.until_ready()
        thread.worker.stop()
        thread.join()
    assert thread.heard[:2] == [LoadProgress(0.0), LoadProgress(1.0)]
    assert isinstance(thread.heard[2], Ready)
    assert thread.heard[3:] == [Ended()]


def test_a_step_makes_one_delivery_however_many_sequences_it_moved() -> None:
    gate = Gate(open=False)
    with running(scripted_load(slots=4, before_decode=gate)) as thread:
        thread.until_ready()
        thread.submit(1, prompt("first", 5))
        assert gate.reached.wait(WAIT)
        for generation_id in (2, 3, 4):
            thread.submit(generation_id, prompt("more", 4))
        gate.open()
        thread.until_retired(1, 2, 3, 4)
        # The first alone in one step, then four at once in four more.
        assert thread.deliveries == 5
        assert thread.worker.statistics.steps == 5


def test_nothing_is_delivered_while_nothing_runs() -> None:
    with running(scripted_load()) as thread:
        thread.until_ready()
        thread.worker.cancel(77)
        thread.submit(1, prompt("a", 1))
        thread.until_retired(1)
        assert thread.deliveries == 1
        thread.worker.stop()
        thread.join()
        assert thread.deliveries == 1


def test_statistics_are_published_before_the_delivery_they_belong_to() -> None:
    with running(scripted_load()) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 4))
        thread.until_retired(1)
        statistics = thread.worker.statistics
    assert (statistics.prompt_tokens, statistics.completion_tokens) == (3, 4)
    assert (statistics.cells_used, statistics.sequences_decoding) == (0, 0)


# ----------------------------------------------------------------------------- cancellation


def test_cancelling_everybody_in_a_step_cuts_it_short() -> None:
    turnstile = Turnstile()
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=turnstile, on_runner=runners.append)
    with running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 9))
        turnstile.next()
        thread.worker.cancel(1)
        turnstile.open()
        thread.until_retired(1)
    assert thread.stories[1].text == ""
    assert thread.stories[1].finished.reason == "cancelled"
    assert runners[0].decoded_tokens == 0, "the step was thrown away"


def in_one_step(thread: Thread, turnstile: Turnstile) -> None:
    """Bring generations 1 and 2 into one step that stands at the turnstile."""
    thread.submit(1, prompt("abc", 9))
    turnstile.next()
    thread.submit(2, prompt("def", 3))
    turnstile.let_through()
    assert len(turnstile.next()) == 2


def test_a_step_that_somebody_else_shares_is_not_cut() -> None:
    turnstile = Turnstile()
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=turnstile, on_runner=runners.append)
    with running(load) as thread:
        thread.until_ready()
        in_one_step(thread, turnstile)
        thread.worker.cancel(1)
        turnstile.let_through()
        assert len(turnstile.next()) == 1, "the cancelled one is in no later step"
        assert runners[0].decoded_tokens == 3 + (1 + 3), "the shared step was done in full"
        turnstile.open()
        thread.until_retired(1, 2)
    assert thread.stories[1].finished.reason == "cancelled"
    assert thread.stories[2].finished.reason == "length"
    assert thread.stories[2].finished.usage.completion_tokens == 3


def test_a_cancelled_generation_is_told_retired_before_the_next_step_of_the_others() -> None:
    turnstile = Turnstile()
    with running(scripted_load(slots=2, before_decode=turnstile)) as thread:
        thread.until_ready()
        in_one_step(thread, turnstile)
        thread.worker.cancel(1)
        turnstile.let_through()
        turnstile.next()  # the next step stands there, not done yet
        thread.until_retired(1)
        assert not thread.stories[2].ended
        turnstile.open()
        thread.until_retired(2)


def test_two_cancellations_that_together_empty_a_step_cut_it() -> None:
    turnstile = Turnstile()
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=turnstile, on_runner=runners.append)
    with running(load) as thread:
        thread.until_ready()
        in_one_step(thread, turnstile)
        thread.worker.cancel(1)
        thread.worker.cancel(2)
        turnstile.open()
        thread.until_retired(1, 2)
    assert runners[0].decoded_tokens == 3
    assert thread.stories[2].text == ""


def test_a_new_generation_behind_a_step_that_was_cut_runs_as_ever() -> None:
    turnstile = Turnstile()
    with running(scripted_load(slots=2, before_decode=turnstile)) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 9))
        turnstile.next()
        thread.worker.cancel(1)
        thread.submit(2, prompt("def", 3))
        turnstile.open()
        thread.until_retired(1, 2)
    assert thread.stories[2].finished.usage.completion_tokens == 3


def test_a_cancellation_that_comes_as_its_step_ends_does_not_cut_the_next_one() -> None:
    """The narrow moment: decoded, but the books still name the generation as in the batch."""
    runners: list[ScriptedRunner] = []
    with running(scripted_load(slots=2, on_runner=runners.append)) as thread:
        thread.until_ready()
        runner = runners[0]
        decode = runner.decode
        outcomes = []

        def decode_and_be_cancelled(batch, launched):  # type: ignore[no-untyped-def]
            outcome = decode(batch, launched)
            outcomes.append(outcome.value)
            if len(outcomes) == 1:
                thread.worker.cancel(1)
                thread.worker.submit(2, second, hold)
            return outcome

        second = prompt("abc", 4)
        hold = reserve(thread.ledger, second)
        thread.stories[2] = Story()
        runner.decode = decode_and_be_cancelled  # type: ignore[method-assign]
        thread.submit(1, prompt("abc", 50))
        thread.until_retired(1, 2)
    assert thread.stories[1].finished.reason == "cancelled"
    assert thread.stories[2].finished.usage.completion_tokens == 4
    assert set(outcomes) == {"done"}


def test_cancelling_before_the_worker_has_looked_takes_the_generation_out_unrun() -> None:
    gate = Gate(open=False)
    with running(scripted_load(slots=2, before_decode=gate)) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 2))
        assert gate.reached.wait(WAIT)
        thread.submit(2, prompt("abc", 2))
        thread.worker.cancel(2)
        gate.open()
        thread.until_retired(1, 2)
        assert thread.stories[2].finished.usage.completion_tokens == 0
        assert thread.stories[1].finished.usage.completion_tokens == 2, "its step was not cut"


def test_a_lazy_draft_is_loaded_before_the_first_prompt_is_computed_and_closed_at_the_end() -> None:
    order: list[str] = []
    draft = CheckingProvider(lambda tokens, limit: [7] * limit)

    def load_draft() -> CheckingProvider:
        order.append("draft")
        return draft

    lazy = LazyDraft(load_draft, kind="scripted", longest=8)
    load = scripted_load(slots=2, before_decode=lambda _: order.append("step"))

    def with_draft(*arguments) -> LoadedModel:  # type: ignore[no-untyped-def]
        return evolve(load(*arguments), drafts=lazy, verify_limit=20)

    with running(with_draft) as thread:
        thread.until_ready()
        order.clear()  # the model was warmed up
        thread.submit(1, prompt("abc", 5))
        thread.until_retired(1)
        thread.submit(2, prompt("abc", 5))
        thread.until_retired(2)
        assert not draft.closed
    assert order[:2] == ["draft", "step"]
    assert order.count("draft") == 1
    assert draft.observed == order.count("step")
    assert draft.closed


def test_a_draft_that_is_loaded_anew_does_not_go_on_with_the_nap_of_the_one_before() -> None:
    made: list[CheckingProvider] = []

    def load_draft() -> CheckingProvider:
        made.append(CheckingProvider(lambda tokens, limit: [7] * limit))
        return made[-1]

    lazy = LazyDraft(load_draft, kind="scripted", longest=8, idle_seconds=0.0)
    load = scripted_load(slots=2)

    def with_draft(*arguments) -> LoadedModel:  # type: ignore[no-untyped-def]
        return evolve(load(*arguments), drafts=lazy, verify_limit=20)

    with running(with_draft) as thread:
        thread.until_ready()
        for generation in (1, 2):
            drafter = thread.worker._drafter
            assert drafter is not None
            drafter._naps.asleep = True
            thread.submit(generation, prompt("abc", 5))
            thread.until_retired(generation)
    assert len(made) == 2
    assert all(draft.observed for draft in made)


def test_cancelling_what_is_over_leaves_no_trace() -> None:
    with running(scripted_load()) as thread:
        thread.until_ready()
        thread.submit(1, prompt("a", 1))
        thread.until_retired(1)
        thread.worker.cancel(1)
        thread.worker.stop()
        thread.join()
        assert not thread.worker._cancelled


# ------------------------------------------------------------------------------- the endings


def test_finalizing_ends_what_runs_and_what_comes_later_and_the_thread_lives_on() -> None:
    gate = Gate(open=False)
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=gate, on_runner=runners.append)
    with running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 500))
        assert gate.reached.wait(WAIT)
        thread.worker.finalize_all()
        thread.submit(2, prompt("abc", 500))
        gate.open()
        thread.until_retired(1, 2)
        for generation_id in (1, 2):
            finished = thread.stories[generation_id].finished
            assert (finished.reason, finished.detail) == ("length", "server_shutdown")
        assert thread.thread.is_alive()
        assert runners[0].decoded_tokens == 0, "the step under way was cut short"


def test_stopping_fails_and_retires_what_runs_and_frees_the_model() -> None:
    gate = Gate(open=False)
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=gate, on_runner=runners.append)
    with running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 500))
        assert gate.reached.wait(WAIT)
        thread.submit(2, prompt("abc", 500))
        thread.worker.stop()
        gate.open()
        thread.join()
    assert thread.stories[1].failed == Failed("the server stopped")
    assert thread.stories[2].failed == Failed("the server stopped")
    assert thread.heard[-1] == Ended()
    assert not any(isinstance(message, Died) for message in thread.heard)
    assert runners[0].closed
    assert runners[0].open_samplers == 0
    assert runners[0].decoded_tokens == 0, "the step under way was cut short"


def test_stopping_twice_is_stopping_once() -> None:
    with running(scripted_load()) as thread:
        thread.until_ready()
        thread.worker.stop()
        thread.worker.stop()
        thread.join()
        assert thread.heard.count(Ended()) == 1


def test_an_engine_that_fails_says_so_before_its_generations_give_anything_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=Lost(at=3), on_runner=runners.append)
    with caplog.at_level(logging.ERROR), running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 500))
        thread.submit(2, prompt("abc", 500))
        thread.join()
    for generation_id in (1, 2):
        assert "the device fell off" in thread.stories[generation_id].failed.message
    died = thread.heard.index(Died("the device fell off", while_loading=False))
    failed = next(
        at
        for at, message in enumerate(thread.heard)
        if isinstance(message, list) and any(isinstance(event, Failed) for _, event in message)
    )
    assert died < failed < thread.heard.index(Ended()) == len(thread.heard) - 1
    assert runners[0].closed
    assert runners[0].open_samplers == 0
    assert "died" in caplog.text


def test_a_leak_found_while_idle_is_the_end_of_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners: list[ScriptedRunner] = []
    with (
        caplog.at_level(logging.ERROR),
        running(scripted_load(slots=2, on_runner=runners.append)) as thread,
    ):
        thread.until_ready()
        runners[0]._histories[1].append(5)
        thread.submit(1, prompt("abc", 2))
        thread.join()
    assert isinstance(thread.stories[1].ending, Finished), "it was done before the leak was seen"
    assert any(isinstance(m, Died) and "leaked" in m.message for m in thread.heard)


def test_a_model_that_cannot_be_freed_still_ends(caplog: pytest.LogCaptureFixture) -> None:
    runners: list[ScriptedRunner] = []

    def refuse() -> None:
        raise OSError("stuck")

    with caplog.at_level(logging.ERROR), running(scripted_load(on_runner=runners.append)) as thread:
        thread.until_ready()
        runners[0].close = refuse  # type: ignore[method-assign]
        thread.worker.stop()
        thread.join()
    assert thread.heard[-1] == Ended()
    assert "could not be freed" in caplog.text


# --------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("error", [ModelLoadError("no such tensor"), MemoryError("too big")])
def test_a_load_that_fails_is_told_with_its_reason(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def load(progress: object, stopped: object) -> LoadedModel:
        raise error

    with caplog.at_level(logging.CRITICAL), running(load) as thread:
        thread.join()
    assert thread.heard == [Died(str(error), while_loading=True), Ended()]


def test_stopping_while_loading_gives_the_loading_up() -> None:
    begun = threading.Event()

    def load(progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        begun.set()
        assert stopped.wait(WAIT)
        raise LoadingStopped

    with running(load) as thread:
        assert begun.wait(WAIT)
        thread.worker.stop()
        thread.join()
    assert thread.heard == [Ended()]


def test_a_model_that_is_loaded_just_as_the_stop_comes_is_freed_unused() -> None:
    runners: list[ScriptedRunner] = []
    begun = threading.Event()

    def load(progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        begun.set()
        assert stopped.wait(WAIT)
        return scripted_load(on_runner=runners.append)(lambda _: None, stopped)

    with running(load) as thread:
        assert begun.wait(WAIT)
        thread.worker.stop()
        thread.join()
    assert thread.heard == [Ended()]
    assert runners[0].closed


def test_stopping_before_the_thread_runs_loads_nothing_for_long() -> None:
    thread = Thread(scripted_load())
    thread.worker.stop()
    thread.thread.start()
    thread.join()
    assert thread.heard[-1] == Ended()
    assert not any(isinstance(message, Ready) for message in thread.heard)


# ------------------------------------------------------------------- the event loop is gone


@pytest.mark.parametrize("deliveries", range(7))
def test_when_the_event_loop_is_gone_the_thread_cleans_up_and_says_nothing(
    deliveries: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gone while loading (0, 1), on readiness (2), in the middle of generating (3 and up)."""
    runners: list[ScriptedRunner] = []
    thread = Thread(scripted_load(slots=1, on_runner=runners.append), gone_after=deliveries)
    prepared = prompt("abc", 50)
    hold = KVLedger(slots=1, pool=100, max_ctx=100, decode_headroom=50).try_reserve(3, 50)
    assert hold is not None
    thread.worker.submit(1, prepared, hold)
    thread.stories[1] = Story()
    thread.thread.start()
    thread.join()
    assert len(thread.heard) == deliveries
    # Without its first delivery nothing was made; without the second the load gave it to nobody.
    assert bool(runners) == (deliveries >= 1)
    if deliveries >= 2:
        assert runners[0].closed
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


def test_the_loop_may_go_while_the_engine_fails(capfd: pytest.CaptureFixture[str]) -> None:
    runners: list[ScriptedRunner] = []
    load = scripted_load(before_decode=Lost(), on_runner=runners.append)
    thread = Thread(load, gone_after=3)
    hold = KVLedger(slots=1, pool=100, max_ctx=100, decode_headroom=50).try_reserve(3, 50)
    assert hold is not None
    thread.worker.submit(1, prompt("abc", 50), hold)
    thread.thread.start()
    thread.join()
    assert runners[0].closed
    assert "LoopGone" not in capfd.readouterr().err


def test_every_generation_gets_one_ending_and_is_retired_last() -> None:
    """A crowd that comes, leaves and is finalized while the engine runs freely."""
    with running(scripted_load(slots=3)) as thread:
        thread.until_ready()
        holds = {}
        for generation_id in range(1, 40):
            prepared = prompt("x" * generation_id, 1 + generation_id % 7)
            while (hold := thread.ledger.try_reserve(generation_id, prepared.max_tokens)) is None:
                thread.hear()
                for other, story in thread.stories.items():
                    if story.retired and other in holds:
                        thread.ledger.release(holds.pop(other))
            holds[generation_id] = hold
            thread.stories[generation_id] = Story()
            thread.worker.submit(generation_id, prepared, hold)
            if generation_id % 3 == 0:
                thread.worker.cancel(generation_id)
        thread.worker.finalize_all()
        thread.until_retired(*thread.stories)
        thread.worker.stop()
        thread.join()
    for generation_id, story in thread.stories.items():
        assert isinstance(story.events[-1], Retired)
        if generation_id % 3:
            assert story.finished.reason == "length"


def test_a_storm_of_cancellations_never_harms_a_neighbour() -> None:
    def steady_text(storm: int) -> str:
        with running(scripted_load(slots=2, max_ctx=1000)) as thread:
            thread.until_ready()
            thread.submit(1, prompt("steady", 300))
            for generation_id in range(2, 2 + storm):
                prepared = prompt("x" * (generation_id % 50 + 1), 40)
                hold = reserve(thread.ledger, prepared)
                thread.stories[generation_id] = Story()
                thread.worker.submit(generation_id, prepared, hold)
                if generation_id % 2:
                    thread.hear()  # let it get somewhere
                thread.worker.cancel(generation_id)
                thread.until_retired(generation_id)
                thread.ledger.release(hold)
            thread.until_retired(1)
            assert thread.stories[1].finished.usage.completion_tokens == 300
            return thread.stories[1].text

    assert steady_text(storm=60) == steady_text(storm=0)


def test_stopping_in_the_warm_up_cuts_it_short_and_never_says_ready() -> None:
    begun, aborted = threading.Event(), threading.Event()

    class WarmingUp(ScriptedRunner):
        def warm_up(self) -> None:
            begun.set()
            aborted.wait(WAIT)

        def abort(self) -> None:
            aborted.set()

    runner = WarmingUp()

    def load(progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        ledger = KVLedger(slots=1, pool=100, max_ctx=100, decode_headroom=8)
        return LoadedModel(runner, ledger, 8)

    with running(load) as thread:
        assert begun.wait(WAIT)
        thread.worker.stop()
        assert aborted.is_set()
        thread.join()
    assert thread.heard == [Ended()]
    assert runner.closed


# --------------------------------------------------------------------- devices that are launched


def test_text_is_told_when_the_device_has_its_next_step_and_the_first_and_an_end_at_once() -> None:
    gate = Turnstile()
    with running(scripted_load(before_decode=gate, launches_ahead=True)) as thread:
        thread.until_ready()
        deliveries = thread.deliveries
        thread.submit(1, prompt("ab", 3, ignore_eos=True))
        gate.next()
        gate.let_through()  # the prompt's step, with the first token
        gate.next()
        thread.hear_until(lambda: len(thread.stories[1].text) == 1)
        gate.let_through()
        # The second is told with the launch of the third step, which stands at the gate now.
        gate.next()
        thread.hear_until(lambda: len(thread.stories[1].text) == 2)
        gate.let_through()
        # No step follows that could tell the end.
        thread.until_retired(1)
        assert len(thread.stories[1].text) == 3
        assert thread.deliveries == deliveries + 3


def test_what_a_launched_device_says_is_what_any_other_says() -> None:
    told = []
    for ahead in (False, True):
        with running(scripted_load(slots=3, launches_ahead=ahead)) as thread:
            thread.until_ready()
            for number in (1, 2, 3):
                thread.submit(number, prompt("x" * number, 12, ignore_eos=True))
            thread.until_retired(1, 2, 3)
            told.append([thread.stories[number].text for number in (1, 2, 3)])
    assert told[0] == told[1]
