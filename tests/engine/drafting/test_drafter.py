"""What the controller learns is what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import pytest

from dflash_trio.engine.context_size import LARGEST_CPU_VERIFY, verify_tokens
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.costs import CostTable
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.lookup_controller import LookupController
from dflash_trio.engine.drafting.prompt_lookup import PromptLookup
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.scripted_provider import CheckingProvider


class Spying(DraftController):
    """Asks for guesses in every step, and keeps what it is told of the asking."""

    told: list[tuple[int, float]]

    def choose(self, sequences: object) -> int:
        return 4

    def observe(self, *_: object, **told: object) -> None:
        self.told = [*getattr(self, "told", []), (told["asked"], told["draft_seconds"])]  # type: ignore[list-item]


def test_asking_nobody_is_no_measurement_of_what_asking_costs() -> None:
    """Nobody has room for a guess: as before the last token of a short answer."""
    controller = Spying(4, verify_limit=63, partitioned=True)
    ticks = count()
    provider = CheckingProvider(lambda _tokens, limit: [1] * limit)
    drafter = Drafter(provider, controller, verify_limit=63, clock=lambda: float(next(ticks)))
    record = drafter.new_record([1, 2])
    assert drafter.choose([record]) == 4
    assert drafter.propose([None], [record]) == []
    drafter.step_begins()
    drafter.observe([BatchSlice(0, 0, (2,), 1)], [1], [[]])
    assert controller.told == [(0, 0.0)]


def test_what_took_no_time_once_is_not_believed_for_ever() -> None:
    table = CostTable()
    table.observe(1, 0.0)
    for _ in range(200):
        table.observe(1, 0.01)
    assert table.estimate(1) > 0.005


def test_a_batch_with_guesses_stays_small_on_a_cpu_however_many_slots_there_are() -> None:
    assert verify_tokens(4, 7, on_cpu=True) == 32
    assert verify_tokens(100, 7, on_cpu=True) == LARGEST_CPU_VERIFY


class Watching(LookupController):
    """Lets ``few`` guesses of each be verified, and keeps what it is told of all."""

    def __init__(self, few: int) -> None:
        super().__init__(4, verify_limit=63, partitioned=True)
        self.few = few
        self.told: list[tuple[int, int, int]] = []

    def keep(self, lengths: Sequence[int], *_: object) -> list[int]:
        return [min(length, self.few) for length in lengths]

    def watched(self, _sequence: object, matched: int, judged: int, right: int) -> None:
        self.told.append((matched, judged, right))


@pytest.mark.parametrize(
    ("few", "says", "told"),
    [
        (0, [3], (2, 1, 1)),  # not verified, and right
        (0, [7], (2, 1, 0)),
        (2, [3, 1, 2], (2, 3, 3)),  # two verified, and the third came all the same
        (2, [3, 1, 9], (2, 3, 2)),
        (2, [3, 9], (2, 2, 1)),
        (4, [3, 1, 2, 3, 1], (2, 4, 4)),
    ],
)
def test_guesses_are_judged_by_what_comes_whether_they_are_verified_or_not(
    few: int, says: list[int], told: tuple[int, int, int]
) -> None:
    controller = Watching(few)
    drafter = Drafter(PromptLookup(4), controller, verify_limit=63)
    answer = [1, 2, 3, 1, 2]
    record = drafter.new_record(answer)
    assert drafter.choose([record]) == 4
    (verified,) = drafter.propose([Wanted(0, answer, 4)], [record])
    assert list(verified) == [3, 1, 2, 3][:few]
    drafter.step_begins()
    answer += says
    run = SimpleNamespace(
        sequence=SimpleNamespace(answer=answer, drafts=record),
        kept=len(says),
        accepted=len(says) - 1,
        judged=min(len(says), few),
        right=(),
        error=None,
    )
    batch = [BatchSlice(0, 4, (2, *verified), 1 + few)]
    drafter.observe(batch, [len(says)], [[run]])  # type: ignore[list-item]
    assert controller.told == [told]
