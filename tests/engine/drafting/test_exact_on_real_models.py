"""What a real model says with drafts is what it says without them, token by token.

SmolLM2 on the CPU in the bit-equal configuration: a cache partitioned by sequence, q8_0 keys and
values, flash attention on. There a token's logits do not depend on the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.prompt_lookup import PromptLookup
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.events import Retired
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from dflash_trio.generation.status import DraftStatistics
from tests.engine.drafting.scripted_provider import Always
from tests.engine.engine_helpers import admit, prompt
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, load_llama

pytestmark = pytest.mark.real

SLOTS, MAX_CTX, CHUNK, LONGEST, LIMIT = 4, 384, 96, 4, 63
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, seed=99)
PENALIZED = SamplingParams(temperature=0.0, repeat_penalty=1.1, penalty_last_n=64)
NAMES = ("Anna", "Boris", "Carmen", "Dmitri", "Elif")
PROMPTS = (
    *(f"{name} has a boat. {name} has a house. {name} has a" for name in NAMES),
    *(f"def get_{n}(self):\n    return self.{n}\n\ndef set_{n}(self, {n}):" for n in NAMES),
    *(f"Q: Who is {n}?\nA: {n} is a baker.\nQ: What is {n}?\nA:" for n in NAMES),
    *(f"{text}. {text}. {text[:20]}" for text in (SEA, BREAD, NIGHT)),
    "one two three four one two three four one two three",
    f"{NIGHT}\n" * 12,
)


@attrs.define
class Run:
    said: list[tuple[int, ...]]
    drafts: DraftStatistics | None


class House:
    """One runner, and a fresh scheduler for each crowd."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.runner = runner

    def prepare(
        self, text: str, max_tokens: int, sampling: SamplingParams | None = None
    ) -> PreparedPrompt:
        tokens = self.runner.vocabulary.tokenize(text)
        prepared = prompt(tokens, max_tokens, ignore_eos=True)
        return prepared if sampling is None else attrs.evolve(prepared, sampling=sampling)

    def run(self, requests: list[PreparedPrompt], drafter: Drafter | None) -> Run:
        ledger = KVLedger(slots=SLOTS, pool=SLOTS * MAX_CTX, max_ctx=MAX_CTX, decode_headroom=32)
        scheduler = Scheduler(self.runner, ledger, chunk=CHUNK, drafter=drafter)
        holds: dict[int, Hold] = {}
        sequences: dict[tuple[int, int], Sequence] = {}
        waiting = list(enumerate(requests))
        while waiting or not scheduler.idle:
            admit(waiting, ledger, scheduler, holds)
            sequences |= scheduler._sequences
            scheduler.step()
            for number, event in scheduler.take_events():
                if isinstance(event, Retired):
                    ledger.release(holds.pop(number))
        scheduler.check_idle()
        said = [tuple(sequence.answer) for _, sequence in sorted(sequences.items())]
        return Run(said, scheduler.statistics().drafts)


@pytest.fixture(scope="module")
def house(smollm2: Path) -> Iterator[House]:
    runner = load_llama(
        smollm2,
        slots=SLOTS,
        max_ctx=MAX_CTX,
        chunk=CHUNK,
        threads=1,
        draft_outputs=LIMIT - SLOTS,
    )
    yield House(runner)
    runner.close()


def always() -> Drafter:
    return Drafter(PromptLookup(LONGEST), Always(LONGEST), verify_limit=LIMIT)


def test_greedy_text_with_prompt_lookup_is_plain_greedy_text(house: House) -> None:
    requests = [house.prepare(text, 60) for text in PROMPTS]
    assert len(requests) == 20
    plain = house.run(requests, None)
    drafted = house.run(requests, always())
    assert drafted.said == plain.said
    assert drafted.drafts is not None
    assert drafted.drafts.accepted > 200
    assert drafted.drafts.proposed - drafted.drafts.accepted > 100


def test_seeded_and_penalized_text_with_drafts_is_that_without_them(house: House) -> None:
    requests = [
        *(house.prepare(text, 24, SEEDED) for text in PROMPTS[:3]),
        house.prepare(PROMPTS[10], 24, PENALIZED),
        attrs.evolve(house.prepare(PROMPTS[18], 24, SEEDED), n=2),
    ]
    plain = house.run(requests, None)
    drafted = house.run(requests, always())
    assert drafted.said == plain.said
    assert drafted.drafts is not None
    assert drafted.drafts.accepted > 10


def test_text_is_the_same_whatever_the_controller_decides(house: House) -> None:
    requests = [house.prepare(text, 40) for text in PROMPTS[16:]]
    controller = DraftController(LONGEST, verify_limit=LIMIT, partitioned=True)
    drafted = house.run(requests, Drafter(PromptLookup(LONGEST), controller, verify_limit=LIMIT))
    assert drafted.said == house.run(requests, None).said
    assert drafted.drafts is not None
    assert drafted.drafts.steps > 0


def test_text_is_the_same_up_to_the_end_of_the_context(house: House) -> None:
    long = f"{NIGHT}\n" * 24
    requests = [house.prepare(long, 500), house.prepare(PROMPTS[18], 1), house.prepare(SEA, 3)]
    room = MAX_CTX - requests[0].prompt_tokens
    assert 20 < room < 70
    plain = house.run(requests, None)
    drafted = house.run(requests, always())
    assert drafted.said == plain.said
    assert [len(said) for said in drafted.said] == [room, 1, 3]
