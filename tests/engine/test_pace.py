"""What copying a row costs beside computing its tokens."""

from __future__ import annotations

import pytest

from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.pace import MANY_TOKENS, PROMPT_TOKENS, Pace, prompt_tokens


def test_saving_costs_nothing_before_anything_was_measured() -> None:
    pace = Pace()
    assert pace.saving_costs == 0
    pace.saved(1.0)
    assert pace.saving_costs == 0  # no prompt was computed yet


def test_saving_and_loading_are_told_in_tokens_of_a_prompt() -> None:
    pace = Pace()
    pace.computed(100, 0.1)
    pace.saved(0.008)
    assert pace.saving_costs == pytest.approx(2 * 0.008 / 0.001)


def test_steps_without_a_prompt_say_nothing_of_prompts() -> None:
    pace = Pace()
    pace.computed(100, 0.1)
    pace.computed(PROMPT_TOKENS - 1, 10.0)
    pace.saved(0.5)
    assert pace.saving_costs == pytest.approx(1000)


def test_where_a_steps_own_costs_are_high_small_steps_say_nothing_of_prompts() -> None:
    pace = Pace(MANY_TOKENS)
    pace.computed(500, 0.01)
    pace.computed(MANY_TOKENS - 1, 0.005)
    pace.saved(0.002)
    assert pace.saving_costs == pytest.approx(2 * 0.002 / 0.00002)


def test_old_measurements_fade() -> None:
    pace = Pace()
    pace.computed(100, 0.1)
    pace.saved(1.0)
    for _ in range(60):
        pace.saved(0.001)
    assert pace.saving_costs == pytest.approx(2, rel=0.01)


def test_only_what_is_of_prompts_counts_as_such() -> None:
    decoding = [BatchSlice(row, 9, (1,), 1) for row in range(16)]
    guessing = [BatchSlice(16, 9, (1, 2, 3), 3)]
    prompts = [BatchSlice(17, 0, (1,) * 30, 0), BatchSlice(18, 0, (1,) * 5, 1)]
    assert prompt_tokens(decoding + guessing) == 0
    assert prompt_tokens(decoding + guessing + prompts) == 35
