"""Where answers are not equal bit by bit, each token is the likeliest one of a replay, or as good
as it: SmolLM2, real, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from pathlib import Path

import numpy as np
import pytest

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.request import PreparedPrompt
from tests.engine.engine_helpers import Story, prompt, reserve
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, load_llama

pytestmark = pytest.mark.real

MARGIN = 0.25
"""Between the logits of a token that was chosen and of the replay's likeliest one. Logits of this
model lie tens apart; what the layout of a cache changes in them lies far below one."""


def short_of_the_likeliest(
    runner: LlamaRunner, prompt: Tokens[int], answer: Tokens[int]
) -> list[float]:
    """How far each token of an answer lies below the likeliest one, when it is forced."""
    short = []
    tokens = [*prompt, *answer]
    begin = 0
    for end in range(len(prompt), len(tokens)):
        batch = [BatchSlice(0, begin, tokens[begin:end], True)]
        assert runner.decode(batch) is DecodeOutcome.DONE
        logits = runner.logits(0)
        short.append(float(logits.max() - logits[tokens[end]]))
        begin = end
    runner.rewind(0, 0)
    return short


def test_generations_that_outgrow_the_pool_all_finish_as_if_they_had_been_alone(
    smollm2: Path,
) -> None:
    runner = load_llama(smollm2, slots=2, max_ctx=512, pool=640, chunk=256, threads=1)
    ledger = KVLedger(slots=2, pool=640, max_ctx=512, decode_headroom=64)
    scheduler = Scheduler(runner, ledger, chunk=256)
    tokenize = runner.vocabulary.tokenize
    requests = [
        prompt(tokenize(f"{SEA}\n{BREAD}\n" * 12)[:200], 260, ignore_eos=True),
        prompt(tokenize(f"{NIGHT}\n{SEA}\n" * 12)[:200], 260, ignore_eos=True),
        prompt(tokenize(BREAD), 40, ignore_eos=True),
    ]
    sequences: list[Sequence] = []
    told: list[Story] = []
    waiting = list(requests)
    holds = []
    while waiting or not scheduler.idle:
        # A waiter comes in as soon as there is room, as the router lets it.
        while waiting and not (sequences and any(s.hold.paused for s in sequences)):
            hold = ledger.try_reserve(waiting[0].prompt_tokens, waiting[0].max_tokens)
            if hold is None:
                break
            holds.append(hold)
            told.append(Story())
            sequences.append(Sequence(len(sequences), waiting.pop(0), hold))
            scheduler.add(sequences[-1])
        assert scheduler.step()
        for who, event in scheduler.take_events():
            told[who].add(event)
            if told[who].retired:
                ledger.release(holds[who])
    scheduler.check_idle()
    pauses = scheduler.statistics().pauses
    runner.close()
    assert pauses > 0
    assert [len(s.answer) for s in sequences] == [260, 260, 40]

    replay = load_llama(smollm2, slots=1, max_ctx=512, chunk=256, threads=1)
    short = [
        distance
        for sequence in sequences
        for distance in short_of_the_likeliest(replay, sequence.prompt, sequence.answer)
    ]
    replay.close()
    assert len(short) == 560
    assert max(short) <= MARGIN
    # Near ties are rare: almost every token is the replay's own.
    assert np.count_nonzero(short) <= 0.02 * len(short)


def ask(scheduler: Scheduler, ledger: KVLedger, prepared: PreparedPrompt) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's came from the cache."""
    hold = reserve(ledger, prepared)
    sequence = Sequence(1, prepared, hold)
    scheduler.add(sequence)
    while not scheduler.idle:
        assert scheduler.step()
    scheduler.take_events()
    ledger.release(hold)
    return list(sequence.answer), sequence.cached


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-the-row", "saved"])
def test_a_warm_answer_is_the_cold_one_in_the_bit_equal_configuration(
    smollm2: Path, elsewhere: bool
) -> None:
    """A conversation goes on: from its row, and from the host's memory after somebody else had
    the row. Across 257 cells, where other configurations begin to differ."""
    runner = load_llama(smollm2, slots=1, max_ctx=512, chunk=96, threads=1, keeps_prefixes=True)
    ledger = KVLedger(slots=1, pool=512, max_ctx=512, decode_headroom=32)
    tokenize = runner.vocabulary.tokenize
    first = tokenize(f"{SEA}\n{BREAD}\n" * 12)[:200]
    other = prompt(tokenize(f"{NIGHT}\n" * 12), 8)

    def fresh() -> Scheduler:
        return Scheduler(runner, ledger, chunk=96, prefixes=4)

    warm = fresh()
    said, _ = ask(warm, ledger, prompt(first, 32, ignore_eos=True))
    more = [*first, *said, *tokenize(f"\n{NIGHT}")]
    if elsewhere:
        ask(warm, ledger, other)
    answer, cached = ask(warm, ledger, prompt(more, 60, ignore_eos=True))
    # The last token of an answer is not computed, and so not kept.
    assert cached == len(first) + len(said) - 1

    runner.rewind(0, 0)
    cold, nothing = ask(fresh(), ledger, prompt(more, 60, ignore_eos=True))
    runner.close()
    assert nothing == 0
    assert answer == cold
