"""Rows in vain: what they fill, and that nothing is seen of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.llama_fillers import FAR, WORTH, fillers, parts
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from dflash_trio.engine.prefix_cache import PrefixCache
from dflash_trio.engine.scripted_runner import ScriptedRunner
from tests.engine.test_runner_contract import load_llama

MOST = 400
"""Tokens of a part, where a test does not say otherwise."""


def slices(*rows: int, tokens: int = 1) -> list[BatchSlice]:
    return [BatchSlice(row, 5, (7,) * tokens, 1) for row in rows]


def sized(**sizes: int) -> list[BatchSlice]:
    return [BatchSlice(int(row[1:]), 5, (7,) * size, 1) for row, size in sizes.items()]


def filled(
    batch: list[BatchSlice], capacity: int = 400, **lengths: int
) -> list[tuple[int, int, int]]:
    """(row, position, tokens) of each filler."""
    found = fillers(batch, lambda row: lengths.get(f"r{row}", 0), 100, capacity, MOST)
    assert not any(item.outputs for item in found)
    return [(item.seq_id, item.position, len(item.tokens)) for item in found]


def test_the_rows_between_those_of_a_batch_are_filled_where_they_end() -> None:
    assert filled(slices(6, 2, 3), r4=31) == [(4, 31, 1), (5, 0, 1)]
    assert filled(slices(2, 3, 4)) == filled(slices(7)) == []


def test_a_gap_with_a_full_row_stays() -> None:
    assert filled(slices(0, 3), r1=100, r2=99) == []
    assert filled(slices(0, 2, 4), r1=100, r3=99) == [(3, 99, 1)]


def test_rows_of_about_the_same_number_of_tokens_get_the_same() -> None:
    assert filled(sized(r1=38, r2=33, r3=36)) == [(2, 38, 5), (3, 41, 2)]
    assert filled(sized(r1=2, r2=1, r3=1)) == [(2, 6, 1), (3, 6, 1)]


def test_what_costs_more_than_it_spares_is_not_filled() -> None:
    assert filled(sized(r1=90, r2=88, r3=90 - WORTH, r4=1)) == [
        (2, 93, 2),
        (3, 31, WORTH),
    ]
    assert filled(sized(r1=90, r2=89 - WORTH)) == []
    # A gap of a prompt's length is dear: filled up to what all others have, or not at all.
    assert filled(sized(r1=40, r4=40)) == []
    assert filled(sized(r1=30, r4=30)) == [(2, 0, 30), (3, 0, 30)]
    assert filled(sized(r1=33, r4=33)) == []


def test_a_gap_is_not_filled_in_a_row_that_is_far_longer_than_those_beside_it() -> None:
    batch = slices(0, 2)
    assert fillers(batch, lambda _row: FAR, 10_000, 100, MOST)
    assert not fillers(batch, lambda _row: FAR + 6, 10_000, 100, MOST)


def test_no_batch_and_no_row_becomes_too_large() -> None:
    assert filled(slices(0, 3, tokens=16), capacity=64) == [(1, 0, 16), (2, 0, 16)]
    assert filled(slices(0, 3, tokens=16), capacity=63) == []
    assert filled(sized(r1=38, r2=33), capacity=75) == []
    assert filled(sized(r1=95, r2=90)) == [(2, 95, 5)]
    assert filled(sized(r1=96, r2=90)) == []


def test_rows_that_do_not_fit_in_a_part_together_are_not_made_even() -> None:
    batch = sized(r1=40, r2=34)
    assert fillers(batch, lambda _row: 0, 100, 400, most=80) == [BatchSlice(2, 39, (0,) * 6, 0)]
    assert fillers(batch, lambda _row: 0, 100, 400, most=78) == []


def test_the_parts_of_a_batch_are_runs_of_rows_with_as_many_tokens() -> None:
    assert parts({}, MOST) == 0
    assert parts({3: 5}, MOST) == parts({0: 1, 1: 1, 2: 1}, MOST) == 1
    assert parts({0: 1, 1: 1, 2: 34}, MOST) == 2
    assert parts({0: 1, 2: 1}, MOST) == 2
    assert parts({0: 34, 1: 38, 2: 33, 3: 36}, MOST) == 4
    assert parts({0: 5, 1: 3, 2: 5}, MOST) == 3


def test_a_part_holds_as_many_tokens_of_each_row_as_fit() -> None:
    assert parts({0: 8}, 4) == 2
    assert parts({0: 4, 1: 4}, 8) == 1
    assert parts({0: 4, 1: 4}, 7) == 2  # three of each, then one
    assert parts({0: 1, 1: 1, 2: 1}, 2) == 1  # at least one


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 15), st.integers(1, 60), min_size=1),
    st.integers(1, 1500),
    st.integers(16, 600),
)
def test_fillers_spare_more_than_they_cost(sizes: dict[int, int], capacity: int, most: int) -> None:
    batch = [BatchSlice(row, 5, (7,) * size, 1) for row, size in sizes.items()]
    found = fillers(batch, lambda row: row, 100, capacity, most)
    in_vain = {item.seq_id: len(item.tokens) for item in found}
    if not found:
        return
    cost = sum(in_vain.values())
    assert sum(sizes.values()) + cost <= capacity
    both = {row: sizes.get(row, 0) + in_vain.get(row, 0) for row in {*sizes, *in_vain}}
    assert cost < WORTH * (parts(sizes, most) - parts(both, most))
    for item in found:
        begin = 5 + sizes[item.seq_id] if item.seq_id in sizes else item.seq_id
        assert item.position == begin
        assert begin + len(item.tokens) <= 100


@pytest.fixture
def two_runners(smollm2: Path) -> Iterator[tuple[LlamaRunner, LlamaRunner]]:
    made = [load_llama(smollm2, slots=4, max_ctx=256, pool=None, chunk=64) for _ in range(2)]
    yield made[0], made[1]
    for runner in made:
        runner.close()


@pytest.mark.real
def test_fillers_change_no_row_and_no_output(two_runners: tuple[LlamaRunner, LlamaRunner]) -> None:
    plain, filling = two_runners
    filling.wants_runs = filling._fills_rows = True  # as on a GPU
    dice = random.Random(5)
    held: dict[int, list[int]] = {row: [] for row in range(4)}
    for rows in ([1], [0, 3], [2], [3, 0], [0, 2, 3], [3, 1], [0, 3]):
        batch = []
        for row in rows:
            tokens = tuple(dice.randrange(100, 9000) for _ in range(dice.choice([1, 1, 3])))
            batch.append(BatchSlice(row, len(held[row]), tokens, 1))
            held[row] += tokens
        for runner in (plain, filling):
            assert runner.decode(batch) is DecodeOutcome.DONE
        for output in range(len(rows)):
            difference = abs(plain.logits(output) - filling.logits(output)).max()
            assert difference < 0.2  # another batch, other last bits
        assert [filling.sequence_length(row) for row in range(4)] == [len(held[r]) for r in held]
        begins = filling.batch_rows(batch)
        order = sorted(range(len(rows)), key=lambda index: rows[index])
        assert sorted(begins) == [begins[index] for index in order]


def test_where_runs_are_wanted_the_nearest_row_is_taken_though_it_is_kept() -> None:
    runner = ScriptedRunner(slots=6, shares_cells=False, wants_runs=True)
    cache = PrefixCache(runner, slots=6, prefixes=6, prompts=0)
    rows = [cache.begin([row] * 9)[0] for row in range(4)]
    assert rows == [0, 1, 2, 3]
    runner.decode([BatchSlice(3, 0, (3,) * 8, 1)])
    cache.end(1, [], keep=False)
    cache.end(3, [3] * 8, keep=True)
    assert cache.begin([50] * 9)[0] == 1
    assert cache.begin([51] * 9)[0] == 3  # and not 4, beyond it


def test_where_runs_are_wanted_one_sequence_takes_the_place_of_one_kept_row() -> None:
    runner = ScriptedRunner(slots=6, shares_cells=False, wants_runs=True)
    cache = PrefixCache(runner, slots=6, prefixes=6, prompts=0)
    rows = [cache.begin([row] * 9)[0] for row in range(6)]
    assert rows == [0, 1, 2, 3, 4, 5]
    for row in (5, 1, 2, 3):  # 0 and 4 run on
        runner.decode([BatchSlice(row, 0, (row,) * 8, 1)])
        cache.end(row, [row] * 8, keep=True)
    assert cache.cells == 32
    assert cache.begin([50] * 9)[0] == 1
    assert cache.cells == 24


def test_a_kept_row_that_has_to_give_way_in_any_case_is_gone_on_with() -> None:
    runner = ScriptedRunner(slots=4, shares_cells=False, wants_runs=True, saving_costs=30)
    cache = PrefixCache(runner, slots=4, prefixes=4, prompts=0)
    assert [cache.begin([row] * 9)[0] for row in range(2)] == [0, 1]
    kept = [1] * 200
    runner.decode([BatchSlice(1, 0, kept, 1)])
    cache.end(1, kept, keep=True)
    # Saving the rest of it costs more than its beginning spares, and rows 2 and 3 are empty.
    assert cache.begin([*kept[:20], 7, 8]) == (1, 20)
    assert len(cache) == 1
