"""What every runner promises: one suite for the scripted fake and for llama.cpp.

After it come the promises that only a real model can keep or break.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

import dflash_trio.engine.llama_runner as llama_runner
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.llama_abi import gpu_devices
from dflash_trio.engine.llama_runner import LlamaRunner, LlamaSpec
from dflash_trio.engine.llama_sampler import native_seed
from dflash_trio.engine.model_runner import (
    BatchSlice,
    DecodeOutcome,
    EngineError,
    LoadingStopped,
    ModelLoadError,
    ModelRunner,
)
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.generation.request import SamplingParams
from tests.engine.engine_helpers import GREEDY
from tests.engine.test_model_file import write_gguf
from tests.support.http_client import PATIENCE

DONE, NO_CELLS, ABORTED = DecodeOutcome
SEA = "The history of the sea is long, and"
BREAD = "To bake a good loaf of bread you need flour, water and"
NIGHT = "At night, when the city sleeps, the old clock tower"


class Runner(ModelRunner, Protocol):
    """Both runners show their logits, too."""

    def logits(self, output: int) -> Any: ...


Make = Callable[..., Runner]


def load_llama(path: Path, **changes: Any) -> LlamaRunner:
    """In the bit-equal configuration, unless changed."""
    settings: dict[str, Any] = {
        "path": str(path),
        "devices": (DevicePlacement("cpu", 0),),
        "slots": 3,
        "max_ctx": 256,
        "pool": None,
        "chunk": 128,
        "threads": 1,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
        "flash_attn": "on",
    }
    on_progress = changes.pop("on_progress", lambda _: None)
    stopped = changes.pop("stopped", None) or threading.Event()
    return LlamaRunner(LlamaSpec(**(settings | changes)), on_progress=on_progress, stopped=stopped)


@pytest.fixture(params=["scripted", pytest.param("llama", marks=pytest.mark.real)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes runners of one kind; ``slots``, ``max_ctx`` and ``pool`` as for any model."""
    made: list[Runner] = []

    def make(*, slots: int = 3, max_ctx: int = 256, pool: int | None = None) -> Runner:
        if request.param == "scripted":
            made.append(ScriptedRunner(slots=slots, cells=pool or slots * max_ctx))
        else:
            path = request.getfixturevalue("smollm2")
            made.append(
                load_llama(
                    path,
                    slots=slots,
                    max_ctx=max_ctx,
                    pool=pool,
                    chunk=max_ctx,
                    draft_outputs=4 * slots,
                    sampling_threads=3,
                )
            )
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.fixture
def runner(make: Make) -> Runner:
    return make()


def tokens_of(runner: Runner, text: str) -> list[int]:
    return runner.vocabulary.tokenize(text)


def prefill(runner: Runner, seq_id: int, tokens: Sequence[int]) -> None:
    batch = [BatchSlice(seq_id, runner.sequence_length(seq_id), tokens, 1)]
    assert runner.decode(batch) is DONE


def go_on(runner: Runner, seq_id: int, count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """``count`` tokens after a batch whose only slice was this sequence's."""
    sampler = runner.new_sampler(sampling, ())
    tokens = [sampler.sample(0)]
    while len(tokens) < count:
        prefill(runner, seq_id, tokens[-1:])
        tokens.append(sampler.sample(0))
    sampler.close()
    return tokens


def say(runner: Runner, text: str, count: int = 12, sampling: SamplingParams = GREEDY) -> list[int]:
    """From an empty row 0 to an empty row 0."""
    prefill(runner, 0, tokens_of(runner, text))
    tokens = go_on(runner, 0, count, sampling)
    runner.rewind(0, 0)
    return tokens


# ------------------------------------------------------------------------------ the KV cache


def test_every_row_is_empty_at_the_start(runner: Runner) -> None:
    assert [runner.sequence_length(row) for row in range(3)] == [0, 0, 0]


def test_a_sequence_holds_as_many_cells_as_tokens_were_decoded(runner: Runner) -> None:
    tokens = tokens_of(runner, SEA)
    prefill(runner, 1, tokens)
    assert [runner.sequence_length(row) for row in range(3)] == [0, len(tokens), 0]
    prefill(runner, 1, tokens[:1])
    assert runner.sequence_length(1) == len(tokens) + 1


@pytest.mark.parametrize("off_by", [-2, -1, 1, 2])
def test_positions_must_continue_without_gap_or_overlap(runner: Runner, off_by: int) -> None:
    tokens = tokens_of(runner, SEA)
    prefill(runner, 0, tokens)
    with pytest.raises(EngineError):
        runner.decode([BatchSlice(0, len(tokens) + off_by, tokens[:1], 1)])
    assert runner.sequence_length(0) == len(tokens)


def test_a_slice_without_tokens_is_refused(runner: Runner) -> None:
    with pytest.raises(EngineError, match="empty slice"):
        runner.decode([BatchSlice(0, 0, (), 1)])


def test_rewinding_to_nothing_frees_the_row_for_another_sequence(runner: Runner) -> None:
    expected = say(runner, BREAD)
    say(runner, SEA)
    assert runner.sequence_length(0) == 0
    assert say(runner, BREAD) == expected


def test_rewinding_an_empty_row_is_harmless(runner: Runner) -> None:
    runner.rewind(2, 0)
    assert runner.sequence_length(2) == 0


def test_rewinding_one_sequence_leaves_the_others_alone(runner: Runner) -> None:
    expected = say(runner, SEA)
    tokens = tokens_of(runner, SEA)
    prefill(runner, 1, tokens_of(runner, BREAD))
    prefill(runner, 0, tokens)
    runner.rewind(1, 0)
    assert runner.sequence_length(0) == len(tokens)
    assert go_on(runner, 0, 12)[1:] == expected[1:]


@pytest.mark.parametrize("kept", [1, 4, -1])
def test_after_rewinding_in_part_the_same_tokens_have_the_same_continuation(
    runner: Runner, kept: int
) -> None:
    tokens = tokens_of(runner, SEA)
    expected = say(runner, SEA)
    prefill(runner, 0, tokens)
    go_on(runner, 0, 5)
    length = kept % len(tokens)
    runner.rewind(0, length)
    assert runner.sequence_length(0) == length
    prefill(runner, 0, tokens[length:])
    assert go_on(runner, 0, 12) == expected


def test_a_prompt_in_chunks_is_the_same_prompt(runner: Runner) -> None:
    expected = say(runner, BREAD)
    tokens = tokens_of(runner, BREAD)
    for at in range(0, len(tokens), 3):
        prefill(runner, 0, tokens[at : at + 3])
    assert go_on(runner, 0, 12) == expected


def test_a_sequence_says_the_same_alone_and_among_neighbours(runner: Runner) -> None:
    alone = [say(runner, text) for text in (SEA, BREAD, NIGHT)]
    prompts = [tokens_of(runner, text) for text in (SEA, BREAD, NIGHT)]
    # The first two begin together; the third joins with its prompt while they decode.
    assert runner.decode([BatchSlice(0, 0, prompts[0], 1), BatchSlice(1, 0, prompts[1], 1)]) is DONE
    samplers = [runner.new_sampler(GREEDY, p) for p in prompts]
    said = [[samplers[0].sample(0)], [samplers[1].sample(1)], []]
    for step in range(12):
        batch = [BatchSlice(i, runner.sequence_length(i), said[i][-1:], 1) for i in (0, 1)]
        if step >= 3:
            third = prompts[2] if step == 3 else said[2][-1:]
            batch.append(BatchSlice(2, runner.sequence_length(2), third, 1))
        assert runner.decode(batch) is DONE
        for index, item in enumerate(batch):
            said[item.seq_id].append(samplers[item.seq_id].sample(index))
    for ours, expected in zip(said, alone, strict=True):
        count = min(len(ours), len(expected))
        assert count >= 9
        assert ours[:count] == expected[:count]
    for sampler in samplers:
        sampler.close()


def test_without_free_cells_nothing_is_decoded_and_what_fits_goes_on(make: Make) -> None:
    runner = make(slots=2, max_ctx=256, pool=256)
    tokens = list(itertools.islice(itertools.cycle(tokens_of(runner, SEA)), 200))
    prefill(runner, 0, tokens)
    assert (
        runner.decode([BatchSlice(0, 200, tokens[:1], 1), BatchSlice(1, 0, tokens[:80], 1)])
        is NO_CELLS
    )
    assert [runner.sequence_length(row) for row in range(2)] == [200, 0]
    assert (
        runner.decode([BatchSlice(0, 200, tokens[:1], 1), BatchSlice(1, 0, tokens[:20], 1)]) is DONE
    )
    runner.rewind(0, 0)
    assert runner.decode([BatchSlice(1, 20, tokens[:150], 1)]) is DONE


# ---------------------------------------------------------------------------------- outputs


def test_outputs_exist_only_where_they_were_wanted(runner: Runner) -> None:
    tokens = tokens_of(runner, SEA)
    batch = [
        BatchSlice(0, 0, tokens, 1),
        BatchSlice(1, 0, tokens[:2], 0),
        BatchSlice(2, 0, tokens, 1),
    ]
    assert runner.decode(batch) is DONE
    sampler = runner.new_sampler(GREEDY, tokens)
    # Counted as outputs, not as slices.
    assert sampler.sample(0) == sampler.sample(1)
    with pytest.raises(EngineError, match="no logits for output 2"):
        sampler.sample(2)
    sampler.close()


def test_each_of_several_outputs_is_what_decoding_one_by_one_gives(runner: Runner) -> None:
    """Of one sequence's guesses, beside a neighbour's and a prompt in the middle of its prefill,
    with slices in another order than their rows have."""
    prompts = [tokens_of(runner, text) for text in (SEA, BREAD)]
    said = []
    for text in (SEA, BREAD):
        prefill(runner, 0, tokens_of(runner, text))
        said.append(go_on(runner, 0, 6))
        runner.rewind(0, 0)
    prefill(runner, 2, prompts[0])
    prefill(runner, 0, prompts[1])
    batch = [
        BatchSlice(2, len(prompts[0]), said[0][:5], 5),
        BatchSlice(1, 0, prompts[1][:4], 0),
        BatchSlice(0, len(prompts[1]), said[1][:3], 2),
    ]
    assert runner.decode(batch) is DONE
    sampler = runner.new_sampler(GREEDY, ())
    assert [sampler.sample(output) for output in range(5)] == said[0][1:6]
    assert [sampler.sample(output) for output in (5, 6)] == said[1][2:4]
    with pytest.raises(EngineError, match="no logits for output 7"):
        sampler.sample(7)
    assert runner.logprobs(4, said[0][5], 1).top[0].token == said[0][5]
    sampler.close()


def test_after_guesses_are_taken_back_a_sequence_goes_on_as_if_there_had_been_none(
    runner: Runner,
) -> None:
    expected = say(runner, SEA)
    tokens = tokens_of(runner, SEA)
    prefill(runner, 0, tokens)
    wrong = tokens_of(runner, BREAD)[:3]
    batch = [BatchSlice(0, len(tokens), (expected[0], expected[1], *wrong), 5)]
    assert runner.decode(batch) is DONE
    sampler = runner.new_sampler(GREEDY, ())
    assert [sampler.sample(output) for output in (0, 1)] == expected[1:3]
    sampler.close()
    assert runner.rewinds_freely
    runner.rewind(0, len(tokens) + 2)
    prefill(runner, 0, expected[2:3])
    assert go_on(runner, 0, 9) == expected[3:]


def test_more_outputs_than_tokens_are_refused(runner: Runner) -> None:
    with pytest.raises(EngineError, match="more outputs than tokens"):
        runner.decode([BatchSlice(0, 0, tokens_of(runner, SEA)[:2], 3)])


def test_outputs_of_the_step_before_are_gone(runner: Runner) -> None:
    tokens = tokens_of(runner, SEA)
    prefill(runner, 0, tokens)
    assert runner.decode([BatchSlice(1, 0, tokens, 0)]) is DONE
    sampler = runner.new_sampler(GREEDY, tokens)
    with pytest.raises(EngineError, match="no logits"):
        sampler.sample(0)
    sampler.close()


def test_a_greedy_sampler_picks_the_largest_logit(runner: Runner) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    logits = list(runner.logits(0))
    assert len(logits) == runner.vocabulary.size == runner.info.vocab_size
    assert go_on(runner, 0, 1) == [logits.index(max(logits))]


def once(runner: Runner, sampling: SamplingParams, prompt: Sequence[int] = ()) -> int:
    sampler = runner.new_sampler(sampling, prompt)
    token = sampler.sample(0)
    sampler.close()
    return token


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bias_of_minus_100_forbids_a_token_and_100_forces_it(
    runner: Runner, temperature: float
) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    favourite = once(runner, GREEDY)
    forbid = SamplingParams(temperature=temperature, seed=3, logit_bias=((favourite, -100.0),))
    assert once(runner, forbid) != favourite
    odd = tokens_of(runner, "~")[0]
    force = SamplingParams(temperature=temperature, seed=3, logit_bias=((odd, 100.0),))
    assert once(runner, force) == odd


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_biases_on_the_same_token_add_up(runner: Runner, temperature: float) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    odd = tokens_of(runner, "~")[0]
    both = ((odd, 100.0), (odd, -100.0))
    sampling = SamplingParams(temperature=temperature, seed=1, logit_bias=both)
    assert once(runner, sampling) == once(runner, GREEDY)


def test_a_bias_of_one_sampler_is_not_seen_by_another_on_the_same_output(runner: Runner) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    favourite = once(runner, GREEDY)
    odd = tokens_of(runner, "~")[0]
    biased = SamplingParams(temperature=0.0, logit_bias=((odd, 100.0), (favourite, -100.0)))
    assert once(runner, biased) == odd
    assert once(runner, GREEDY) == favourite


def test_the_same_seed_repeats_and_another_does_not(runner: Runner) -> None:
    def with_seed(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        return say(runner, SEA, 12, sampling)

    assert with_seed(1) == with_seed(1)
    assert len({tuple(with_seed(seed)) for seed in (0, 1, 2**32 - 1, 2**63, 2**64 - 1)}) == 5


def test_what_is_sampled_ahead_is_what_would_have_been_sampled(runner: Runner) -> None:
    kinds = [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=1.0, seed=8, repeat_penalty=1.3),
        GREEDY,
        SamplingParams(temperature=1.0, seed=9),
    ]
    prompt = tokens_of(runner, SEA)
    assert runner.decode([BatchSlice(0, 0, prompt, 3), BatchSlice(1, 0, prompt, 1)]) is DONE

    def said(*, ahead: bool) -> list[list[int]]:
        samplers = [runner.new_sampler(sampling, prompt) for sampling in kinds]
        tokens = []
        for _ in range(3):
            if ahead:
                runner.sample_ahead(list(zip(samplers, range(4), strict=True)))
            tokens.append([sampler.sample(output) for output, sampler in enumerate(samplers)])
        for sampler in samplers:
            sampler.close()
        return tokens

    assert runner.samples_ahead
    assert said(ahead=True) == said(ahead=False)


@pytest.mark.parametrize("asked", ["another-output", "with-a-mask"])
def test_what_was_sampled_ahead_cannot_be_taken_back(runner: Runner, asked: str) -> None:
    prompt = tokens_of(runner, SEA)
    assert runner.decode([BatchSlice(0, 0, prompt, 2)]) is DONE
    samplers = [runner.new_sampler(SamplingParams(temperature=1.0), ()) for _ in range(2)]
    runner.sample_ahead([(samplers[0], 0), (samplers[1], 1)])
    output, mask = (0, mask_of(runner, [5])) if asked == "with-a-mask" else (1, None)
    with pytest.raises(EngineError, match="ahead"):
        samplers[0].sample(output, mask)
    for sampler in samplers:
        sampler.close()


def test_without_a_seed_every_sampler_draws_its_own(runner: Runner) -> None:
    sampling = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=None)
    assert len({tuple(say(runner, SEA, 8, sampling)) for _ in range(3)}) > 1


@pytest.mark.parametrize("temperature", [1e-9, 1e-40])
def test_a_temperature_of_next_to_nothing_is_greedy(runner: Runner, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert say(runner, SEA, 3, sampling) == say(runner, SEA, 3)


# -------------------------------------------------------------------------------- penalties


def forced(runner: Runner, token: int, last_n: int, temperature: float = 0.0) -> SamplingParams:
    """Forces ``token``, unless it is among the tokens that penalties look back at."""
    return SamplingParams(
        temperature=temperature,
        seed=1,
        repeat_penalty=1000.0,
        penalty_last_n=last_n,
        logit_bias=((token, 100.0),),
    )


@pytest.mark.parametrize(
    ("last_n", "sees_it"),
    [(-1, True), (64, True), (5, True), (4, False), (1, False), (0, False), (2**31 - 1, True)],
)
def test_penalties_look_back_into_the_prompt_exactly_as_far_as_asked(
    runner: Runner, last_n: int, sees_it: bool
) -> None:
    odd = tokens_of(runner, "~")[0]
    others = [token for token in tokens_of(runner, NIGHT) if token != odd]
    prompt = [*others, odd, *others[:4]]  # fifth from the end
    prefill(runner, 0, prompt)
    assert (once(runner, forced(runner, odd, last_n), prompt) != odd) is sees_it


def test_penalties_look_back_at_the_answer_and_the_window_moves_on(runner: Runner) -> None:
    odd = tokens_of(runner, "~")[0]
    prefill(runner, 0, tokens_of(runner, NIGHT))
    sampler = runner.new_sampler(forced(runner, odd, 2), tokens_of(runner, NIGHT))
    drawn = [sampler.sample(0) == odd for _ in range(7)]
    sampler.close()
    assert drawn == [True, False, False, True, False, False, True]


def test_penalties_count_when_sampling_with_a_temperature_too(runner: Runner) -> None:
    odd = tokens_of(runner, "~")[0]
    prefill(runner, 0, tokens_of(runner, NIGHT))
    assert once(runner, forced(runner, odd, -1, 0.5)) == odd
    assert once(runner, forced(runner, odd, -1, 0.5), [odd]) != odd


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_an_additive_penalty_lowers_what_was_said(runner: Runner, field: str) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    favourite = once(runner, GREEDY)
    penalty = SamplingParams(temperature=0.0, **{field: 90.0})
    assert once(runner, penalty) == favourite
    assert once(runner, penalty, [favourite]) != favourite
    reward = SamplingParams(temperature=0.0, **{field: -90.0})
    odd = tokens_of(runner, "~")[0]
    assert once(runner, reward, [odd]) == odd


# ------------------------------------------------------------------------------------ abort


def test_an_abort_that_was_forgotten_does_not_touch_the_next_decode(runner: Runner) -> None:
    expected = say(runner, SEA)
    runner.abort()
    runner.rearm()
    assert say(runner, SEA) == expected


def test_an_abort_just_before_a_decode_cuts_it(runner: Runner) -> None:
    expected = say(runner, SEA)
    runner.abort()
    assert runner.decode([BatchSlice(0, 0, tokens_of(runner, SEA), 1)]) is ABORTED
    runner.rewind(0, 0)
    runner.rearm()
    assert say(runner, SEA) == expected


def test_an_abort_just_after_a_decode_does_not_touch_what_it_computed(runner: Runner) -> None:
    expected = say(runner, SEA, 6)
    prefill(runner, 0, tokens_of(runner, SEA))
    said = []
    sampler = runner.new_sampler(GREEDY, ())
    for _ in range(6):
        runner.abort()
        said.append(sampler.sample(0))
        runner.rearm()
        prefill(runner, 0, said[-1:])
    sampler.close()
    assert said == expected


# ------------------------------------------------------------------- copies, masks, likelihoods


def test_a_copied_sequence_goes_on_as_its_original_would(runner: Runner) -> None:
    expected = say(runner, SEA, 6)
    prefill(runner, 0, tokens_of(runner, SEA))
    first = runner.new_sampler(GREEDY, ())
    said = [first.sample(0)]
    runner.copy(0, 1, runner.sequence_length(0))
    assert runner.sequence_length(1) == runner.sequence_length(0)
    # The original goes another way, or away; the copy does not notice.
    prefill(runner, 0, tokens_of(runner, "~~"))
    runner.rewind(0, 0)
    for _ in range(5):
        prefill(runner, 1, said[-1:])
        said.append(first.sample(0))
    first.close()
    runner.rewind(1, 0)
    assert said == expected


@pytest.mark.parametrize("pool", [None, 600])
def test_a_copy_may_begin_anew_in_the_middle(make: Make, pool: int | None) -> None:
    """In a cache of its own rows, and in one pool of cells."""
    runner = make(slots=3, max_ctx=256, pool=pool)
    assert runner.shares_cells is (pool is not None or isinstance(runner, ScriptedRunner))
    head, tail = tokens_of(runner, SEA), tokens_of(runner, BREAD)
    prefill(runner, 0, head + tail)
    expected = go_on(runner, 0, 4)
    runner.rewind(0, 0)
    prefill(runner, 0, head + tokens_of(runner, NIGHT))
    runner.copy(0, 2, len(head))
    assert runner.sequence_length(2) == len(head)
    prefill(runner, 2, tail)
    assert go_on(runner, 2, 4) == expected


@pytest.mark.parametrize("pool", [None, 512])
@pytest.mark.parametrize("loaded", ["source", "target"])
def test_a_state_may_be_loaded_into_the_rows_of_a_copy_before_the_next_step(
    make: Make, pool: int | None, loaded: str
) -> None:
    runner = make(slots=3, max_ctx=256, pool=pool)
    head, tail = tokens_of(runner, SEA), tokens_of(runner, BREAD)
    prefill(runner, 0, tokens_of(runner, NIGHT) * 3)
    state = runner.save(0)
    prefill(runner, 0, tail)
    after_load = go_on(runner, 0, 4)
    runner.rewind(0, 0)
    prefill(runner, 0, head + tail)
    after_copy = go_on(runner, 0, 4)
    runner.rewind(0, len(head))
    runner.copy(0, 1, len(head))
    emptied, stays = (0, 1) if loaded == "source" else (1, 0)
    runner.rewind(emptied, 0)
    runner.load(emptied, state)
    prefill(runner, stays, tail)
    assert go_on(runner, stays, 4) == after_copy
    prefill(runner, emptied, tail)
    assert go_on(runner, emptied, 4) == after_load


@pytest.mark.parametrize("pool", [None, 512])
def test_what_is_saved_of_a_copy_is_what_was_copied(make: Make, pool: int | None) -> None:
    runner = make(slots=3, max_ctx=256, pool=pool)
    head, tail = tokens_of(runner, SEA), tokens_of(runner, BREAD)
    prefill(runner, 0, head + tail)
    expected = go_on(runner, 0, 4)
    runner.rewind(0, 0)
    prefill(runner, 2, tokens_of(runner, NIGHT) * 3)  # lay there before
    runner.rewind(2, 0)
    prefill(runner, 0, head)
    runner.copy(0, 2, len(head))
    state = runner.save(2)
    for row in range(3):
        runner.rewind(row, 0)
    runner.load(1, state)
    assert runner.sequence_length(1) == len(head)
    prefill(runner, 1, tail)
    assert go_on(runner, 1, 4) == expected


def test_a_saved_sequence_goes_on_in_another_row_as_it_would_have(runner: Runner) -> None:
    expected = say(runner, SEA, 6)
    prefill(runner, 0, tokens_of(runner, SEA))
    state = runner.save(0)
    runner.rewind(0, 0)
    prefill(runner, 0, tokens_of(runner, BREAD))  # something else is there now
    runner.load(2, state)
    assert runner.sequence_length(2) == len(tokens_of(runner, SEA))
    # The logits of its last token are not part of it.
    last = runner.sequence_length(2) - 1
    assert runner.can_rewind(2, last)
    runner.rewind(2, last)
    prefill(runner, 2, tokens_of(runner, SEA)[-1:])
    assert go_on(runner, 2, 6) == expected
    assert runner.sequence_length(0) == len(tokens_of(runner, BREAD))


def test_a_saved_sequence_without_cells_is_refused_and_had_once_there_are(make: Make) -> None:
    runner = make(slots=3, max_ctx=256, pool=256)
    tokens = (tokens_of(runner, SEA) * 30)[:150]
    prefill(runner, 0, tokens)
    state = runner.save(0)
    with pytest.raises(EngineError):
        runner.load(2, state)
    runner.rewind(2, 0)
    assert runner.sequence_length(0) == 150
    runner.rewind(0, 0)
    runner.load(2, state)
    assert runner.sequence_length(2) == 150


@pytest.mark.real
def test_a_sliding_window_says_where_it_cannot_go_back_exactly(gemma: Path) -> None:
    for keeps, back in ((False, False), (True, True)):
        runner = load_llama(gemma, slots=1, max_ctx=1536, chunk=512, keeps_prefixes=keeps)
        tokens = list(itertools.islice(itertools.cycle(tokens_of(runner, SEA + BREAD)), 1400))
        for at in range(0, 1400, 512):
            prefill(runner, 0, tokens[at : at + 512])
        assert runner.can_rewind(0, 1400)
        assert runner.can_rewind(0, 100) is back
        runner.close()


def mask_of(runner: Runner, allowed: Sequence[int]) -> bytes:
    bits = bytearray(-(-runner.vocabulary.size // 32) * 4)
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.5, seed=1),
        SamplingParams(temperature=0.0, repeat_penalty=1.2),
    ],
)
def test_only_what_a_mask_allows_is_chosen_and_the_logits_stay_as_they_were(
    runner: Runner, sampling: SamplingParams
) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    favourite = once(runner, GREEDY)
    before = runner.logprobs(0, favourite, 5)
    allowed = tokens_of(runner, "~")[:1] + tokens_of(runner, "#")[:1]
    for _ in range(8):
        sampler = runner.new_sampler(sampling, ())
        assert sampler.sample(0, mask_of(runner, allowed)) in allowed
        sampler.close()
    assert runner.logprobs(0, favourite, 5) == before
    assert once(runner, GREEDY) == favourite
    runner.rewind(0, 0)


def test_log_probabilities_are_of_a_distribution_and_the_likeliest_come_first(
    runner: Runner,
) -> None:
    prefill(runner, 0, tokens_of(runner, SEA))
    favourite = once(runner, GREEDY)
    said = runner.logprobs(0, favourite, 20)
    assert len(said.top) == 20
    assert said.top[0] == said.chosen
    assert [a.logprob for a in said.top] == sorted((a.logprob for a in said.top), reverse=True)
    assert len({a.token for a in said.top}) == 20
    everything = runner.logprobs(0, favourite, runner.vocabulary.size - 1).top
    last = {*range(runner.vocabulary.size)} - {a.token for a in everything}
    rest = runner.logprobs(0, last.pop(), 0)
    assert rest.top == ()
    total = sum(math.exp(a.logprob) for a in (*everything, rest.chosen))
    assert total == pytest.approx(1, abs=1e-6)
    assert said.chosen.piece == runner.vocabulary.shown_piece(favourite)
    runner.rewind(0, 0)


# -------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("text", ["", "Hello there", "naïve café 😀 — π", "a\0b", " \n\t x"])
def test_the_pieces_of_a_text_are_its_bytes(runner: Runner, text: str) -> None:
    vocabulary = runner.vocabulary
    assert b"".join(map(vocabulary.piece, vocabulary.tokenize(text))) == text.encode()


def test_control_tokens_are_made_of_their_literals_only_when_asked_for(runner: Runner) -> None:
    vocabulary = runner.vocabulary
    assert vocabulary.control_tokens
    for literal, token in vocabulary.control_tokens.items():
        plain = vocabulary.tokenize(f"a{literal}b")
        assert token not in plain
        assert b"".join(map(vocabulary.piece, plain)) == f"a{literal}b".encode()
        assert token in vocabulary.tokenize(f"a{literal}b", parse_special=True)
        assert vocabulary.piece(token) == b"", "control tokens show nothing"


def test_no_bos_is_added_by_tokenizing(runner: Runner) -> None:
    vocabulary = runner.vocabulary
    assert vocabulary.bos is not None
    assert vocabulary.bos not in vocabulary.tokenize("Hello")
    assert vocabulary.tokenize("") == []
    assert isinstance(vocabulary.adds_bos, bool)


def test_the_tokens_that_end_a_generation_are_control_tokens(runner: Runner) -> None:
    vocabulary = runner.vocabulary
    assert vocabulary.eos in vocabulary.eog_tokens
    assert vocabulary.eog_tokens <= set(vocabulary.control_tokens.values())
    assert all(0 <= token < vocabulary.size for token in vocabulary.eog_tokens)


# ------------------------------------------------------------------------------------- close


def test_closing_twice_is_closing_once_and_ends_the_tokenizer(make: Make) -> None:
    runner = make(slots=1)
    vocabulary = runner.vocabulary
    assert vocabulary.tokenize("x")
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="no longer loaded"):
        vocabulary.tokenize("x")


def test_an_abort_after_closing_is_harmless(make: Make) -> None:
    runner = make(slots=1)
    runner.close()
    runner.abort()


def test_threads_that_tokenize_while_the_model_is_freed_get_an_answer_or_an_error(
    make: Make,
) -> None:
    runner = make(slots=1)
    vocabulary = runner.vocabulary
    expected = vocabulary.tokenize(SEA)
    wrong: list[object] = []
    begun = threading.Barrier(4)

    def tokenize() -> None:
        begun.wait(PATIENCE)
        while True:
            try:
                if vocabulary.tokenize(SEA) != expected:
                    wrong.append("other tokens")
            except EngineError:
                return
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=tokenize) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE)
    runner.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not wrong


# ============================================================================ llama.cpp alone


@pytest.mark.parametrize(
    ("seed", "native"),
    [
        (None, 0xFFFFFFFF),
        (0, 0),
        (1, 1),
        (2**32 - 2, 2**32 - 2),
        # Its checksum is, of all numbers, the one that would mean "random".
        (2**32 - 1, 2**32 - 2),
        (2**32, zlib.crc32((2**32).to_bytes(8, "little"))),
        (2**63, zlib.crc32((2**63).to_bytes(8, "little"))),
        (2**64 - 1, zlib.crc32(b"\xff" * 8)),
    ],
)
def test_a_seed_maps_to_one_native_seed(seed: int | None, native: int) -> None:
    assert native_seed(seed) == native


def test_no_given_seed_ever_means_a_random_one() -> None:
    edges = [2**bits + step for bits in range(65) for step in (-1, 0, 1)]
    for seed in edges:
        if 0 <= seed < 2**64:
            assert 0 <= native_seed(seed) < 0xFFFFFFFF


@pytest.fixture(scope="module")
def small(smollm2: Path) -> Iterator[LlamaRunner]:
    runner = load_llama(smollm2, slots=1)
    yield runner
    runner.close()


@pytest.mark.real
def test_the_facts_of_a_loaded_model_are_told(small: LlamaRunner) -> None:
    info, vocabulary = small.info, small.vocabulary
    assert (info.architecture, info.device, info.threads, info.gpu_layers) == (
        "llama",
        "cpu:0",
        1,
        0,
    )
    assert info.trained_ctx == 8192
    assert info.chat_template is not None
    assert "im_start" in info.chat_template
    assert vocabulary.control_tokens["<|im_end|>"] == vocabulary.eos == 2
    assert vocabulary.bos == vocabulary.control_tokens["<|im_start|>"] == 1
    assert not vocabulary.adds_bos
    assert {0, 2} <= vocabulary.eog_tokens


@pytest.mark.real
def test_gemma_wants_a_bos_and_ends_its_turns_with_its_own_token(gemma: Path) -> None:
    runner = load_llama(gemma, slots=1)
    vocabulary = runner.vocabulary
    assert runner.info.architecture == "gemma3"
    assert vocabulary.adds_bos
    assert vocabulary.bos == vocabulary.control_tokens["<bos>"] == 2
    assert vocabulary.control_tokens["<end_of_turn>"] in vocabulary.eog_tokens
    assert b"".join(map(vocabulary.piece, vocabulary.tokenize("héllo"))) == "héllo".encode()
    # Back to front through a sliding window that is larger than the context.
    assert say(runner, SEA, 4) == say(runner, SEA, 4)
    runner.close()
    with pytest.raises(EngineError):
        vocabulary.tokenize("x")


@pytest.mark.real
def test_a_context_beyond_the_trained_one_is_warned_about(smollm2: Path) -> None:
    warnings: list[str] = []
    load_llama(smollm2, slots=1, max_ctx=8448, warnings=warnings).close()
    assert len(warnings) == 1
    assert "8448" in warnings[0]
    assert "8192" in warnings[0]


@pytest.mark.real
def test_context_and_pool_are_resolved_from_the_file(smollm2: Path) -> None:
    runner = load_llama(smollm2, slots=2, max_ctx=None)
    assert (runner.max_ctx, runner.pool) == (8192, 16384)
    runner.close()


@pytest.mark.real
def test_a_batch_larger_than_the_chunk_and_the_slots_is_refused(small: LlamaRunner) -> None:
    tokens = list(itertools.islice(itertools.cycle(tokens_of(small, SEA)), 130))
    with pytest.raises(EngineError, match="129"):
        small.decode([BatchSlice(0, 0, tokens, 1)])
    assert small.sequence_length(0) == 0


@pytest.mark.real
def test_a_reader_in_the_tokenizer_holds_up_no_other_reader_but_the_unloading(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_llama(smollm2, slots=1)
    vocabulary = runner.vocabulary
    inside, leave = threading.Event(), threading.Event()
    tokenize = llama_runner.llama.llama_tokenize

    def slow(*arguments: Any) -> int:
        inside.set()
        assert leave.wait(PATIENCE)
        return int(tokenize(*arguments))

    monkeypatch.setattr(llama_runner.llama, "llama_tokenize", slow)
    reader = threading.Thread(target=vocabulary.tokenize, args=("a book",))
    reader.start()
    assert inside.wait(PATIENCE)
    assert vocabulary.piece(1000), "another reader is not held up"
    closing = threading.Thread(target=runner.close)
    closing.start()
    while vocabulary._vocab is not None:
        assert closing.is_alive()
    with pytest.raises(EngineError):
        vocabulary.tokenize("too late")
    assert runner._model is not None, "it is not freed under a reader"
    leave.set()
    reader.join(PATIENCE)
    closing.join(PATIENCE)
    assert runner._model is None


@pytest.mark.real
def test_an_abort_ends_a_long_prefill_early_and_the_next_decode_is_whole(smollm2: Path) -> None:
    runner = load_llama(smollm2, slots=2, max_ctx=1024, chunk=1024)
    tokens = list(itertools.islice(itertools.cycle(tokens_of(runner, SEA + BREAD)), 600))
    # In the machine's work, which what else it does takes nothing away from.
    begin = time.process_time()
    prefill(runner, 0, tokens)
    full = time.process_time() - begin
    runner.rewind(0, 0)
    expected = say(runner, SEA, 4)

    done = threading.Event()

    def insist() -> None:
        # Again and again: the first may come before the decode has begun, and the last after it
        # has ended, which is what the next decode must not notice.
        while not done.wait(0.005):
            runner.abort()

    thread = threading.Thread(target=insist)
    thread.start()
    begin = time.process_time()
    outcome = runner.decode([BatchSlice(0, 0, tokens, 1)])
    took = time.process_time() - begin
    done.set()
    thread.join(PATIENCE)
    assert outcome is ABORTED
    assert took < full / 2
    assert runner.sequence_length(0) < 600
    runner.rearm()
    runner.rewind(0, 0)
    assert runner.sequence_length(0) == 0
    assert say(runner, SEA, 4) == expected
    runner.close()


# ---------------------------------------------------------------------------- loads that fail


@pytest.mark.real
def test_a_file_without_a_model_in_it_is_a_load_error_with_llama_cpps_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "hollow.gguf")
    with pytest.raises(ModelLoadError) as caught:
        load_llama(path)
    assert str(path) in str(caught.value)
    assert "llama.cpp gave no reason" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.real
@pytest.mark.parametrize("content", [b"", b"Once upon a time", b"GGUF\x03\0\0\0"])
def test_a_file_of_another_kind_is_a_load_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "story.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"story\.gguf"):
        load_llama(path)


@pytest.mark.real
def test_a_truncated_model_is_a_load_error(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(40_000_000))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_llama(path)


@pytest.mark.real
def test_a_device_that_is_not_there_is_a_load_error_naming_those_that_are(smollm2: Path) -> None:
    if gpu_devices():
        pytest.skip("this build has GPUs")
    with pytest.raises(ModelLoadError, match=r"no device cuda:0 here.*have: cpu:0"):
        load_llama(smollm2, devices=(DevicePlacement("cuda", 0),))


@pytest.mark.real
def test_any_cpu_group_is_the_cpu(smollm2: Path) -> None:
    runner = load_llama(smollm2, slots=1, devices=(DevicePlacement("cpu", 3),))
    assert (runner.info.device, runner.info.gpu_layers) == ("cpu:3", 0)
    runner.close()


@pytest.mark.real
def test_stopping_while_loading_ends_the_loading(smollm2: Path) -> None:
    stopped = threading.Event()
    fractions: list[float] = []

    def stop(fraction: float) -> None:
        fractions.append(fraction)
        stopped.set()

    with pytest.raises(LoadingStopped):
        load_llama(smollm2, on_progress=stop, stopped=stopped)
    assert len(fractions) == 1


@pytest.mark.real
def test_progress_runs_from_none_to_all(smollm2: Path) -> None:
    fractions: list[float] = []
    load_llama(smollm2, slots=1, on_progress=fractions.append).close()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.real
def test_what_the_progress_callback_raises_ends_the_loading_and_comes_out(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class LoopIsGone(Exception):
        pass

    def gone(_: float) -> None:
        raise LoopIsGone

    with pytest.raises(LoopIsGone):
        load_llama(smollm2, on_progress=gone)
    assert capfd.readouterr().err == ""


@pytest.mark.real
@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_each_filter_alone_can_leave_nothing_but_the_likeliest_token(
    small: LlamaRunner, narrow: dict[str, Any]
) -> None:
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **narrow}
    prefill(small, 0, tokens_of(small, SEA))
    likeliest = once(small, GREEDY)
    drawn = {
        once(small, SamplingParams(temperature=5.0, seed=seed, **filters)) for seed in range(8)
    }
    small.rewind(0, 0)
    assert drawn == {likeliest}


@pytest.mark.real
def test_closing_frees_the_context_and_then_the_model_each_once(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_llama(smollm2, slots=1)
    freed: list[str] = []

    def noting(name: str) -> Callable[[Any], None]:
        native = getattr(llama_runner.llama, name)

        def free(handle: Any) -> None:
            freed.append(name)
            native(handle)

        return free

    for name in ("llama_free", "llama_model_free"):
        monkeypatch.setattr(llama_runner.llama, name, noting(name))
    runner.close()
    runner.close()
    assert freed == ["llama_free", "llama_model_free"]
