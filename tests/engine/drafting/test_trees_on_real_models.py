"""SmolLM2 with trees of its trained draft says what it says alone, as far as that can be compared.

Trees want a cache that all sequences share, and in such a one the last bits of logits depend on the
cells' order. So answers are compared teacher-forced: each token is what a replay in a cache of its
own says after the same tokens, or lies within ``MARGIN`` below it. The replay is in the bit-equal
configuration, see test_exactness.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import llama_cpp.llama_cpp as llama  # before numpy
import numpy as np
import pytest

from dflash_trio import model_loading
from dflash_trio.cli import parse_command_line
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.context_size import context_size, draft_context
from dflash_trio.engine.draft_file import check_draft_file
from dflash_trio.engine.drafting.acceptance import TreeAcceptance
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import TreeDrafter
from dflash_trio.engine.drafting.provider import RankingProvider, Wanted
from dflash_trio.engine.llama_dflash import DFlashProvider
from dflash_trio.engine.llama_draft_context import DraftSpec
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from dflash_trio.engine.placement import place_models
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.events import Finished, Retired
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from dflash_trio.text.structured import compile_grammar
from tests.engine.drafting.scripted_provider import Always
from tests.engine.drafting.test_exact_with_drafts import TRAINED
from tests.engine.engine_helpers import admit, prompt
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, load_llama
from tests.support.written_drafts import tokenizer_of, write_dflash

pytestmark = pytest.mark.real

MARGIN = 0.5
"""Of logits, which lie tens apart. Any change of last bits at all, as by a neighbour without flash
attention, comes to 0.3 in this model, whose activations are rounded to eight bits."""
SLOTS, MAX_CTX, CHUNK, OUTPUTS = 3, 288, 64, 48
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, seed=1234)
PENALIZED = SamplingParams(temperature=0.0, repeat_penalty=1.2, penalty_last_n=32)
ASKED = (
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
    "List the numbers from one to ten.",
    "Explain why the sky is blue.",
)


@attrs.define
class Answer:
    request: PreparedPrompt
    tokens: list[int]
    ending: Finished | None = None


class House:
    """One runner with its drafts, and a fresh scheduler for each crowd."""

    def __init__(self, runner: LlamaRunner, drafts: dict[str, RankingProvider]) -> None:
        self.runner = runner
        self.drafts = drafts
        self.accepted = self.leaves = 0

    def ask(self, text: str, limit: int, **more: Any) -> PreparedPrompt:
        turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        tokens = self.runner.vocabulary.tokenize(turn, parse_special=True)
        return prompt(tokens, limit, **more)

    def run(
        self,
        requests: list[PreparedPrompt],
        budget: int,
        *,
        draft: str = "trained",
        prefixes: int = 0,
        gone: tuple[int, int] | None = None,
        controller: DraftController | None = None,
    ) -> list[Answer]:
        """``gone``: a request whose client leaves after so many steps of the crowd."""
        ledger = KVLedger(slots=SLOTS, pool=SLOTS * MAX_CTX, max_ctx=MAX_CTX, decode_headroom=32)
        drafter = TreeDrafter(
            self.drafts[draft],
            controller or Always(budget),
            budget=budget,
            paths=self.runner.tree_paths,
            verify_limit=SLOTS + OUTPUTS,
        )
        scheduler = Scheduler(self.runner, ledger, chunk=CHUNK, prefixes=prefixes, drafter=drafter)
        holds: dict[int, Hold] = {}
        sequences: dict[tuple[int, int], Sequence] = {}
        endings: dict[tuple[int, int], Finished] = {}
        waiting = list(enumerate(requests))
        steps = 0
        while waiting or not scheduler.idle:
            admit(waiting, ledger, scheduler, holds)
            sequences |= scheduler._sequences
            scheduler.step()
            self.leaves = max(self.leaves, self.runner.paths_held)
            steps += 1
            if gone is not None and steps == gone[1]:
                scheduler.cancel(gone[0])
            for number, event in scheduler.take_events():
                if isinstance(event, Retired):
                    ledger.release(holds.pop(number))
                elif isinstance(event, Finished):
                    endings[number, event.index] = event
        scheduler.check_idle()
        assert self.runner.paths_held == 0
        for row in range(SLOTS):
            self.runner.rewind(row, 0)
            self.drafts[draft].rewind(row, 0)
        drafts = scheduler.statistics().drafts
        assert drafts is not None
        self.accepted = drafts.accepted
        return [
            Answer(sequence.prepared, list(sequence.answer), endings.get(key))
            for key, sequence in sorted(sequences.items())
        ]


@pytest.fixture(scope="module")
def house(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    runner = load_llama(
        smollm2,
        slots=SLOTS,
        max_ctx=MAX_CTX,
        chunk=CHUNK,
        draft_outputs=OUTPUTS,
        tree_paths=OUTPUTS,
    )
    size = context_size(trained=8192, slots=SLOTS, max_ctx=MAX_CTX, pool=None, unified=True)
    folder = tmp_path_factory.mktemp("draft")
    tokenizer = tokenizer_of(smollm2)
    shape: dict[str, Any] = {"wide": 576, "target_layers": (1, 15, 28)}
    paths = {
        "trained": TRAINED,
        "dflash2": write_dflash(folder / "2.gguf", tokenizer, selector=6, **shape),
        "dspark": write_dflash(folder / "s.gguf", tokenizer, markov=True, **shape),
    }
    drafts: dict[str, RankingProvider] = {}
    for name, path in paths.items():
        file = check_draft_file(str(path), None, check_model_file(str(smollm2)))
        spec = DraftSpec(
            file,
            (DevicePlacement("cpu", 0),),
            draft_context(size, file.spare, on_cpu=True),
            chunk=CHUNK,
            threads=1,
        )
        drafts[name] = DFlashProvider(runner.context, spec, batch_rows=runner.batch_rows)
        if name == "trained":
            drafts["in one pass"] = DFlashProvider(
                runner.context, spec, batch_rows=runner.batch_rows, in_one_pass=True
            )
    yield House(runner, drafts)
    for draft in drafts.values():
        draft.close()
    runner.close()


@pytest.fixture(scope="module")
def replay(smollm2: Path) -> Iterator[LlamaRunner]:
    runner = load_llama(smollm2, slots=1, max_ctx=MAX_CTX, chunk=MAX_CTX)
    yield runner
    runner.close()


def short_of_the_likeliest(runner: LlamaRunner, answer: Answer) -> list[float]:
    """How far each token lies below the likeliest one when it is forced, penalties included."""
    short = []
    sampling = answer.request.sampling
    tokens = [*answer.request.tokens, *answer.tokens]
    begin, prompt_tokens = 0, len(answer.request.tokens)
    for end in range(prompt_tokens, len(tokens)):
        assert runner.decode([BatchSlice(0, begin, tokens[begin:end], 1)]) is DecodeOutcome.DONE
        logits = np.array(runner.logits(0))
        if sampling.has_penalties:
            seen = np.array(list(set(tokens[max(0, end - sampling.penalty_last_n) : end])))
            plain, penalty = logits[seen], sampling.repeat_penalty
            logits[seen] = np.where(plain > 0, plain / penalty, plain * penalty)
        short.append(float(logits.max() - logits[tokens[end]]))
        begin = end
    runner.rewind(0, 0)
    return short


@pytest.mark.parametrize("draft", ["trained", "in one pass"])
@pytest.mark.parametrize("budget", [4, 16])
def test_greedy_answers_with_trees_are_those_of_a_replay(
    house: House, replay: LlamaRunner, budget: int, draft: str
) -> None:
    house.leaves = 0
    requests = [
        *(house.ask(text, 40) for text in ASKED),
        house.ask(ASKED[4], 40, sampling=PENALIZED),
        attrs.evolve(house.ask(ASKED[0], 16), n=2),
        *(house.ask(ASKED[1], limit) for limit in (1, 2, 3)),
    ]
    answers = house.run(requests, budget, draft=draft)
    assert len(answers) == 11
    short = [each for answer in answers for each in short_of_the_likeliest(replay, answer)]
    assert len(short) > 200
    assert max(short) <= MARGIN
    assert np.count_nonzero(short) <= 0.04 * len(short)
    # Many guesses came, and not on one path alone.
    assert house.accepted > 60
    assert house.leaves > 1
    for answer in answers:
        assert answer.ending is not None
        assert len(answer.tokens) <= answer.request.max_tokens
    assert [len(answer.tokens) for answer in answers[-3:]] == [1, 2, 3]


def test_seeded_answers_with_trees_draw_what_they_draw_without(
    house: House, replay: LlamaRunner
) -> None:
    (answer,) = house.run([house.ask(ASKED[0], 40, sampling=SEEDED, ignore_eos=True)], 16)

    def others(seed: int) -> int:
        """Tokens that a replay draws otherwise."""
        sampler = replay.new_sampler(attrs.evolve(SEEDED, seed=seed), answer.request.tokens)
        tokens = [*answer.request.tokens, *answer.tokens]
        begin, drawn = 0, []
        for end in range(len(answer.request.tokens), len(tokens)):
            replay.decode([BatchSlice(0, begin, tokens[begin:end], 1)])
            drawn.append(sampler.sample(0))
            begin = end
        sampler.close()
        replay.rewind(0, 0)
        return sum(a != b for a, b in zip(drawn, answer.tokens, strict=True))

    # A draw that falls near the border between two tokens may go either way.
    assert others(1234) <= 10
    # Which tells something: with another seed, more than half are others.
    assert others(77) > 15


def test_a_grammar_and_stop_strings_hold_within_a_tree(house: House) -> None:
    grammar = compile_grammar(
        house.runner.vocabulary.guide_tokenizer(), "start: /(one|two|three)(, (one|two|three)){3}/"
    )
    listed, free = house.run(
        [
            attrs.evolve(house.ask(ASKED[3], 40), constraint=grammar),
            house.ask(ASKED[3], 60, ignore_eos=True),
        ],
        16,
    )
    text = b"".join(map(house.runner.vocabulary.piece, listed.tokens)).decode()
    words = text.split(", ")
    assert len(words) == 4
    assert set(words) <= {"one", "two", "three"}
    said = b"".join(map(house.runner.vocabulary.piece, free.tokens)).decode()
    stop = said[len(said) // 2 :][:5]
    (stopped,) = house.run([house.ask(ASKED[3], 60, stop=(stop,), ignore_eos=True)], 16)
    assert stopped.ending is not None
    assert (stopped.ending.reason, stopped.ending.stop_sequence) == ("stop", stop)
    whole = b"".join(map(house.runner.vocabulary.piece, stopped.tokens)).decode()
    # It ends with the token that brings the stop string's end.
    assert stop in whole
    assert stop not in whole[: -len(house.runner.vocabulary.piece(stopped.tokens[-1]).decode())]


def test_who_leaves_inside_a_tree_takes_nothing_along(house: House, replay: LlamaRunner) -> None:
    answers = house.run([house.ask(text, 30) for text in ASKED[:3]], 16, gone=(1, 4))
    left = answers[1]
    assert left.ending is not None
    assert left.ending.reason == "cancelled"
    assert max(short_of_the_likeliest(replay, answers[0])) <= MARGIN
    assert max(short_of_the_likeliest(replay, answers[2])) <= MARGIN


def test_trees_end_with_the_context(house: House, replay: LlamaRunner) -> None:
    long = house.runner.vocabulary.tokenize(f"{NIGHT}\n{SEA} {BREAD}\n" * 12)[: MAX_CTX - 20]
    (answer,) = house.run([prompt(long, 500, ignore_eos=True)], 16)
    assert answer.ending is not None
    assert (answer.ending.detail, len(answer.tokens)) == ("context_full", 20)
    assert max(short_of_the_likeliest(replay, answer)) <= MARGIN


def test_prompts_go_on_from_what_trees_have_left(house: House, replay: LlamaRunner) -> None:
    first = house.ask(ASKED[0], 30, ignore_eos=True)
    (said,) = house.run([first], 16)
    more = [*first.tokens, *said.tokens, *house.runner.vocabulary.tokenize(" And then")]
    others = [house.ask(text, 20) for text in ASKED[1:3]]
    answers = house.run([first, *others, prompt(more, 30, ignore_eos=True), first], 16, prefixes=4)
    assert max(a.ending.usage.cached_tokens for a in answers if a.ending is not None) > 15
    for answer in answers:
        assert max(short_of_the_likeliest(replay, answer)) <= MARGIN


@pytest.mark.parametrize("draft", ["dflash2", "dspark"])
def test_trees_of_other_drafts_change_nothing_either(
    house: House, replay: LlamaRunner, draft: str
) -> None:
    for answer in house.run([house.ask(text, 16) for text in ASKED[:2]], 12, draft=draft):
        assert max(short_of_the_likeliest(replay, answer)) <= MARGIN


def test_whatever_size_the_controller_chooses_answers_are_those_of_a_replay(
    house: House, replay: LlamaRunner
) -> None:
    controller = DraftController(
        16, verify_limit=SLOTS + OUTPUTS, partitioned=False, acceptance=TreeAcceptance
    )
    requests = [house.ask(text, 40, ignore_eos=True) for text in ASKED]
    for answer in house.run(requests, 16, controller=controller):
        assert max(short_of_the_likeliest(replay, answer)) <= MARGIN


def test_a_draft_learns_what_the_layers_had_for_the_path_that_stays(house: House) -> None:
    """It guesses the same after a path through a tree as after the same tokens in a row."""
    runner, draft = house.runner, house.drafts["trained"]
    tokens = list(house.ask(ASKED[0], 1).tokens)
    words = runner.vocabulary.tokenize(" Once upon a time there was a girl")[:6]
    parents = (-1, 0, 0, 2, 2, 4)
    path = (0, 2, 4, 5)
    said = [*tokens, *(words[place] for place in path)]
    for row in (0, 1):
        batch = [BatchSlice(row, 0, tokens, 1)]
        assert runner.decode(batch) is DecodeOutcome.DONE
        draft.observe(batch, [len(tokens)])
    # Behind another row, so that the tree's first row of the batch is not 0.
    batch = [
        BatchSlice(0, len(tokens), said[len(tokens) :], 4),
        BatchSlice(1, len(tokens), words, 6, parents),
    ]
    assert runner.decode(batch) is DecodeOutcome.DONE
    likeliest = runner.likeliest(4 + path[-1])
    draft.observe_trees(batch, [range(4), path])
    runner.keep_path(1, path)
    wanted = [Wanted(row, [*said, likeliest], draft.longest) for row in (0, 1)]
    in_a_row, along_the_tree = draft.propose(wanted)
    assert in_a_row == along_the_tree
    for row in (0, 1):
        runner.rewind(row, 0)
        draft.rewind(row, 0)


@pytest.mark.parametrize(("slots", "warned"), [(4, False), (63, True)])
def test_slots_that_leave_no_branches_are_told_at_the_start(
    smollm2: Path, slots: int, warned: bool
) -> None:
    words = ["--model", str(smollm2), "--target-device", "cpu:0", "--max-ctx", "256"]
    words += ["--draft", str(TRAINED), "--ddtree", "--max-concurrency", str(slots)]
    model = parse_command_line(words, {}).config.models[0]  # type: ignore[union-attr]
    file = check_model_file(model.path)
    (place,) = place_models([model], [file], [check_draft_file(str(TRAINED), None, file)])
    loaded = model_loading.load_llama(model, place, 1, lambda _: None, threading.Event())
    assert loaded.drafts is not None
    loaded.drafts.close()
    loaded.runner.close()
    assert any("guesses are chains" in line for line in loaded.warnings) == warned


def test_trees_of_one_size_are_computed_with_one_graph_however_many_leaves_they_have(
    house: House,
) -> None:
    runner = house.runner
    tokens = tuple(runner.vocabulary.tokenize(SEA))
    runner.decode([BatchSlice(0, 0, tokens, 1)])
    position = len(tokens)
    trees = [(-1, 0, 1, 2, 3), (-1, 0, 0, 0, 0), (-1, 0, 0, 1, 2), (-1, 0, 1, 1, 1)]

    def graphs_used_again() -> int:
        return int(llama.llama_perf_context(runner.context).n_reused)

    def step(parents: tuple[int, ...]) -> list[int]:
        nonlocal position
        runner.decode([BatchSlice(0, position, tokens[: len(parents)], len(parents), parents)])
        said = [runner.likeliest(output) for output in range(len(parents))]
        runner.keep_path(0, [0])
        runner.rewind(0, position)
        return said

    # The widest settles how many sequences a batch of this size has.
    said = [step(parents) for parents in trees for _ in range(2)]
    before = graphs_used_again()
    again = [step(parents) for parents in trees for _ in range(2)]
    assert graphs_used_again() == before + len(again)
    assert again == said
    runner.rewind(0, 0)
    assert runner.paths_held == 0
