"""When the pool runs out: the newest gives way and goes on later as if nothing had happened."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import ScriptedRunner, ScriptedVocabulary
from dflash_trio.engine.sequence import Sequence, SequenceState
from dflash_trio.generation.events import Finished, Retired, TextDelta
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from dflash_trio.text.structured import compile_grammar
from tests.engine.engine_helpers import Story, prompt


class Engine:
    """A small pool, and the stories of everybody in it."""

    def __init__(
        self,
        *,
        slots: int = 3,
        pool: int = 60,
        max_ctx: int = 60,
        headroom: int = 4,
        prefixes: int = 0,
        rewinds: bool = True,
    ) -> None:
        self.ledger = KVLedger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=headroom)
        self.runner = ScriptedRunner(slots=slots, cells=pool, rewinds_freely=rewinds)
        self.scheduler = Scheduler(self.runner, self.ledger, chunk=16, prefixes=prefixes)
        self.texts: dict[int, dict[int, str]] = {}
        self.finished: dict[int, dict[int, Finished]] = {}
        self.holds: dict[int, Hold] = {}
        self.sequences: dict[int, Sequence] = {}
        self.next_id = 1

    def try_add(self, prepared: PreparedPrompt) -> int | None:
        """As the router would: nobody is admitted beyond what the ledger promises."""
        hold = self.ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens, prepared.n)
        if hold is None:
            return None
        generation_id, self.next_id = self.next_id, self.next_id + 1
        self.holds[generation_id] = hold
        self.texts[generation_id] = dict.fromkeys(range(prepared.n), "")
        self.finished[generation_id] = {}
        self.sequences[generation_id] = Sequence(generation_id, prepared, hold)
        self.scheduler.add(self.sequences[generation_id])
        return generation_id

    def add(self, prepared: PreparedPrompt) -> int:
        generation_id = self.try_add(prepared)
        assert generation_id is not None
        return generation_id

    def listen(self) -> None:
        for generation_id, event in self.scheduler.take_events():
            match event:
                case TextDelta():
                    self.texts[generation_id][event.index] += event.text
                case Finished():
                    self.finished[generation_id][event.index] = event
                case Retired():
                    self.ledger.release(self.holds.pop(generation_id))
                case _:
                    raise AssertionError(event)

    def step(self) -> None:
        assert self.scheduler.step() or not self.holds
        self.listen()
        statistics = self.ledger.statistics()
        assert statistics.committed <= statistics.pool
        assert statistics.paused == sum(hold.paused for hold in self.holds.values())
        assert self.runner.cells_used <= self.ledger.pool

    def run(self) -> None:
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.step()
        self.listen()
        self.scheduler.check_idle()
        assert not self.holds
        assert self.runner.open_samplers == 0
        statistics = self.ledger.statistics()
        assert (statistics.committed, statistics.slots_reserved, statistics.paused) == (0, 0, 0)


def alone(prepared: PreparedPrompt) -> dict[int, str]:
    """What a generation says when nobody else is there and there is room for anything."""
    engine = Engine(slots=prepared.n, pool=4000, max_ctx=60)
    generation_id = engine.add(prepared)
    engine.run()
    return engine.texts[generation_id]


def test_the_newest_is_paused_and_says_all_that_it_would_have_said() -> None:
    engine = Engine(slots=2)
    prompts = [prompt("first" * 4, 30, ignore_eos=True), prompt("second" * 3, 30, ignore_eos=True)]
    first, second = (engine.add(each) for each in prompts)
    while not engine.holds[second].paused:
        engine.step()
    paused = engine.sequences[second]
    assert paused.state is SequenceState.PAUSED
    assert (paused.seq_id, paused.computed, paused.hold.cells) == (None, 0, 0)
    assert engine.scheduler.statistics().sequences_paused == 1
    assert engine.sequences[first].state is SequenceState.DECODING
    engine.run()
    assert engine.texts[first] == alone(prompts[0])
    assert engine.texts[second] == alone(prompts[1])
    assert engine.scheduler.statistics().pauses >= 1


def test_while_somebody_is_paused_nobody_is_admitted() -> None:
    engine = Engine(slots=3)
    engine.add(prompt("first" * 4, 30, ignore_eos=True))
    second = engine.add(prompt("second" * 3, 30, ignore_eos=True))
    small = prompt("x", 1)
    assert engine.ledger.could_reserve(small.prompt_tokens, small.max_tokens)
    while not engine.holds[second].paused:
        engine.step()
    assert not engine.ledger.could_reserve(small.prompt_tokens, small.max_tokens)
    while engine.holds[second].paused:
        engine.step()
    assert engine.ledger.statistics().paused == 0
    engine.run()


def test_the_oldest_of_the_paused_goes_on_first() -> None:
    engine = Engine(slots=3, pool=60, headroom=2)
    ids = [engine.add(prompt(f"{name}" * 12, 40, ignore_eos=True)) for name in "abc"]
    while sum(hold.paused for hold in engine.holds.values()) < 2:
        engine.step()
    assert not engine.holds[ids[0]].paused
    while engine.holds[ids[1]].paused:
        assert engine.holds[ids[2]].paused
        engine.step()
    engine.run()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_paused_generation_can_be_cancelled_and_finalized(steps: int) -> None:
    for end in ("cancel", "finalize"):
        engine = Engine(slots=2)
        engine.add(prompt("first" * 4, 30, ignore_eos=True))
        second = engine.add(prompt("second" * 3, 30, ignore_eos=True))
        while not engine.holds[second].paused:
            engine.step()
        for _ in range(steps):
            engine.step()
        if end == "cancel":
            engine.scheduler.cancel(second)
            assert engine.finished[second] == {}
        else:
            engine.scheduler.finalize_all()
        engine.run()
        reason = engine.finished[second][0].reason
        assert reason == ("cancelled" if end == "cancel" else "length")


def test_what_a_sequence_has_beside_its_cells_survives_the_pause() -> None:
    """Its sampler's draws, its penalties, its grammar, its stop strings."""
    drawn = SamplingParams(temperature=1.0, seed=3, repeat_penalty=1.3, frequency_penalty=0.3)
    grammar = compile_grammar(ScriptedVocabulary().guide_tokenizer(), 'start: /[a-f]{28}/ "."')
    prepared = attrs.evolve(prompt("second" * 3, 40, sampling=drawn), constraint=grammar)
    expected = alone(prepared)
    stopped = attrs.evolve(prepared, stop=(expected[0][20:24],))
    for which in (prepared, stopped):
        engine = Engine(slots=2)
        engine.add(prompt("first" * 4, 30, ignore_eos=True))
        second = engine.add(which)
        while not engine.holds[second].paused:
            engine.step()
        assert 0 < engine.sequences[second].generated < 24
        engine.run()
        assert engine.texts[second] == alone(which)


@pytest.mark.parametrize("rewinds", [True, False])
def test_several_answers_are_paused_and_go_on_together(rewinds: bool) -> None:
    prepared = attrs.evolve(prompt("second" * 2, 12, ignore_eos=True), n=2)
    prepared = attrs.evolve(prepared, sampling=SamplingParams(temperature=1.0, seed=5))
    engine = Engine(slots=3, pool=52, rewinds=rewinds)
    engine.add(prompt("first" * 4, 30, ignore_eos=True))
    second = engine.add(prepared)
    while not engine.holds[second].paused:
        engine.step()
    engine.run()
    assert engine.texts[second] == alone(prepared)


def test_where_nothing_can_be_taken_back_answers_still_share_their_prompt_after_a_pause() -> None:
    engine = Engine(slots=3, pool=400, max_ctx=400, headroom=16, rewinds=False)
    first = engine.add(prompt("a" * 40, 120, ignore_eos=True))
    engine.step()
    prepared = attrs.evolve(prompt("b" * 200, 60, ignore_eos=True), n=2)
    second = engine.add(attrs.evolve(prepared, sampling=SamplingParams(temperature=1.0, seed=3)))
    engine.run()
    assert engine.scheduler.statistics().pauses
    endings = [*engine.finished[first].values(), *engine.finished[second].values()]
    assert [ending.usage.completion_tokens for ending in endings] == [120, 60, 60]
    assert all(ending.detail is None for ending in endings)


arrivals = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 60),  # max_tokens
        st.integers(1, 3),  # answers
        st.integers(0, 6),  # steps before it comes
        st.one_of(st.none(), st.integers(0, 40)),  # steps until its client leaves
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals,
    st.integers(0, 3),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_whoever_comes_and_leaves_everybody_gets_to_the_end_of_what_alone_would_be_said(
    coming: list[tuple[int, int, int, int, int | None]],
    prefixes: int,
    headroom: int,
    rewinds: bool,
    dice: random.Random,
) -> None:
    engine = Engine(
        slots=3, pool=70, max_ctx=50, headroom=headroom, prefixes=prefixes, rewinds=rewinds
    )
    expected: dict[int, dict[int, str]] = {}
    leaving: dict[int, int] = {}
    waiting = list(coming)
    pause, progress, idle_steps = 0, -1, 0
    while waiting or not engine.scheduler.idle:
        if waiting and pause <= 0:
            size, max_tokens, n, pause, leaves = waiting[0]
            sampling = SamplingParams(temperature=1.0, seed=dice.randrange(3))
            prepared = attrs.evolve(
                prompt([97 + dice.randrange(2) for _ in range(size)], max_tokens),
                n=n,
                sampling=sampling,
                ignore_eos=True,
            )
            added = engine.try_add(prepared)
            if added is not None:
                waiting.pop(0)
                expected[added] = alone(attrs.evolve(prepared, max_tokens=max_tokens))
                if leaves is not None:
                    leaving[added] = leaves
            elif engine.scheduler.idle:
                waiting.pop(0)  # it fits never
        pause -= 1
        if not engine.scheduler.idle:
            engine.step()
        for generation_id in list(leaving):
            leaving[generation_id] -= 1
            if leaving[generation_id] < 0:
                engine.scheduler.cancel(generation_id)
                engine.listen()
                del leaving[generation_id]
        # The oldest always goes on: no livelock.
        now = engine.scheduler.statistics()
        moved = now.completion_tokens + now.prompt_tokens
        idle_steps = idle_steps + 1 if moved == progress and engine.holds else 0
        assert idle_steps < 3
        progress = moved
    engine.run()
    for generation_id, ends in engine.finished.items():
        for index, end in ends.items():
            said, whole = engine.texts[generation_id][index], expected[generation_id][index]
            assert whole.startswith(said)
            if end.reason == "length" and end.detail is None:
                assert said == whole


def test_the_oldest_makes_a_token_in_every_step_whoever_else_wants_cells() -> None:
    engine = Engine(slots=3, pool=60, headroom=1)
    oldest = engine.add(prompt("a" * 10, 45, ignore_eos=True))
    engine.step()
    engine.add(prompt("b" * 12, 40, ignore_eos=True))
    engine.add(prompt("c" * 14, 40, ignore_eos=True))
    while oldest in engine.holds:
        before = engine.sequences[oldest].generated
        engine.step()
        assert engine.sequences[oldest].generated == before + 1
    engine.run()


def test_stories_have_no_gap_and_no_repetition() -> None:
    story = Story()
    engine = Engine(slots=2)
    engine.add(prompt("first" * 4, 30, ignore_eos=True))
    second = engine.add(prompt("second" * 3, 30, ignore_eos=True))
    while engine.holds:
        engine.scheduler.step()
        for generation_id, event in engine.scheduler.take_events():
            if generation_id == second:
                story.add(event)
            if isinstance(event, Retired):
                engine.ledger.release(engine.holds.pop(generation_id))
    tokens = [event.tokens for event in story.events if isinstance(event, TextDelta)]
    assert tokens == list(range(1, 31))
