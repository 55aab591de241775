"""Rows in vain: what they fill, and that nothing is seen of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trio.engine.llama_fillers import fillers
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from dflash_trio.engine.prefix_cache import PrefixCache
from dflash_trio.engine.scripted_runner import ScriptedRunner
from tests.engine.test_runner_contract import load_llama


def slices(*rows: int, tokens: int = 1) -> list[BatchSlice]:
    return [BatchSlice(row, 5, (7,) * tokens, 1) for row in rows]


def filled(batch: list[BatchSlice], capacity: int = 64, **lengths: int) -> list[tuple[int, int]]:
    found = fillers(batch, lambda row: lengths.get(f"r{row}", 0), 100, capacity)
    assert all(not item.outputs and len(item.tokens) == len(found[0].tokens) for item in found)
    return [(item.seq_id, item.position) for item in found]


def test_the_rows_between_those_of_a_batch_are_filled_where_they_end() -> None:
    assert filled(slices(6, 2, 3), r4=31) == [(4, 31), (5, 0)]
    assert filled(slices(2, 3, 4)) == filled(slices(7)) == []


def test_a_full_row_is_no_filler() -> None:
    assert filled(slices(0, 3), r1=100, r2=99) == [(2, 99)]
    assert filled(slices(0, 3, tokens=2), r1=100, r2=99) == []


def test_prompts_are_not_computed_in_vain_and_no_batch_becomes_too_large() -> None:
    assert filled(slices(0, 3, tokens=16)) == [(1, 0), (2, 0)]
    assert filled(slices(0, 3, tokens=17)) == []
    assert filled(slices(0, 3, tokens=16), capacity=63) == []


@pytest.fixture
def two_runners(smollm2: Path) -> Iterator[tuple[LlamaRunner, LlamaRunner]]:
    made = [load_llama(smollm2, slots=4, max_ctx=256, pool=None, chunk=64) for _ in range(2)]
    yield made[0], made[1]
    for runner in made:
        runner.close()


@pytest.mark.real
def test_fillers_change_no_row_and_no_output(two_runners: tuple[LlamaRunner, LlamaRunner]) -> None:
    plain, filling = two_runners
    filling.wants_runs = True  # as on a GPU
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
