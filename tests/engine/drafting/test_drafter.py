"""What the controller learns is what was measured."""

from __future__ import annotations

from itertools import count

from dflash_trio.engine.context_size import LARGEST_CPU_VERIFY, verify_tokens
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.costs import CostTable
from dflash_trio.engine.drafting.drafter import Drafter
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
    drafter = Drafter(provider, controller, clock=lambda: float(next(ticks)))
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
