"""In the bit-equal configuration neighbours change nothing: SmolLM2, real, on the CPU.

The configuration: q8_0 keys and values, flash attention on, and a cache partitioned by sequence,
which is what a pool of slots x max_ctx makes. Answers here cross the 257 cells and the batches of
64 tokens from which other configurations begin to differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.events import Finished, Retired
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.engine.engine_helpers import Story, prompt, reserve
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, load_llama

pytestmark = pytest.mark.real

SLOTS, MAX_CTX, CHUNK = 4, 384, 96
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, seed=1234)
PENALIZED = SamplingParams(temperature=0.0, repeat_penalty=1.2, penalty_last_n=32)


class House:
    """One runner for all tests here, and a fresh scheduler for each crowd."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.runner = runner
        tokenize = runner.vocabulary.tokenize
        self.requests: list[PreparedPrompt] = [
            prompt(tokenize(SEA), 24),
            prompt(tokenize(f"{BREAD}\n" * 20)[:240], 32),  # across 257 cells
            prompt(tokenize(NIGHT), 32, sampling=SEEDED),
            prompt(tokenize(f"{NIGHT}. {SEA} {BREAD}"), 20, sampling=PENALIZED),
            prompt(tokenize(f"{NIGHT}\n" * 6), 16),
            prompt(tokenize("Once"), 40, sampling=SEEDED),
        ]
        self.alone = [self.run([(0, index, None)])[0].text for index in range(6)]

    def run(self, crowd: list[tuple[int, int, int | None]]) -> list[Story]:
        """(arrives at step, request, leaves after so many tokens or never), in that order."""
        ledger = KVLedger(slots=SLOTS, pool=SLOTS * MAX_CTX, max_ctx=MAX_CTX, decode_headroom=32)
        scheduler = Scheduler(self.runner, ledger, chunk=CHUNK)
        told = [Story() for _ in crowd]
        holds = {}
        waiting = list(range(len(crowd)))
        step = 0
        while waiting or not scheduler.idle:
            while waiting and crowd[waiting[0]][0] <= step and len(holds) < SLOTS:
                who = waiting.pop(0)
                prepared = self.requests[crowd[who][1]]
                holds[who] = reserve(ledger, prepared)
                scheduler.add(Sequence(who, prepared, holds[who]))
            if not scheduler.idle:
                scheduler.step()
            for who, event in scheduler.take_events():
                told[who].add(event)
            for who in list(holds):
                leaves = crowd[who][2]
                if leaves is not None and len(told[who].events) >= leaves:
                    scheduler.cancel(who)
            for who, event in scheduler.take_events():
                told[who].add(event)
            for who in [who for who in holds if told[who].retired]:
                ledger.release(holds.pop(who))
            step += 1
        scheduler.check_idle()
        assert all(isinstance(story.events[-1], Retired) for story in told)
        return told


@pytest.fixture(scope="module")
def house(smollm2: Path) -> Iterator[House]:
    runner = load_llama(smollm2, slots=SLOTS, max_ctx=MAX_CTX, chunk=CHUNK, threads=2)
    yield House(runner)
    runner.close()


def check(house: House, crowd: list[tuple[int, int, int | None]]) -> None:
    for (_, request, leaves), story in zip(crowd, house.run(crowd), strict=True):
        alone = house.alone[request]
        assert isinstance(story.ending, Finished)
        if story.finished.reason == "cancelled":
            assert leaves is not None
            assert alone.startswith(story.text)
        else:
            assert story.text == alone


def test_every_request_repeats_itself_alone(house: House) -> None:
    assert all(house.alone)
    assert len(set(house.alone)) == len(house.alone)
    for index in (0, 2, 5):
        assert house.run([(0, index, None)])[0].text == house.alone[index]


@pytest.mark.parametrize("seed", [1, 2])
def test_sequences_that_come_at_random_say_what_each_says_alone(house: House, seed: int) -> None:
    dice = random.Random(seed)
    order = dice.sample(range(6), 6)
    steps = sorted(dice.randint(0, 30) for _ in order)
    check(house, [(step, request, None) for step, request in zip(steps, order, strict=True)])


def test_sequences_whose_neighbours_leave_at_random_say_what_each_says_alone(
    house: House,
) -> None:
    dice = random.Random(3)
    order = [*dice.sample(range(6), 6), *dice.sample(range(6), 3)]
    steps = sorted(dice.randint(0, 40) for _ in order)
    leaves = [dice.choice((None, None, 1, 5, 12)) for _ in order]
    check(house, list(zip(steps, order, leaves, strict=True)))


def test_a_neighbour_that_leaves_half_way_changes_nothing(house: House) -> None:
    check(house, [(0, 0, None), (0, 1, 10), (3, 2, None), (16, 4, None)])


def test_logits_are_the_same_bit_by_bit_however_the_batches_were_cut(house: House) -> None:
    """Not only texts: this is what other cache types do not give.

    A prompt in large chunks and alone, against the same one in small and uneven chunks beside a
    neighbour that leaves half-way; then tokens one by one across 257 cells.
    """
    runner = house.runner
    tokens, other = house.requests[1].tokens, house.requests[4].tokens
    assert len(tokens) == 240

    def logits(cuts: list[int], *, neighbour: bool) -> list[bytes]:
        seen = []
        at = 0
        for step, count in enumerate([*cuts, *[1] * 24]):
            piece = tokens[at : at + count] if at < 240 else tokens[at - 240 : at - 239]
            batch = [BatchSlice(0, at, piece, 1)]
            if neighbour and step < len(cuts) + 12:
                theirs = other[:20] if step == 0 else other[20 + step : 21 + step]
                batch.insert(0, BatchSlice(1, runner.sequence_length(1), theirs, 1))
            assert runner.decode(batch) is DecodeOutcome.DONE
            at += len(piece)
            if at >= 240:
                seen.append(runner.logits(len(batch) - 1).tobytes())
            if neighbour and step == len(cuts) + 11:
                runner.rewind(1, 0)
        runner.rewind(0, 0)
        return seen

    expected = logits([96, 96, 48], neighbour=False)
    assert logits([17, 63, 5, 70, 64, 21], neighbour=True) == expected
    assert runner.sequence_length(1) == 0
