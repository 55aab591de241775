"""Prompts by turns: nobody is starved, and nobody who runs waits for more than a chunk."""

from __future__ import annotations

from typing import Any, cast

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.model_runner import Batching
from dflash_trio.engine.prefill_shares import MOST_STEPS, RIDES, PrefillTurns, prefill_shares

CPU = Batching(full=32, apart=True)
GPU = Batching(apart=True)
TOGETHER = Batching()


@attrs.define(eq=False)
class Prompt:
    to_prefill: int
    computed: int = 0

    @property
    def prefill_end(self) -> int:
        return self.to_prefill


def shared(
    prompts: list[Prompt],
    budget: int,
    *,
    chunk: int = 0,
    sure: int = 0,
    full: int = 10**6,
    first: bool = False,
) -> list[int]:
    """Each prompt's share."""
    found = prefill_shares(
        cast(Any, prompts), budget, chunk=chunk or budget, sure=sure, full=full, oldest_first=first
    )
    shares = {id(prompt): share for prompt, share in found}
    assert [prompt for prompt, _ in found] == [p for p in prompts if id(p) in shares]
    return [shares.get(id(prompt), 0) for prompt in prompts]


def test_who_needs_least_comes_first_and_whole() -> None:
    assert shared([Prompt(300), Prompt(40), Prompt(20)], 100) == [40, 40, 20]
    assert shared([Prompt(60), Prompt(60), Prompt(60)], 130) == [60, 60, 0]


def test_a_prompt_longer_than_a_step_is_cut_though_it_is_not_the_oldest() -> None:
    assert shared([Prompt(20), Prompt(400)], 100) == [20, 80]


def test_a_step_that_is_full_takes_no_further_prompt() -> None:
    assert shared([Prompt(36), Prompt(36), Prompt(8)], 512, full=32) == [36, 0, 8]
    assert shared([Prompt(36), Prompt(36)], 512, full=32) == [36, 0]


def test_some_of_a_step_is_the_oldest_ones_for_sure() -> None:
    assert shared([Prompt(300), Prompt(40), Prompt(40)], 100, sure=50) == [60, 40, 0]
    assert shared([Prompt(300), Prompt(40)], 100, sure=512) == [100, 0]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=9),
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(1, 100),
)
def test_shares_are_never_empty_nor_too_large(
    needs: list[int], budget: int, sure: int, full: int
) -> None:
    shares = shared([Prompt(need) for need in needs], budget, sure=sure, full=full)
    assert 0 < sum(shares) <= budget
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    if full > sum(needs):
        assert shares[0] >= min(sure, needs[0], budget)


def advance(shares: list[tuple[Any, int]]) -> int:
    for prompt, share in shares:
        prompt.computed += share
    return sum(share for _, share in shares)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 90), max_size=3), max_size=30),
    st.integers(1, 70),
    st.sampled_from([CPU, GPU, TOGETHER]),
)
def test_who_runs_waits_for_a_chunk_and_a_few_steps_at_most(
    arrivals: list[list[int]], chunk: int, batching: Batching
) -> None:
    turns = PrefillTurns(chunk, batching)
    waiting: list[Prompt] = []
    tokens = steps = 0
    while arrivals or waiting:
        waiting += [Prompt(need) for need in (arrivals.pop(0) if arrivals else ())]
        shares, decodes = turns.next(cast(Any, waiting), decoding=True)
        tokens += advance(cast(Any, shares))
        steps += 1
        waiting = [prompt for prompt in waiting if prompt.computed < prompt.to_prefill]
        assert tokens <= chunk
        assert steps <= MOST_STEPS + 1
        if decodes:
            tokens = steps = 0


def test_what_fits_into_a_chunk_is_not_cut_but_for_the_oldest() -> None:
    assert shared([Prompt(60), Prompt(33)], 62, chunk=512, sure=60, full=32) == [60, 0]
    assert shared([Prompt(60), Prompt(33)], 20, chunk=512) == [20, 0]


def test_the_oldest_comes_first_where_it_was_passed_over() -> None:
    assert shared([Prompt(100), Prompt(40)], 512, full=32, first=True) == [100, 0]


@settings(deadline=None, max_examples=100)
@given(
    chunk=st.sampled_from([1, 16, 128, 512]),
    need=st.integers(1, 700),
    short=st.integers(1, 90),
    batching=st.sampled_from([CPU, GPU, TOGETHER]),
    decoding=st.booleans(),
)
def test_a_flood_of_shorter_prompts_does_not_starve_the_oldest(
    chunk: int, need: int, short: int, batching: Batching, decoding: bool
) -> None:
    turns = PrefillTurns(chunk, batching)
    oldest = Prompt(need)
    waiting = [oldest]
    passed_over = steps = 0
    while oldest.computed < need:
        waiting += [Prompt(short)] * (2 - len(waiting))
        waiting += [Prompt(min(short, need - oldest.computed))] * (len(waiting) < 3)
        before = oldest.computed
        shares, _ = turns.next(cast(Any, waiting), decoding=decoding)
        advance(cast(Any, shares))
        waiting = [prompt for prompt in waiting if prompt.computed < prompt.to_prefill]
        passed_over = 0 if oldest.computed > before else passed_over + 1
        steps += 1
        assert passed_over <= 2 * MOST_STEPS
    # Each of its turns is a half of a chunk at least, or what is left of one, or all that it wants.
    assert steps <= 2 * MOST_STEPS * (need + 1)


def test_few_tokens_go_with_the_others_next_tokens() -> None:
    turns = PrefillTurns(512, GPU)
    few: Any = [Prompt(RIDES)]
    assert turns.next(few, decoding=True) == ([(few[0], RIDES)], True)
    assert turns.next(few, decoding=False) == ([(few[0], RIDES)], False)


def test_with_no_prompt_everybody_who_runs_goes_on() -> None:
    assert PrefillTurns(512, CPU).next([], decoding=True) == ([], True)


@settings(deadline=None)
@given(
    before=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    need=st.integers(1, 300),
    batching=st.sampled_from([CPU, GPU, TOGETHER]),
)
def test_a_prompt_alone_has_the_same_portions_whatever_came_before(
    before: list[int], need: int, batching: Batching
) -> None:
    turns = PrefillTurns(64, batching)
    waiting = [Prompt(tokens) for tokens in before]
    while waiting:
        advance(cast(Any, turns.next(cast(Any, waiting), decoding=len(waiting) % 2 == 0)[0]))
        waiting = [prompt for prompt in waiting if prompt.computed < prompt.to_prefill]
    portions, alone = [], Prompt(need)
    while alone.computed < need:
        portions.append(advance(cast(Any, turns.next(cast(Any, [alone]), decoding=False)[0])))
    assert portions == [64] * (need // 64) + [need % 64] * bool(need % 64)
