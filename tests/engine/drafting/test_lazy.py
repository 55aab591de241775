"""A lazy draft is loaded when a request comes and freed when none has come for a while."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from dflash_trio.engine.drafting.lazy import LazyDraft
from dflash_trio.engine.drafting.provider import DraftProvider, Wanted
from dflash_trio.engine.model_runner import BatchSlice, LoadingStopped, ModelLoadError
from tests.engine.drafting.scripted_provider import CheckingProvider


def sevens(_tokens: Sequence[int], limit: int) -> list[int]:
    return [7] * limit


class Loads:
    """Loads drafts, and knows the time."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made: list[CheckingProvider] = []
        self.error = error
        self.tries = 0
        self.now = 100.0
        self.draft = LazyDraft(
            self.load, kind="dflash", longest=8, idle_seconds=30, clock=lambda: self.now
        )

    def load(self) -> DraftProvider:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.made.append(CheckingProvider(sevens))
        return self.made[-1]

    def guess(self) -> list[list[int]]:
        return self.draft.propose([Wanted(0, [1, 2], 3), Wanted(1, [1, 2], 2)])


def test_nothing_is_loaded_or_guessed_until_somebody_comes() -> None:
    loads = Loads()
    loads.draft.observe([BatchSlice(0, 0, (1,), 1)], [1])
    loads.draft.rewind(0, 0)
    loads.draft.copy(0, 1, 1)
    loads.draft.replaced(0)
    assert loads.guess() == [[], []]
    assert loads.draft.rest() is None
    assert loads.tries == 0
    assert (loads.draft.kind, loads.draft.longest) == ("dflash", 8)


def test_once_loaded_it_is_told_everything_and_asked() -> None:
    loads = Loads()
    loads.draft.wake()
    loads.draft.wake()
    assert loads.tries == 1
    batch = [BatchSlice(0, 0, (1,), 1), BatchSlice(1, 0, (1, 5), 1)]
    loads.draft.observe(batch, [1, 2])
    loads.draft.rewind(1, 1)
    loads.draft.copy(0, 2, 1)
    assert loads.made[0].rows == {0: [1], 1: [1], 2: [1]}
    loads.draft.replaced(2)
    assert loads.made[0].rows[2] is None
    assert loads.guess() == [[7, 7, 7], [7, 7]]


def test_it_is_freed_when_nobody_has_been_there_for_so_long_and_loaded_anew() -> None:
    loads = Loads()
    loads.draft.wake()
    loads.now += 20
    loads.draft.observe([BatchSlice(0, 0, (1,), 1)], [1])
    loads.now += 29
    assert loads.draft.rest() == pytest.approx(1)
    assert loads.draft.loaded
    loads.now += 1
    assert loads.draft.rest() == 0, "that it is freed can be told before anybody waits for ever"
    assert loads.made[0].closed
    assert not loads.draft.loaded
    assert loads.draft.rest() is None
    assert loads.guess() == [[], []]
    loads.draft.wake()
    assert loads.tries == 2
    assert loads.draft.rest() == pytest.approx(30)


def test_it_stays_that_long_behind_an_answer_of_whose_steps_it_was_not_told() -> None:
    loads = Loads()
    loads.draft.wake()
    loads.now += 300
    loads.draft.rests(0)
    assert loads.draft.rest() == pytest.approx(30)
    assert loads.draft.loaded


def test_one_that_cannot_be_loaded_is_given_up_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads = Loads(ModelLoadError("the draft d.gguf is gone"))
    with caplog.at_level(logging.ERROR):
        loads.draft.wake()
        loads.draft.wake()
    assert loads.tries == 1
    assert [record.message for record in caplog.records] == [
        "there will be no drafts: the draft d.gguf is gone"
    ]
    assert loads.guess() == [[], []]
    assert loads.draft.rest() is None


def test_one_that_fails_for_any_other_reason_costs_its_model_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads = Loads(RuntimeError("a symbol is missing"))
    loads.draft.wake()
    loads.draft.wake()
    assert loads.tries == 1
    assert "there will be no drafts" in caplog.text
    assert loads.guess() == [[], []]


def test_a_server_that_ends_meanwhile_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads(LoadingStopped())
    with caplog.at_level(logging.WARNING):
        loads.draft.wake()
    assert not caplog.records
    assert not loads.draft.loaded


def test_closing_frees_what_there_is() -> None:
    loads = Loads()
    loads.draft.close()
    loads.draft.wake()
    loads.draft.close()
    loads.draft.close()
    assert loads.made[0].closed
