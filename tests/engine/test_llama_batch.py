"""A batch that would end the process is refused before llama.cpp sees it."""

from __future__ import annotations

import pytest

from dflash_trio.engine.llama_batch import LlamaBatch
from dflash_trio.engine.model_runner import BatchSlice, EngineError


def test_no_more_outputs_are_wanted_than_the_context_was_made_for() -> None:
    batch = LlamaBatch(64, most_outputs=8)
    guesses = BatchSlice(0, 0, (5,) * 5, 5)
    batch.fill([guesses, BatchSlice(1, 0, (5,) * 30, 3)])
    assert len(batch) == 35
    with pytest.raises(EngineError, match="more than 8 outputs"):
        batch.fill([guesses, BatchSlice(1, 0, (5,) * 30, 4)])


def test_no_more_tokens_are_computed_than_the_context_was_made_for() -> None:
    batch = LlamaBatch(64, most_outputs=8)
    batch.fill([BatchSlice(0, 0, (5,) * 64, 1)])
    with pytest.raises(EngineError, match="more than 64 tokens"):
        batch.fill([BatchSlice(0, 0, (5,) * 64, 1), BatchSlice(1, 0, (5,), 1)])
