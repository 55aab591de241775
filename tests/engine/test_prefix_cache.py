"""What is kept of earlier prompts: used where it is exact, given up where it is in the way."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine import prefix_cache
from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.model_runner import BatchSlice, EngineError
from dflash_trio.engine.prefix_cache import PrefixCache
from dflash_trio.engine.prefix_store import PrefixStore
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.events import Finished, TextDelta
from dflash_trio.generation.request import PreparedPrompt
from tests.engine.engine_helpers import prompt

HEAD = "x" * 100


class Engine:
    def __init__(
        self,
        *,
        slots: int = 2,
        prefixes: int = 4,
        prompts: int = 0,
        shares_cells: bool = True,
        window: int | None = None,
        pool: int | None = None,
        max_ctx: int = 400,
        store: PrefixStore | None = None,
        saving_costs: float = 0.0,
    ) -> None:
        pool = pool or slots * max_ctx
        self.ledger = KVLedger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=8)
        self.runner = ScriptedRunner(
            slots=slots,
            cells=pool,
            shares_cells=shares_cells,
            window=window,
            saving_costs=saving_costs,
        )
        self.scheduler = Scheduler(
            self.runner, self.ledger, chunk=64, prefixes=prefixes, prompts=prompts, store=store
        )
        self.next_id = 1

    def say(self, prepared: PreparedPrompt) -> tuple[str, Finished]:
        return self.say_all([prepared])[0]

    def say_all(
        self, prompts: list[PreparedPrompt], *, cancel_after: int | None = None
    ) -> list[tuple[str, Finished]]:
        """At the same time."""
        holds = []
        first = self.next_id
        for prepared in prompts:
            hold = self.ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens)
            assert hold is not None
            holds.append(hold)
            self.scheduler.add(Sequence(self.next_id, prepared, hold))
            self.next_id += 1
        steps = 0
        while not self.scheduler.idle:
            if steps == cancel_after:
                self.scheduler.cancel(first)
                continue
            self.scheduler.step()
            steps += 1
        texts = dict.fromkeys(range(first, self.next_id), "")
        ends: dict[int, Finished] = {}
        for generation_id, event in self.scheduler.take_events():
            if isinstance(event, TextDelta):
                texts[generation_id] += event.text
            elif isinstance(event, Finished):
                ends[generation_id] = event
        for hold in holds:
            self.ledger.release(hold)
        self.scheduler.check_idle()
        return [(texts[key], ends[key]) for key in texts]

    @property
    def computed(self) -> int:
        return self.runner.decoded_tokens


def cold(prepared: PreparedPrompt) -> str:
    return Engine(prefixes=0).say(prepared)[0]


def cached(finished: Finished) -> int:
    return finished.usage.cached_tokens


KINDS = pytest.mark.parametrize("shares_cells", [True, False])


@KINDS
def test_a_conversation_that_goes_on_computes_only_what_is_new(shares_cells: bool) -> None:
    engine = Engine(shares_cells=shares_cells)
    said, _ = engine.say(prompt(HEAD, 5))
    before = engine.computed
    second = prompt(HEAD + said + "and then?", 5)
    text, finished = engine.say(second)
    assert text == cold(second)
    # The last token that was said had not been decoded.
    assert cached(finished) == len(HEAD) + 4
    assert engine.computed - before == len(second.tokens) - cached(finished) + 4


@KINDS
def test_a_shared_head_is_used_by_prompts_that_go_different_ways(shares_cells: bool) -> None:
    engine = Engine(shares_cells=shares_cells)
    for tail in ("one", "two", "three"):
        text, finished = engine.say(prompt(HEAD + tail, 5))
        assert text == cold(prompt(HEAD + tail, 5))
        assert cached(finished) == (0 if tail == "one" else len(HEAD) + (tail == "three"))


@KINDS
def test_the_same_prompt_again_computes_its_last_token_and_says_the_same(
    shares_cells: bool,
) -> None:
    engine = Engine(shares_cells=shares_cells)
    first, _ = engine.say(prompt(HEAD, 5))
    again, finished = engine.say(prompt(HEAD, 5))
    assert again == first
    assert cached(finished) == len(HEAD) - 1


@KINDS
def test_more_conversations_than_rows_are_kept_and_the_oldest_goes_first(
    shares_cells: bool,
) -> None:
    engine = Engine(slots=1, prefixes=2, shares_cells=shares_cells)
    heads = [letter * 100 for letter in "abc"]
    for head in heads:
        engine.say(prompt(head, 3))
    assert len(engine.scheduler._cache) == 2
    # Asked for from the youngest, so that asking pushes none of the others out before its turn.
    assert cached(engine.say(prompt(heads[2], 3))[1]) == 99
    assert cached(engine.say(prompt(heads[1], 3))[1]) == 99
    assert cached(engine.say(prompt(heads[0], 3))[1]) == 0


def test_a_running_prompt_is_shared_where_cells_are() -> None:
    engine = Engine(slots=2)
    first, second = prompt(HEAD, 40, ignore_eos=True), prompt(HEAD + "tail", 5)
    hold = engine.ledger.try_reserve(first.prompt_tokens, first.max_tokens)
    assert hold is not None
    engine.scheduler.add(Sequence(100, first, hold))
    for _ in range(5):
        engine.scheduler.step()
    used = engine.runner.cells_used
    other = engine.ledger.try_reserve(second.prompt_tokens, second.max_tokens)
    assert other is not None
    engine.scheduler.add(Sequence(101, second, other))
    engine.scheduler.step()
    assert engine.runner.cells_used <= used + 1 + len("tail")
    while not engine.scheduler.idle:
        engine.scheduler.step()
    events = engine.scheduler.take_events()
    text = "".join(e.text for g, e in events if g == 101 and isinstance(e, TextDelta))
    assert text == cold(second)
    (end,) = [e for g, e in events if g == 101 and isinstance(e, Finished)]
    assert cached(end) == len(HEAD)


@KINDS
def test_a_request_that_wants_no_cache_neither_uses_nor_leaves_anything(
    shares_cells: bool,
) -> None:
    engine = Engine(shares_cells=shares_cells)
    engine.say(prompt(HEAD, 5))
    plain = attrs.evolve(prompt(HEAD + "more", 5), cache_prompt=False)
    text, finished = engine.say(plain)
    assert (text, cached(finished)) == (cold(plain), 0)
    # The one before is still there, in the host's memory.
    assert cached(engine.say(prompt(HEAD + "again", 5))[1]) == len(HEAD)
    # Of the plain one there is nothing.
    assert cached(engine.say(prompt(HEAD + "more", 5))[1]) == len(HEAD)


def test_with_no_prefix_to_be_kept_nothing_is() -> None:
    engine = Engine(prefixes=0)
    engine.say(prompt(HEAD, 5))
    assert cached(engine.say(prompt(HEAD, 5))[1]) == 0
    assert engine.runner.cells_used == 0


def test_kept_cells_are_never_in_the_way_of_a_running_sequence() -> None:
    engine = Engine(slots=3, pool=130, max_ctx=120)
    for letter in "abc":
        engine.say(prompt(letter * 60, 3))
    assert engine.runner.cells_used <= 130
    _, finished = engine.say(prompt("d" * 60, 50, ignore_eos=True))
    assert finished.usage.completion_tokens == 50
    assert engine.ledger.statistics().committed == 0


@KINDS
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_cancelled_prefill_leaves_no_more_than_was_computed(
    shares_cells: bool, after: int
) -> None:
    engine = Engine(slots=1, shares_cells=shares_cells)
    long = prompt("y" * 200, 5)
    engine.say_all([long], cancel_after=after)
    text, finished = engine.say(long)
    assert text == cold(long)
    assert cached(finished) == 64 * after


def test_a_row_that_holds_less_than_it_should_is_not_kept() -> None:
    runner = ScriptedRunner(slots=1)
    cache = PrefixCache(runner, slots=1, prefixes=2, prompts=0)
    row, _ = cache.begin((1, 2, 3))
    runner.decode([BatchSlice(row, 0, (1, 2), 0)])

    class Thrown(ScriptedRunner):
        def rewind(self, seq_id: int, length: int) -> None:
            super().rewind(seq_id, min(length, self.sequence_length(seq_id)))

    runner.__class__ = Thrown
    cache.end(row, (1, 2, 3), keep=True)
    assert len(cache) == 0
    cache.check_idle()


def test_a_cache_that_cannot_go_back_loses_what_an_aborted_step_left_there() -> None:
    class Onward(ScriptedRunner):
        def rewind(self, seq_id: int, length: int) -> None:
            if length not in (0, self.sequence_length(seq_id)):
                raise EngineError("this cache cannot go back")
            super().rewind(seq_id, length)

    runner = Onward(slots=1, window=0)
    cache = PrefixCache(runner, slots=1, prefixes=2, prompts=0)
    row, _ = cache.begin((1, 2, 3))
    runner.decode([BatchSlice(row, 0, (1, 2, 3), 0)])
    cache.end(row, (1, 2), keep=True)
    assert len(cache) == 0
    cache.check_idle()


@KINDS
def test_what_a_window_has_forgotten_is_not_used(shares_cells: bool) -> None:
    engine = Engine(slots=1, shares_cells=shares_cells, window=10)
    engine.say(prompt(HEAD, 5))
    near = prompt(HEAD + "different", 5)
    text, finished = engine.say(near)
    assert (text, cached(finished)) == (cold(near), len(HEAD))
    far = prompt(HEAD[:50] + "different", 5)
    text, finished = engine.say(far)
    assert (text, cached(finished)) == (cold(far), 0)


def test_whole_prompts_are_kept_beside_what_became_of_them() -> None:
    engine = Engine(slots=1, prefixes=0, prompts=2, window=0)
    for letter in "abc":
        engine.say(prompt(letter * 100, 5))
    assert len(engine.scheduler._cache) == 2
    # One token is computed again for its output, which a cache that cannot go back refuses.
    assert cached(engine.say(prompt("c" * 100 + "d", 5))[1]) == 100
    assert cached(engine.say(prompt("a" * 100 + "d", 5))[1]) == 0


@pytest.mark.parametrize("prefixes", [0, 8])
@pytest.mark.parametrize("shares_cells", [True, False])
@pytest.mark.parametrize("rewinds", [True, False])
def test_a_whole_prompt_is_kept_once_and_the_one_that_was_not_used_for_longest_goes(
    rewinds: bool, shares_cells: bool, prefixes: int
) -> None:
    runner = ScriptedRunner(slots=4, shares_cells=shares_cells, rewinds_freely=rewinds)
    cache = PrefixCache(runner, slots=4, prefixes=prefixes, prompts=3)
    for number, letter in enumerate(b"bcaaaabad"):
        tokens = [letter] * 100
        row, length = cache.begin(tokens)
        runner.decode([BatchSlice(row, length, tokens[length:], 1)])
        cache.computed(row, tokens)
        answer = [number] * 6
        runner.decode([BatchSlice(row, 100, answer, 1)])
        cache.end(row, [*tokens, *answer], keep=True)
    kept = [chr(saved.tokens[0]) for saved in cache._saved.values() if saved.is_prompt]
    assert kept == ["b", "a", "d"]


def test_the_memory_for_what_is_saved_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(slots=1, prefixes=50)
    for number in range(20):
        engine.say(prompt(f"{number:03}" * 40, 3))
    cache = engine.scheduler._cache
    assert len(cache) == 20
    monkeypatch.setattr(prefix_cache, "MOST_SAVED_BYTES", cache.saved_bytes // 4)
    engine.say(prompt("z" * 100, 3))
    assert 0 < cache.saved_bytes <= prefix_cache.MOST_SAVED_BYTES
    assert len(cache) < 8


def test_of_many_that_share_most_no_copies_are_saved_and_the_shared_beginning_is_kept() -> None:
    engine = Engine(slots=2, prefixes=8)
    for letter in "abcdef":
        usage = engine.say(prompt(HEAD + letter * (len(HEAD) - 10), 3))[1]
        assert cached(usage) == (0 if letter == "a" else len(HEAD))
    assert engine.scheduler._cache.saved_bytes == 0
    # What nobody else begins with is saved, head and all.
    for letter in "ghi":
        engine.say(prompt(letter * 2 * len(HEAD), 3))
    assert engine.scheduler._cache.saved_bytes > 0
    assert cached(engine.say(prompt(HEAD + "more", 3))[1]) == len(HEAD)


def test_a_new_conversation_has_the_cells_to_itself_and_the_others_are_had_again() -> None:
    engine = Engine(slots=3)
    engine.say(prompt("a" * 100, 3))
    engine.say(prompt("short", 3))
    engine.say(prompt("b" * 100, 3))
    cache = engine.scheduler._cache
    assert cache.cells < 150  # b's, and the short one's, which is not worth a copy
    assert cached(engine.say(prompt("short one", 3))[1]) == 5
    assert cached(engine.say(prompt("b" * 100 + "c", 3))[1]) == 100
    assert cached(engine.say(prompt("a" * 100 + "c", 3))[1]) == 100


def test_where_saving_is_dear_idle_rows_stay_where_they_are() -> None:
    engine = Engine(slots=3, saving_costs=20.0)
    engine.say(prompt("a" * 100, 3))
    engine.say(prompt("b" * 100, 3))
    assert engine.scheduler._cache.cells >= 200
    assert engine.scheduler._cache.saved_bytes == 0


def test_a_saved_row_takes_its_cells_from_idle_ones() -> None:
    engine = Engine(slots=3, pool=300, max_ctx=280)
    engine.say(prompt("a" * 150, 3))
    engine.say(prompt("b" * 200, 3))  # for which the first one is saved
    again = prompt("a" * 150 + "more", 3)
    text, finished = engine.say(again)
    assert (text, cached(finished)) == (cold(again), 150)


def test_a_short_common_beginning_does_not_cost_a_long_kept_one_where_saving_is_dear() -> None:
    engine = Engine(slots=2, shares_cells=False, saving_costs=20.0)
    engine.say(prompt("<s>" + HEAD, 5))
    assert cached(engine.say(prompt("<s>something else", 5))[1]) == 0
    assert cached(engine.say(prompt("<s>" + HEAD + "more", 5))[1]) == len(HEAD) + 3
    assert engine.scheduler._cache.saved_bytes == 0


def test_a_short_common_beginning_is_used_where_saving_the_rest_costs_less() -> None:
    engine = Engine(slots=2, shares_cells=False, saving_costs=1.0)
    engine.say(prompt("<s>" + HEAD, 5))
    assert cached(engine.say(prompt("<s>something else", 5))[1]) == 3
    assert cached(engine.say(prompt("<s>" + HEAD + "more", 5))[1]) == len(HEAD) + 3


def test_what_is_computed_faster_than_saved_is_let_go() -> None:
    # A row of 104 tokens, which one in four times is asked for again.
    for costs, kept in ((27.0, 0), (26.0, len(HEAD))):
        engine = Engine(slots=1, saving_costs=costs)
        engine.say(prompt(HEAD, 5))
        engine.say(prompt("y" * 100, 5))
        assert cached(engine.say(prompt(HEAD + "more", 5))[1]) == kept


def test_leaks_are_found() -> None:
    runner = ScriptedRunner(slots=2)
    cache = PrefixCache(runner, slots=2, prefixes=2, prompts=0)
    row = cache.take_row()
    with pytest.raises(EngineError, match="row"):
        cache.check_idle()
    cache.end(row, (), keep=False)
    cache.check_idle()
    runner.decode([BatchSlice(1, 0, (1,), 0)])
    with pytest.raises(EngineError, match="cells leaked"):
        cache.check_idle()
    cache.take_row()
    cache.take_row()
    with pytest.raises(EngineError, match="more sequences than rows"):
        cache.take_row()


turns = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose conversation
        st.integers(1, 90),  # new tokens
        st.integers(1, 12),  # answer
        st.one_of(st.none(), st.integers(0, 6)),  # steps until the client leaves
        st.booleans(),  # wants the cache
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    turns,
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 2),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 40)),
    st.randoms(use_true_random=False),
)
def test_warm_answers_are_the_cold_ones_whatever_was_kept_before(
    said: list[tuple[int, int, int, int | None, bool]],
    slots: int,
    prefixes: int,
    prompts: int,
    shares_cells: bool,
    window: int | None,
    dice: random.Random,
) -> None:
    engine = Engine(
        slots=slots,
        prefixes=prefixes,
        prompts=prompts,
        shares_cells=shares_cells,
        window=window,
        pool=None if not shares_cells else max(400, slots * 250),
    )
    conversations = {who: [97 + who % 2] * 70 for who in range(4)}
    for who, new, answer, leaves, wants in said:
        tokens = [*conversations[who], *(97 + dice.randrange(3) for _ in range(new))][-250:]
        prepared = attrs.evolve(prompt(tokens, answer, ignore_eos=True), cache_prompt=wants)
        ((text, finished),) = engine.say_all([prepared], cancel_after=leaves)
        expected = cold(prepared)
        assert expected.startswith(text)
        if finished.reason != "cancelled":
            assert text == expected
        assert 0 <= cached(finished) < len(tokens)
        assert len(engine.scheduler._cache) <= prefixes + prompts
        conversations[who] = [*tokens, *text.encode()]
