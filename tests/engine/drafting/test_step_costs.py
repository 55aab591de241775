"""What steps of one pass take, and of several, is known apart where it differs."""

from __future__ import annotations

import pytest

from dflash_trio.engine.drafting.step_costs import StepCosts

PLAIN, UNEVEN = 0.004, 0.010


def measured(*, builds_graphs: bool) -> StepCosts:
    """Of sixteen sequences, plain steps and such in which three of them have four guesses."""
    costs = StepCosts(partitioned=True, builds_graphs=builds_graphs)
    for _ in range(40):
        for _ in range(3):
            costs.observe_step([1] * 16, PLAIN, judged=False)
        costs.observe_step([1] * 13 + [5] * 3, UNEVEN, judged=True)
    return costs


def test_parts_with_graphs_of_their_own_do_not_make_plain_steps_seem_slow() -> None:
    costs = measured(builds_graphs=True)
    assert costs.estimate(16) == pytest.approx(PLAIN)
    assert costs.of_step(16, [3] * 4) == pytest.approx(UNEVEN, rel=0.1)
    assert costs.of_step(16, [3] * 4, boldly=True) == pytest.approx(UNEVEN, rel=0.1)


def test_a_step_of_one_part_is_none_of_several() -> None:
    costs = measured(builds_graphs=True)
    for _ in range(10):
        costs.observe_step([2] * 16, 0.005, judged=True)
    assert costs.estimate(16) == pytest.approx(PLAIN, rel=0.05)
    assert costs.of_step(16, [16]) == pytest.approx(0.005, rel=0.05)
    assert costs.of_step(16, [3] * 4) == pytest.approx(UNEVEN, rel=0.1)
    assert costs.largest == 32


def test_elsewhere_a_part_takes_what_a_step_of_its_size_takes() -> None:
    costs = StepCosts(partitioned=True)
    for _ in range(10):
        costs.observe_step([1] * 4, 0.004, judged=False)
        costs.observe_step([1] * 2, 0.002, judged=False)
    assert costs.of_step(4, [2]) == pytest.approx(0.006, rel=0.05)
