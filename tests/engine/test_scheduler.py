"""What goes into a step and what comes out of it, for one sequence and for many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.model_runner import Batching, BatchSlice, DecodeOutcome, EngineError
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import EOG, Script, ScriptedRunner
from dflash_trio.engine.sequence import Sequence as EngineSequence
from dflash_trio.generation.events import Failed, Finished, Retired, TextDelta
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.engine.engine_helpers import GREEDY, Story, prompt, reserve
from tests.support.scripted import answer


class Shape(NamedTuple):
    """One slice of a batch, as a test wants to see it."""

    generation: int
    position: int
    tokens: int
    outputs: int


class Engine:
    """A scheduler on a scripted runner, with its books and everything it told."""

    def __init__(
        self,
        *,
        slots: int = 4,
        max_ctx: int = 200,
        pool: int | None = None,
        cells: int | None = None,
        headroom: int = 16,
        chunk: int = 32,
        batching: Batching | None = None,
        script: Script | None = None,
    ) -> None:
        """``cells``: what the cache really has, when that is not what the ledger promises."""
        pool = slots * max_ctx if pool is None else pool
        self.ledger = KVLedger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=headroom)
        self.batches: list[list[BatchSlice]] = []
        self.before_decode: Callable[[], None] = lambda: None
        self.runner = ScriptedRunner(
            slots=slots,
            cells=pool if cells is None else cells,
            batching=batching,
            script=script,
            before_decode=self._record,
        )
        self.named: list[frozenset[int]] = []
        self.scheduler = Scheduler(
            self.runner,
            self.ledger,
            chunk=chunk,
            on_batch=lambda named, _: self.named.append(named),
        )
        self.stories: dict[int, Story] = {}
        self.holds: dict[int, Hold] = {}
        self.sequences: dict[int, EngineSequence] = {}

    def _record(self, batch: Sequence[BatchSlice]) -> None:
        self.batches.append(list(batch))
        self.before_decode()

    def add(self, prepared: PreparedPrompt) -> int:
        hold = reserve(self.ledger, prepared)
        generation_id = len(self.stories) + 1
        self.stories[generation_id] = Story()
        self.holds[generation_id] = hold
        sequence = EngineSequence(generation_id, prepared, hold)
        self.sequences[generation_id] = sequence
        self.scheduler.add(sequence)
        return generation_id

    def listen(self) -> None:
        """Hear what happened; capacity goes back as soon as somebody is retired."""
        for generation_id, event in self.scheduler.take_events():
            self.stories[generation_id].add(event)
            if isinstance(event, Retired):
                self.ledger.release(self.holds[generation_id])

    def step(self) -> None:
        self.scheduler.step()
        self.listen()

    def run(self, limit: int = 2000) -> None:
        """Until everybody is retired."""
        self.listen()
        while not self.scheduler.idle:
            assert limit, "no end in sight"
            limit -= 1
            self.step()
        self.check_empty()

    def until_decoding(self, generation_id: int) -> None:
        while not self.sequences[generation_id].generated:
            self.step()

    def shapes(self) -> list[Shape]:
        """The last batch."""
        owners = {s.seq_id: g for g, s in self.sequences.items() if s.seq_id is not None}
        return [
            Shape(owners.get(s.seq_id, -1), s.position, len(s.tokens), s.outputs)
            for s in self.batches[-1]
        ]

    def check_empty(self) -> None:
        self.scheduler.check_idle()
        assert self.runner.cells_used == 0
        assert self.runner.open_samplers == 0
        statistics = self.ledger.statistics()
        assert (statistics.slots_reserved, statistics.committed) == (0, 0)
        assert all(story.retired for story in self.stories.values())
        assert self.scheduler.statistics().cells_used == 0

    def say(self, prepared: PreparedPrompt) -> Story:
        """One generation from start to end."""
        generation_id = self.add(prepared)
        self.run()
        return self.stories[generation_id]


# ---------------------------------------------------------------------- continuous batching


def test_a_new_prompt_joins_the_running_ones_in_the_same_batch() -> None:
    engine = Engine()
    first = engine.add(prompt("first", 20))
    engine.step()
    assert engine.shapes() == [Shape(first, 0, 5, 1)]
    second = engine.add(prompt("second", 20))
    engine.step()
    assert engine.shapes() == [Shape(first, 5, 1, 1), Shape(second, 0, 6, 1)]
    engine.step()
    assert engine.shapes() == [Shape(first, 6, 1, 1), Shape(second, 6, 1, 1)]


def test_a_long_prompt_enters_chunk_by_chunk_and_wants_an_output_only_at_its_end() -> None:
    engine = Engine(chunk=32)
    long = engine.add(prompt("x" * 70, 1))
    seen = []
    while not engine.scheduler.idle:
        engine.scheduler.step()
        seen += engine.batches[-1]
        engine.listen()
    assert [(s.position, len(s.tokens), s.outputs) for s in seen] == [
        (0, 32, 0),
        (32, 32, 0),
        (64, 6, 1),
    ]
    assert engine.stories[long].finished.usage.completion_tokens == 1


def test_a_running_sequence_gets_a_token_in_every_step_of_a_long_prefill() -> None:
    engine = Engine(chunk=8)
    talker = engine.add(prompt("hi", 100))
    engine.until_decoding(talker)
    engine.add(prompt("x" * 80, 4))
    for _ in range(10):
        before = engine.sequences[talker].generated
        engine.step()
        assert engine.sequences[talker].generated == before + 1


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = Engine(chunk=32)
    long = engine.add(prompt("x" * 150, 4))
    short = engine.add(prompt("short", 4))
    engine.step()
    # What the short one leaves over goes to the long one, although that came first.
    assert engine.shapes() == [Shape(long, 0, 27, 0), Shape(short, 0, 5, 1)]
    assert engine.stories[short].text


def test_what_a_short_prompt_leaves_over_goes_to_those_after_it() -> None:
    engine = Engine(chunk=32)
    engine.add(prompt("xx", 4))
    long = engine.add(prompt("x" * 150, 4))
    engine.step()
    assert engine.shapes()[1] == Shape(long, 0, 30, 0)


def test_with_more_prompts_than_the_chunk_has_tokens_the_oldest_come_whole() -> None:
    engine = Engine(slots=4, chunk=7)
    first, second, third, fourth = (engine.add(prompt("abc", 4)) for _ in range(4))
    engine.step()
    assert engine.shapes() == [Shape(first, 0, 3, 1), Shape(second, 0, 3, 1)]
    engine.step()
    assert [shape.generation for shape in engine.shapes()] == [first, second, third, fourth]
    engine.run()


def test_where_it_costs_nothing_each_prompt_has_its_first_token_before_the_next_one_begins() -> (
    None
):
    engine = Engine(slots=4, batching=Batching(full=8, apart=True), chunk=64)
    talker = engine.add(prompt("hi", 100))
    engine.until_decoding(talker)
    others = [engine.add(prompt(letter * 10, 4)) for letter in "abc"]
    for other in others:
        engine.step()
        assert engine.shapes() == [Shape(other, 0, 10, 1)]
        assert engine.stories[other].text
    before = engine.sequences[talker].generated
    engine.step()
    assert [shape.generation for shape in engine.shapes()] == [talker, *others]
    assert engine.sequences[talker].generated == before + 1
    engine.run()


def test_where_steps_are_apart_a_running_sequence_has_a_token_after_each_chunk() -> None:
    engine = Engine(chunk=16, batching=Batching(apart=True))
    talker = engine.add(prompt("hi", 100))
    engine.until_decoding(talker)
    long = engine.add(prompt("x" * 80, 4))
    for part in range(5):
        engine.step()
        assert engine.shapes() == [Shape(long, 16 * part, 16, int(part == 4))]
        engine.step()
        assert engine.shapes()[0].generation == talker
    engine.run()


def test_a_prompt_without_cells_is_not_the_end_of_those_who_were_not_in_its_step() -> None:
    engine = Engine(slots=2, cells=40, chunk=64, batching=Batching(apart=True))
    talker = engine.add(prompt("hi", 20))
    engine.until_decoding(talker)
    unlucky = engine.add(prompt("x" * 60, 4))
    assert engine.scheduler.step(), "the other one goes on"
    engine.run()
    assert engine.stories[unlucky].finished.detail == "no_free_cells"
    assert engine.stories[talker].finished.usage.completion_tokens == 20


def test_prefill_tokens_of_a_step_never_exceed_the_chunk() -> None:
    engine = Engine(slots=4, chunk=7)
    for length in (50, 3, 20, 90):
        engine.add(prompt("y" * length, 12))
    engine.run()
    for batch in engine.batches:
        prefill = sum(len(s.tokens) for s in batch if len(s.tokens) > 1 or not s.outputs)
        assert prefill <= 7
        assert sum(len(s.tokens) for s in batch) <= 7 + 4


def test_the_generations_of_a_batch_are_named_while_it_is_decoded_and_nobody_after() -> None:
    engine = Engine()
    ids = {engine.add(prompt("a", 2)), engine.add(prompt("b", 2))}
    during: list[frozenset[int]] = []
    engine.before_decode = lambda: during.append(engine.named[-1])
    engine.step()
    assert during == [frozenset(ids)]
    assert engine.named[-1] == frozenset()


def test_nobody_is_named_after_a_decode_that_failed() -> None:
    engine = Engine()
    engine.add(prompt("a", 2))

    def fail() -> None:
        raise EngineError("lost")

    engine.before_decode = fail
    with pytest.raises(EngineError):
        engine.scheduler.step()
    assert engine.named[-1] == frozenset()


# ------------------------------------------------------------------------------- the limits


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 40])
def test_max_tokens_is_met_exactly(limit: int) -> None:
    story = Engine(headroom=4).say(prompt("hello", limit))
    assert story.finished == Finished("length", story.finished.usage)
    assert story.finished.usage.prompt_tokens == 5
    assert story.finished.usage.completion_tokens == limit
    assert len(story.text) == limit
    assert [e.tokens for e in story.events if isinstance(e, TextDelta)] == [*range(1, limit + 1)]


def test_the_last_sampled_token_is_not_decoded() -> None:
    engine = Engine()
    engine.say(prompt("hello", 3))
    assert engine.runner.decoded_tokens == 5 + 2


def test_a_prompt_one_below_the_context_gets_exactly_one_token() -> None:
    story = Engine(slots=1, max_ctx=50).say(prompt("x" * 49, 20))
    assert story.finished.reason == "length"
    assert story.finished.detail == "context_full"
    assert story.finished.usage.completion_tokens == 1
    assert len(story.text) == 1


@pytest.mark.parametrize("length", [1, 10, 30, 47, 48, 49])
@pytest.mark.parametrize("headroom", [1, 3, 128])
def test_prompt_and_answer_together_fill_the_context_and_never_exceed_it(
    length: int, headroom: int
) -> None:
    engine = Engine(slots=2, max_ctx=50, headroom=headroom)
    usage = engine.say(prompt("x" * length, 1000)).finished.usage
    assert usage.prompt_tokens + usage.completion_tokens == 50
    assert all(s.position + len(s.tokens) <= 50 for batch in engine.batches for s in batch)


def test_a_pool_smaller_than_the_context_bounds_a_lone_sequence() -> None:
    finished = Engine(slots=2, max_ctx=50, pool=30).say(prompt("x" * 10, 1000)).finished
    assert finished.usage.completion_tokens == 20
    assert (finished.reason, finished.detail) == ("length", "context_full")


def test_a_limit_met_together_with_the_context_is_an_ordinary_limit() -> None:
    finished = Engine(slots=1, max_ctx=20).say(prompt("x" * 10, 10)).finished
    assert (finished.reason, finished.detail) == ("length", None)


def test_nobody_holds_more_cells_than_were_promised() -> None:
    engine = Engine(slots=2, max_ctx=60, headroom=3)
    generation_id = engine.add(prompt("hello", 50))
    sequence = engine.sequences[generation_id]
    while not engine.scheduler.idle:
        engine.scheduler.step()
        assert sequence.computed <= sequence.hold.cells <= 60
        engine.listen()
    engine.check_empty()


# ------------------------------------------------------------------ the pool runs out of cells


def test_when_the_pool_is_out_everybody_still_comes_to_the_end_of_the_room() -> None:
    engine = Engine(slots=2, max_ctx=40, pool=40, headroom=2)
    engine.add(prompt("a" * 10, 100))
    engine.add(prompt("b" * 10, 100))
    engine.run()
    for story in engine.stories.values():
        assert story.finished.detail == "context_full"
        assert len(story.text) == story.finished.usage.completion_tokens == 30


def test_an_extension_in_part_is_used_to_its_last_cell_and_then_others_are_waited_for() -> None:
    engine = Engine(slots=2, max_ctx=40, pool=30, headroom=8)
    generation_id = engine.add(prompt("a" * 10, 15))
    other = reserve(engine.ledger, prompt("x", 8))  # somebody outside holds nine
    sequence = engine.sequences[generation_id]
    while engine.scheduler.step():
        engine.listen()
    # Its 21 cells hold the prompt and eleven answers; the twelfth needed none to be sampled.
    assert sequence.generated == 12
    assert sequence.hold.paused
    assert not engine.scheduler.step()
    engine.ledger.release(other)
    engine.run()
    assert engine.stories[generation_id].finished.usage.completion_tokens == 15
    assert engine.stories[generation_id].finished.detail is None


def test_within_its_promise_a_generation_never_suffers_from_a_neighbour() -> None:
    engine = Engine(slots=2, max_ctx=40, pool=40, headroom=8)
    modest = engine.add(prompt("a" * 10, 8))
    engine.add(prompt("b" * 10, 100))
    engine.run()
    assert engine.stories[modest].finished.usage.completion_tokens == 8
    assert engine.stories[modest].finished.detail is None


def test_cells_that_the_cache_lacks_despite_the_promise_are_taken_from_the_newest() -> None:
    engine = Engine(slots=3, max_ctx=40, cells=25)
    first, second = engine.add(prompt("a" * 10, 5)), engine.add(prompt("b" * 10, 5))
    newest = engine.add(prompt("c" * 10, 5))
    engine.run()
    assert engine.stories[newest].finished.detail == "no_free_cells"
    assert engine.stories[newest].finished.usage.completion_tokens == 0
    assert engine.stories[first].finished.usage.completion_tokens == 5
    # Ten and ten tokens and five answers each are two more than the cache has.
    assert engine.stories[second].finished.usage.completion_tokens >= 2


def test_a_lone_generation_that_the_cache_cannot_hold_ends_by_itself() -> None:
    engine = Engine(slots=1, max_ctx=40, cells=12, chunk=8)
    story = engine.say(prompt("a" * 20, 5))
    assert (story.finished.reason, story.finished.detail) == ("length", "no_free_cells")


# --------------------------------------------------------------------- stop strings, end of turn


def test_a_stop_string_across_tokens_ends_the_answer_and_is_never_shown() -> None:
    story = Engine(script=answer("one two STOP three")).say(prompt("q>", 50, stop=("STOP",)))
    assert story.text == "one two "
    assert story.finished.reason == "stop"
    assert story.finished.stop_sequence == "STOP"
    assert story.finished.usage.completion_tokens == len("one two STOP")


def test_no_part_of_a_stop_string_is_told_before_it_is_decided() -> None:
    engine = Engine(script=answer("abSTx"))
    generation_id = engine.add(prompt("q>", 50, stop=("STOP",)))
    for _ in range(4):
        engine.step()
    assert engine.stories[generation_id].text == "ab"
    engine.step()
    assert engine.stories[generation_id].text == "abSTx"


def test_a_stop_string_in_the_prompt_stops_nothing() -> None:
    assert Engine(script=answer("fine")).say(prompt("STOP ST>", 9, stop=("STOP",))).text == "fine"


def test_held_text_is_flushed_when_the_turn_ends() -> None:
    story = Engine(script=answer("abST")).say(prompt("q>", 50, stop=("STOP",)))
    assert story.text == "abST"
    assert (story.finished.reason, story.finished.stop_sequence) == ("stop", None)


def test_held_text_is_flushed_at_max_tokens() -> None:
    story = Engine(script=answer("abSTOP")).say(prompt("q>", 4, stop=("STOP",)))
    assert story.text == "abST"
    assert story.finished.reason == "length"


def test_held_text_is_flushed_when_the_context_is_full() -> None:
    story = Engine(slots=1, max_ctx=6, script=answer("abSTOP")).say(
        prompt("q>", 50, stop=("STOP",))
    )
    assert story.text == "abST"
    assert story.finished.detail == "context_full"


def test_held_text_is_flushed_when_no_cells_are_free() -> None:
    # The cache has fewer cells than the ledger promises.
    engine = Engine(slots=1, max_ctx=100, cells=9, script=answer("abcdefgh"))
    story = engine.say(prompt("x>", 100, stop=("gh!",)))
    assert story.text == "abcdefgh"
    assert story.finished.detail == "no_free_cells"


def test_held_text_is_flushed_at_a_shutdown() -> None:
    engine = Engine(script=answer("abSTOP"))
    generation_id = engine.add(prompt("q>", 50, stop=("STOP",)))
    for _ in range(4):
        engine.step()
    engine.scheduler.finalize_all()
    engine.run()
    assert engine.stories[generation_id].text == "abST"
    assert engine.stories[generation_id].finished.detail == "server_shutdown"


def test_a_stop_string_completed_by_the_last_allowed_token_counts_as_a_stop() -> None:
    story = Engine(script=answer("abSTOP")).say(prompt("q>", 6, stop=("STOP",)))
    assert (story.finished.reason, story.finished.stop_sequence) == ("stop", "STOP")
    assert story.text == "ab"


def test_the_end_of_turn_counts_as_a_token_and_shows_nothing() -> None:
    story = Engine(script=answer("abc")).say(prompt("q>", 50))
    assert story.text == "abc"
    assert story.finished.reason == "stop"
    assert story.finished.usage.completion_tokens == 4


def test_an_empty_answer_is_an_answer() -> None:
    story = Engine(script=answer("")).say(prompt("q>", 50))
    assert story.events[:-1] == [story.finished]
    assert story.finished.usage.completion_tokens == 1


def test_ignore_eos_goes_on_past_the_end_of_turn() -> None:
    def script(history: bytes, length: int) -> int:
        return EOG if length % 3 == 0 else 97

    engine = Engine(script=script)
    story = engine.say(prompt("q>", 9, ignore_eos=True))
    assert story.finished.reason == "length"
    assert story.finished.usage.completion_tokens == 9
    assert story.text == "aaaaaa"


def test_a_character_of_several_tokens_is_told_whole() -> None:
    story = Engine(script=answer("a\u00e9\U0001f600b")).say(prompt("q>", 50))
    texts = [event.text for event in story.events if isinstance(event, TextDelta)]
    assert texts == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b"]


def test_a_character_cut_by_the_limit_is_left_out() -> None:
    story = Engine(script=answer("a\U0001f600")).say(prompt("q>", 3))
    assert story.text == "a"
    assert story.finished.usage.completion_tokens == 3


# -------------------------------------------------------------- cancellation, shutdown, failure


def cancel_now(engine: Engine, generation_id: int) -> Story:
    """Cancel and check, before any further step, that everything of it is given back."""
    sequence = engine.sequences[generation_id]
    row = sequence.seq_id
    engine.scheduler.cancel(generation_id)
    if row is not None:
        assert engine.runner.sequence_length(row) == 0
    assert sequence.sampler is None
    engine.listen()
    story = engine.stories[generation_id]
    assert story.finished.reason == "cancelled"
    return story


def test_cancelling_a_queued_generation_takes_it_out_before_it_ever_ran() -> None:
    engine = Engine()
    generation_id = engine.add(prompt("abc"))
    assert cancel_now(engine, generation_id).finished.usage.completion_tokens == 0
    engine.check_empty()
    assert not engine.batches


def test_cancelling_in_the_prefill_frees_the_cells_before_the_next_step() -> None:
    engine = Engine(chunk=8)
    other = engine.add(prompt("z", 30))
    generation_id = engine.add(prompt("x" * 100))
    engine.step()
    engine.step()
    cancel_now(engine, generation_id)
    engine.step()
    assert [shape.generation for shape in engine.shapes()] == [other]
    engine.run()


def test_cancelling_while_decoding_frees_the_cells_before_the_next_step() -> None:
    engine = Engine()
    generation_id, other = engine.add(prompt("abc", 50)), engine.add(prompt("z", 50))
    engine.until_decoding(generation_id)
    cancel_now(engine, generation_id)
    assert engine.runner.cells_used == engine.sequences[other].computed
    engine.run()


def test_text_held_back_is_not_told_to_a_client_that_left() -> None:
    engine = Engine(script=answer("abSTOP"))
    generation_id = engine.add(prompt("q>", 50, stop=("STOP",)))
    for _ in range(4):
        engine.step()
    assert cancel_now(engine, generation_id).text == "ab"


def test_cancelling_what_is_over_or_never_was_does_nothing() -> None:
    engine = Engine()
    generation_id = engine.add(prompt("abc", 2))
    engine.run()
    engine.scheduler.cancel(generation_id)
    engine.scheduler.cancel(999)
    assert engine.scheduler.take_events() == []


def test_a_freed_row_serves_the_next_generation_from_scratch() -> None:
    engine = Engine(slots=1)
    alone = engine.say(prompt("the same", 9)).text
    other = engine.add(prompt("something else", 30))
    engine.until_decoding(other)
    cancel_now(engine, other)
    assert engine.say(prompt("the same", 9)).text == alone


def test_finalizing_ends_every_generation_properly_whatever_it_was_doing() -> None:
    engine = Engine(slots=3, chunk=8)
    decoding = engine.add(prompt("abc", 50))
    engine.until_decoding(decoding)
    prefilling = engine.add(prompt("x" * 100, 50))
    engine.step()
    queued = engine.add(prompt("q", 50))
    engine.scheduler.finalize_all()
    engine.run()
    for generation_id in (decoding, prefilling, queued):
        finished = engine.stories[generation_id].finished
        assert (finished.reason, finished.detail) == ("length", "server_shutdown")
    assert engine.stories[decoding].finished.usage.completion_tokens == 2
    assert engine.stories[queued].finished.usage.completion_tokens == 0


def test_what_is_submitted_after_finalizing_ends_at_once() -> None:
    engine = Engine()
    engine.scheduler.finalize_all()
    story = engine.say(prompt("late"))
    assert story.finished.detail == "server_shutdown"
    assert not engine.batches


def test_a_lost_engine_fails_and_retires_everybody() -> None:
    engine = Engine(slots=3, chunk=8)
    ids = [engine.add(prompt("abc", 50))]
    engine.until_decoding(ids[0])
    ids += [engine.add(prompt("x" * 50, 50)), engine.add(prompt("q", 50))]
    engine.scheduler.fail_all("the engine failed: lost")
    engine.listen()
    assert engine.scheduler.idle
    assert engine.runner.open_samplers == 0
    for generation_id in ids:
        assert engine.stories[generation_id].failed == Failed("the engine failed: lost")


def test_an_engine_lost_in_the_middle_of_an_ending_gives_that_generation_one_ending() -> None:
    engine = Engine()
    done, other = engine.add(prompt("abc", 1)), engine.add(prompt("abc", 9))

    def refuse(seq_id: int, length: int) -> None:
        raise EngineError("the cache is gone")

    engine.runner.rewind = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        engine.scheduler.step()
    engine.scheduler.fail_all("lost")
    engine.listen()
    assert engine.stories[done].failed.message == "lost"
    assert engine.stories[other].failed.message == "lost"
    assert engine.runner.open_samplers == 0


def test_a_prompt_without_tokens_fails_alone() -> None:
    engine = Engine()
    other = engine.add(prompt("abc", 3))
    empty = engine.add(prompt("", 3))
    engine.run()
    assert "no tokens" in engine.stories[empty].failed.message
    assert engine.stories[other].finished.usage.completion_tokens == 3


def test_an_aborted_step_tells_nothing_and_its_cancelled_generations_leave_nothing() -> None:
    engine = Engine()
    generation_id = engine.add(prompt("abc", 9))
    engine.until_decoding(generation_id)
    told = list(engine.stories[generation_id].events)
    engine.before_decode = engine.runner.abort
    engine.step()
    assert engine.stories[generation_id].events == told
    engine.scheduler.cancel(generation_id)
    engine.run()


def test_check_idle_raises_when_cells_leaked() -> None:
    engine = Engine(slots=2)
    assert engine.runner.decode([BatchSlice(1, 0, (5, 6), 0)]) is DecodeOutcome.DONE
    with pytest.raises(EngineError, match=r"leaked while idle: \{1: 2\}"):
        engine.scheduler.check_idle()


def test_check_idle_raises_when_a_row_leaked() -> None:
    engine = Engine(slots=2)
    engine.scheduler._cache._empty.pop()
    with pytest.raises(EngineError, match="row leaked"):
        engine.scheduler.check_idle()


def test_statistics_count_what_runs_now_and_all_tokens_since_the_start() -> None:
    engine = Engine(chunk=8)
    decoding = engine.add(prompt("abc", 50))
    engine.until_decoding(decoding)
    engine.add(prompt("x" * 20, 50))
    engine.step()
    now = engine.scheduler.statistics()
    assert (now.sequences_decoding, now.sequences_prefilling) == (1, 1)
    assert now.cells_used == engine.runner.cells_used == 4 + 8
    assert (now.prompt_tokens, now.completion_tokens, now.steps) == (3 + 8, 2, 2)


# ------------------------------------------------------------------------- any order of events

SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.5, seed=6, repeat_penalty=1.3, penalty_last_n=8),
]


class Arrival(NamedTuple):
    """One client: when it comes, what it asks, and after how many steps it leaves, if it does."""

    at_step: int
    text: bytes
    max_tokens: int
    stop: tuple[str, ...]
    sampling: int
    leaves_after: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 25),
        text=st.binary(min_size=1, max_size=45),
        max_tokens=st.integers(1, 30),
        stop=st.lists(st.text("abcxyz", min_size=1, max_size=2), max_size=2).map(tuple),
        sampling=st.integers(0, len(SAMPLING) - 1),
        leaves_after=st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=9,
)


def prepared_of(arrival: Arrival) -> PreparedPrompt:
    return prompt(
        tuple(arrival.text),
        arrival.max_tokens,
        sampling=SAMPLING[arrival.sampling],
        stop=arrival.stop,
    )


@settings(max_examples=120, deadline=None)
@given(
    arrivals=arrivals,
    slots=st.integers(1, 4),
    chunk=st.integers(1, 40),
    batching=st.builds(Batching, full=st.sampled_from([1, 8, 1000]), apart=st.booleans()),
    headroom=st.integers(1, 40),
    scarce=st.booleans(),
    finalize_at=st.none() | st.integers(0, 40),
)
def test_any_mix_of_clients_gets_what_each_would_get_alone_and_leaves_nothing(
    arrivals: list[Arrival],
    slots: int,
    chunk: int,
    batching: Batching,
    headroom: int,
    scarce: bool,
    finalize_at: int | None,
) -> None:
    max_ctx = 60
    engine = Engine(
        slots=slots,
        max_ctx=max_ctx,
        pool=max_ctx + 10 if scarce else None,
        headroom=headroom,
        chunk=chunk,
        batching=batching,
    )
    waiting = sorted(arrivals, key=lambda arrival: arrival.at_step)
    who: dict[int, Arrival] = {}
    left: set[int] = set()
    came_at: dict[int, int] = {}
    step = 0
    while waiting or not engine.scheduler.idle:
        if finalize_at == step:
            engine.scheduler.finalize_all()
        while waiting and waiting[0].at_step <= step:
            prepared = prepared_of(waiting[0])
            if not engine.ledger.could_reserve(prepared.prompt_tokens, prepared.max_tokens):
                break  # it waits, and those behind it too
            generation_id = engine.add(prepared)
            who[generation_id], came_at[generation_id] = waiting.pop(0), step
        for generation_id, arrival in who.items():
            leaves = arrival.leaves_after
            if leaves is not None and came_at[generation_id] + leaves == step:
                engine.scheduler.cancel(generation_id)
                left.add(generation_id)
        if not engine.scheduler.idle:
            engine.scheduler.step()
            if engine.batches:
                assert sum(len(s.tokens) for s in engine.batches[-1]) <= chunk + slots
        engine.listen()
        step += 1
        assert step < 3000, "no end in sight"
    engine.check_empty()

    for generation_id, arrival in who.items():
        story = engine.stories[generation_id]
        alone = Engine(slots=1, max_ctx=max_ctx).say(prepared_of(arrival))
        usage = story.finished.usage
        assert usage.prompt_tokens + usage.completion_tokens <= max_ctx
        if story.finished.reason == "cancelled":
            assert generation_id in left
            assert alone.text.startswith(story.text)
        elif story.finished.detail in ("no_free_cells", "server_shutdown"):
            # Cut short: a part, which may end in text that would have been a stop string.
            assert usage.completion_tokens <= alone.finished.usage.completion_tokens
            shown = sum(len(stop) for stop in arrival.stop)
            assert alone.text.startswith(story.text[: max(0, len(story.text) - shown)])
        else:
            assert story.text == alone.text
            assert story.finished == alone.finished


def test_a_promise_grows_by_a_headroom_at_a_time_and_by_no_more_than_is_left_to_say() -> None:
    engine = Engine(slots=2, max_ctx=60, headroom=8)
    generation_id = engine.add(prompt("hello", 20))
    hold = engine.holds[generation_id]
    promised = [hold.cells]
    while not engine.scheduler.idle:
        engine.scheduler.step()
        if hold.cells != promised[-1]:
            promised.append(hold.cells)
        engine.listen()
    # 5 + 8; then 8 more; then what the last answers need.
    assert promised == [13, 21, 24]


def test_penalties_see_the_prompt() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"  # all that this model says of its own accord
    sampling = SamplingParams(temperature=0.0, presence_penalty=100.0, penalty_last_n=-1)
    assert set(Engine().say(prompt(letters, 1)).text) <= set(letters)
    assert not set(Engine().say(prompt(letters, 1, sampling=sampling)).text) & set(letters)
