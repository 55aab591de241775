"""What SmolLM2 says with a draft beside it is what it says alone: text, usage and reasons to end.

On the CPU in the bit-equal configuration (see test_exactness). Three drafts: an untrained one, of
which nearly everything is rejected, the model itself, of which nearly everything is accepted, and
the trained one that comes with the package. Prompt lookup is in test_exact_on_real_models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import dflash_trio
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.context_size import context_size, draft_context
from dflash_trio.engine.draft_file import check_draft_file
from dflash_trio.engine.drafting import naps
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.provider import DraftProvider
from dflash_trio.engine.llama_dflash import DFlashProvider
from dflash_trio.engine.llama_draft_context import DraftSpec
from dflash_trio.engine.llama_draft_model import DraftModelProvider
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.generation.events import Finished, Retired, TextDelta
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from dflash_trio.generation.status import DraftStatistics
from tests.engine.drafting.scripted_provider import Always
from tests.engine.drafting.test_exact_on_real_models import PROMPTS
from tests.engine.engine_helpers import admit, prompt
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, load_llama
from tests.support.written_drafts import tokenizer_of, write_dflash

pytestmark = pytest.mark.real

TRAINED = Path(dflash_trio.__file__).parent / "drafts" / "smollm2-135m-instruct-dflash.gguf"
SLOTS, MAX_CTX, CHUNK, LONGEST, LIMIT = 4, 288, 64, 4, 63
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, seed=1234)
PENALIZED = SamplingParams(temperature=0.0, repeat_penalty=1.2, penalty_last_n=32)


@attrs.define
class Said:
    """One answer. Usage without what only drafts have."""

    text: str = ""
    ending: Finished | None = None


class House:
    """One runner with its drafts, and a fresh scheduler for each crowd."""

    def __init__(self, runner: LlamaRunner, drafts: dict[str, DraftProvider]) -> None:
        self.runner = runner
        self.drafts = drafts
        tokenize = runner.vocabulary.tokenize
        self.long = tokenize(f"{NIGHT}\n" * 30)[: MAX_CTX - 20]
        self.requests: list[PreparedPrompt] = [
            prompt(tokenize(SEA), 24, ignore_eos=True),
            prompt(tokenize(BREAD), 16),
            prompt(tokenize(NIGHT), 20, sampling=SEEDED),
            prompt(tokenize(f"{NIGHT}. {SEA} {BREAD}"), 16, sampling=PENALIZED),
            attrs.evolve(prompt(tokenize(f"{SEA} {SEA}"), 12, sampling=SEEDED), n=2),
            *(prompt(tokenize(SEA), limit) for limit in (1, 2, 3)),
            prompt(self.long, 500, ignore_eos=True),
        ]
        self.plain, _ = self.run(self.requests)
        # A stop string from the middle of what is said, so that it ends inside a run.
        text = self.plain[0, 0].text
        stops = (text[len(text) // 2 :][:4], text[5:9])
        self.requests += [prompt(tokenize(SEA), 24, stop=(stop,)) for stop in stops]
        stopped, _ = self.run(self.requests[-2:])
        self.plain |= {(9 + number, 0): said for (number, _), said in stopped.items()}

    def run(
        self,
        requests: list[PreparedPrompt],
        draft: str | None = None,
        *,
        prefixes: int = 0,
        gone: tuple[int, int] | None = None,
    ) -> tuple[dict[tuple[int, int], Said], DraftStatistics | None]:
        """``gone``: a request whose client leaves after so many steps of the crowd."""
        ledger = KVLedger(slots=SLOTS, pool=SLOTS * MAX_CTX, max_ctx=MAX_CTX, decode_headroom=32)
        drafter = (
            None
            if draft is None
            else Drafter(self.drafts[draft], Always(LONGEST), verify_limit=LIMIT)
        )
        scheduler = Scheduler(self.runner, ledger, chunk=CHUNK, prefixes=prefixes, drafter=drafter)
        told: dict[tuple[int, int], Said] = {}
        holds: dict[int, Hold] = {}
        waiting = list(enumerate(requests))
        steps = 0
        while waiting or not scheduler.idle:
            admit(waiting, ledger, scheduler, holds)
            scheduler.step()
            steps += 1
            if gone is not None and steps == gone[1]:
                scheduler.cancel(gone[0])
            for number, event in scheduler.take_events():
                if isinstance(event, Retired):
                    ledger.release(holds.pop(number))
                elif isinstance(event, TextDelta):
                    told.setdefault((number, event.index), Said()).text += event.text
                else:
                    assert isinstance(event, Finished), event
                    usage = attrs.evolve(event.usage, accepted_drafts=None, rejected_drafts=None)
                    said = told.setdefault((number, event.index), Said())
                    said.ending = attrs.evolve(event, usage=usage)
        scheduler.check_idle()
        for row in range(SLOTS):
            self.runner.rewind(row, 0)
            if draft is not None:
                self.drafts[draft].rewind(row, 0)
        return told, scheduler.statistics().drafts


@pytest.fixture(scope="module")
def house(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    runner = load_llama(
        smollm2, slots=SLOTS, max_ctx=MAX_CTX, chunk=CHUNK, threads=1, draft_outputs=LIMIT - SLOTS
    )
    untrained = write_dflash(
        tmp_path_factory.mktemp("draft") / "untrained.gguf",
        tokenizer_of(smollm2),
        wide=576,
        target_layers=(1, 15, 28),
    )
    target = check_model_file(str(smollm2))
    size = context_size(trained=8192, slots=SLOTS, max_ctx=MAX_CTX, pool=None)

    def spec(path: Path) -> DraftSpec:
        file = check_draft_file(str(path), LONGEST, target)
        devices = (DevicePlacement("cpu", 0),)
        return DraftSpec(
            file, devices, draft_context(size, file.spare, on_cpu=True), chunk=CHUNK, threads=1
        )

    drafts: dict[str, DraftProvider] = {
        "untrained": DFlashProvider(runner.context, spec(untrained), batch_rows=runner.batch_rows),
        "trained": DFlashProvider(runner.context, spec(TRAINED), batch_rows=runner.batch_rows),
        "in one pass": DFlashProvider(
            runner.context, spec(TRAINED), batch_rows=runner.batch_rows, in_one_pass=True
        ),
        "itself": DraftModelProvider(spec(smollm2), vocabulary_size=runner.vocabulary.size),
    }
    yield House(runner, drafts)
    for draft in drafts.values():
        draft.close()
    runner.close()


@pytest.fixture(params=["untrained", "trained", "in one pass", "itself"])
def draft(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_requests_are_worth_comparing(house: House) -> None:
    said = house.plain
    assert len(said) == 12
    assert len({answer.text for answer in said.values()}) >= 9
    reasons = [answer.ending.reason for answer in said.values() if answer.ending is not None]
    assert len(reasons) == 12
    assert reasons.count("stop") >= 2
    end = said[8, 0].ending
    assert end is not None
    assert (end.detail, end.usage.completion_tokens) == ("context_full", 20)


def test_everybody_says_what_they_say_without_a_draft(house: House, draft: str) -> None:
    said, drafts = house.run(house.requests, draft)
    assert said == house.plain
    assert drafts is not None
    assert drafts.proposed > 100
    accepted = drafts.accepted / drafts.proposed
    least, most = {
        "untrained": (0.0, 0.1),
        "trained": (0.1, 0.6),
        "in one pass": (0.1, 0.6),
        "itself": (0.5, 1.0),
    }[draft]
    assert least <= accepted <= most


def test_what_is_kept_of_earlier_prompts_changes_nothing(house: House, draft: str) -> None:
    first = house.requests[0]
    later = attrs.evolve(
        first, tokens=(*first.tokens, *house.runner.vocabulary.tokenize(" deep.")), max_tokens=16
    )
    crowd = [first, house.requests[1], later, first]
    plain, _ = house.run(crowd, prefixes=4)
    said, drafts = house.run(crowd, draft, prefixes=4)
    assert said == plain
    assert drafts is not None
    assert drafts.proposed > 0


@pytest.mark.parametrize("napping", ["untrained", "trained", "in one pass"])
def test_a_draft_that_naps_between_two_guesses_changes_nothing(
    house: House, napping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever it wins, it naps again.
    for changed, steps in (("FIRST_AWAKE", 4), ("STALE", 4), ("PROBE", 3), ("_SETTLING", 1)):
        monkeypatch.setattr(naps, changed, steps)
    provider = house.drafts[napping]
    told: list[bool] = []
    tell = provider.nap

    def watched(*, asleep: bool) -> None:
        told.append(asleep)
        tell(asleep=asleep)

    monkeypatch.setattr(provider, "nap", watched)
    try:
        said, drafts = house.run(house.requests, napping)
    finally:
        tell(asleep=False)
    assert said == house.plain
    assert told == [place % 2 == 0 for place in range(len(told))]
    assert len(told) > 3
    assert drafts is not None
    assert drafts.proposed > 20


def test_who_leaves_inside_a_run_takes_nothing_along(house: House, draft: str) -> None:
    said, _ = house.run(house.requests[:4], draft, gone=(1, 3))
    assert [said[number, 0] for number in (0, 2, 3)] == [
        house.plain[number, 0] for number in (0, 2, 3)
    ]
    left = said[1, 0]
    assert left.ending is not None
    assert left.ending.reason == "cancelled"
    assert house.plain[1, 0].text.startswith(left.text)


Answers = dict[tuple[int, int], Said]


@pytest.fixture(scope="module")
def twenty(house: House) -> tuple[list[PreparedPrompt], Answers]:
    """Requests, and what is said to them without a draft."""
    tokenize = house.runner.vocabulary.tokenize
    # The last of them is long, which is others' business.
    texts = (*PROMPTS[:19], f"{BREAD}. {BREAD[:20]}")
    requests = [prompt(tokenize(text), 12, ignore_eos=True) for text in texts]
    return requests, house.run(requests)[0]


def test_greedy_text_is_plain_greedy_text(
    house: House, twenty: tuple[list[PreparedPrompt], Answers], draft: str
) -> None:
    requests, plain = twenty
    assert len(requests) == 20
    said, drafts = house.run(requests, draft)
    assert said == plain
    assert drafts is not None
    assert drafts.proposed > 100
    assert drafts.accepted >= (0 if draft == "untrained" else 30)
