"""A draft at work is seen by the clock that finds stalled steps, and cut short like a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import trio

from dflash_trio.engine.client import EngineClient
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.step_clock import StepClock
from dflash_trio.generation.events import Failed
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.engine.drafting.scripted_provider import CheckingProvider
from tests.engine.engine_helpers import prompt
from tests.engine.test_worker import WAIT, running
from tests.support.scripted import Gate, scripted_load
from tests.support.stalls import StallingGate


class Hanging(CheckingProvider):
    """Stands still at a gate, when it is asked or when it is told of a step."""

    def __init__(self, gate: Gate, *, where: str) -> None:
        super().__init__(lambda _tokens, limit: [7] * limit)
        self.gate = gate
        self.where = where

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        if self.where == "propose":
            self.gate([])
        return super().propose(wanted)

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        if self.where == "observe":
            self.gate([])
        super().observe(batch, kept)


class Interruptible(CheckingProvider):
    """Guesses until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(lambda _tokens, _limit: [])
        self.asked_for = threading.Event()
        self.stopped = threading.Event()

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.asked_for.set()
        assert self.stopped.wait(WAIT)
        return super().propose(wanted)

    def abort(self) -> None:
        super().abort()
        self.stopped.set()


@pytest.mark.usefixtures("stalls_are_found_soon")
@pytest.mark.parametrize("where", ["propose", "observe"])
async def test_a_draft_that_hangs_shows_as_a_stalled_engine_until_it_returns(where: str) -> None:
    gate = StallingGate()
    load = scripted_load(drafts=lambda: Hanging(gate, where=where))
    client = EngineClient("m", load)
    prepared = PreparedPrompt(tokens=(65,), max_tokens=99, sampling=SamplingParams(temperature=0))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            ready = await nursery.start(client.run)
            hold = ready.ledger.try_reserve(1, 99)
            assert hold is not None
            generation = client.submit(prepared, hold)
            await generation.settled.wait()
            assert not generation.retired.is_set()
            assert generation.failed is not None
            assert isinstance(generation.failed, Failed)
            reason = client.unhealthy_reason
            assert reason is not None
            assert reason.startswith("the engine has stalled: its draft has taken more than")
            gate.open()
            await generation.retired.wait()
            assert client.healthy
            client.stop()


def test_who_cancels_while_guesses_are_made_waits_for_neither_them_nor_the_step() -> None:
    draft = Interruptible()
    steps: list[int] = []
    load = scripted_load(drafts=lambda: draft, before_decode=lambda _: steps.append(1))
    with running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 99))
        assert draft.asked_for.wait(WAIT)
        before = len(steps)
        thread.worker.cancel(1)
        thread.until_retired(1)
        assert draft.stopped.is_set()
        assert len(steps) <= before + 1
        assert thread.stories[1].finished.usage.completion_tokens == before
        # What it does for others between steps, as for copied rows, is not to be given up.
        assert not draft.aborted


def test_who_cancels_while_the_model_computes_leaves_the_draft_as_it_is() -> None:
    gate = Gate()
    draft = CheckingProvider(lambda _tokens, limit: [7] * limit)
    with running(scripted_load(drafts=lambda: draft, before_decode=gate)) as thread:
        thread.until_ready()
        gate.close()
        gate.reached.clear()
        thread.submit(1, prompt("abc", 99))
        assert gate.reached.wait(WAIT)
        thread.worker.cancel(1)
        assert not draft.aborted
        gate.open()
        thread.until_retired(1)


def test_guesses_that_somebody_else_waits_for_are_not_cut_short() -> None:
    draft = Interruptible()
    with running(scripted_load(slots=2, drafts=lambda: draft)) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 99))
        thread.submit(2, prompt("abc", 30))
        assert draft.asked_for.wait(WAIT)
        thread.worker.cancel(1)
        both = len(draft.asked) == 0 and thread.worker._in_batch == {1, 2}
        assert not both or not draft.aborted
        draft.stopped.set()
        thread.until_retired(1, 2)
        assert thread.stories[2].finished.usage.completion_tokens == 30


@pytest.mark.parametrize("end", ["stop", "finalize_all"])
def test_the_servers_end_cuts_a_draft_short(end: str) -> None:
    draft = Interruptible()
    runners: list[ScriptedRunner] = []
    with running(scripted_load(drafts=lambda: draft, on_runner=runners.append)) as thread:
        thread.until_ready()
        thread.submit(1, prompt("abc", 99))
        assert draft.asked_for.wait(WAIT)
        before = runners[0].decoded_tokens
        getattr(thread.worker, end)()
        thread.until_retired(1)
        assert draft.stopped.is_set()
        assert runners[0].decoded_tokens == before, "and so is the step that it was for"


def test_how_long_a_draft_may_take_is_learned_apart_from_steps() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    clock.begin_draft()
    now += 20.0  # it works off a long prompt
    assert clock.stalled() is None
    clock.end()
    clock.begin(1)
    now += 0.01
    clock.end()
    clock.begin(1)
    assert clock.under_way is not None
    assert clock.under_way.limit == 60.0
    clock.end()
    clock.begin_draft()
    now += 200.0
    assert clock.stalled() is None
    now += 0.1
    assert str(clock.stalled()) == "its draft"
