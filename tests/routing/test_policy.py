"""Who may have what: the routing decisions as pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import define

from dflash_trio.engine.admission import Fit
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from dflash_trio.routing import policy
from dflash_trio.routing.policy import Offer

from .bench import HandModel


@define(eq=False)
class Waiting:
    """Somebody who waits since second 0."""

    candidates: Sequence[Offer]
    overtaken: int = 0
    waiting_since: float = 0.0


def offer(model: HandModel, prompt: int = 10, *, fit: Fit = Fit.FULL, n: int = 1) -> Offer:
    return Offer(model, PreparedPrompt(tuple(range(prompt)), 10, SamplingParams(), n=n), fit)


@pytest.fixture
def first() -> HandModel:
    return HandModel("first", slots=2, max_ctx=100, pool=100)


@pytest.fixture
def second() -> HandModel:
    return HandModel("second", slots=2, max_ctx=100, pool=100)


# ------------------------------------------------------------------------- choosing candidates


def test_models_with_the_whole_headroom_come_alone_and_in_priority_order(
    first: HandModel, second: HandModel
) -> None:
    tight = offer(HandModel("tight"), fit=Fit.TIGHT)
    full_first, full_second = offer(first), offer(second)
    assert policy.choose_candidates([tight, full_first, full_second]) == (full_first, full_second)


def test_models_with_less_headroom_count_when_no_model_has_all_of_it(
    first: HandModel, second: HandModel
) -> None:
    none, tight = offer(first, fit=Fit.NONE), offer(second, fit=Fit.TIGHT)
    assert policy.choose_candidates([none, tight]) == (tight,)


def test_what_fits_nowhere_has_no_candidates(first: HandModel) -> None:
    assert policy.choose_candidates([offer(first, fit=Fit.NONE)]) == ()
    assert policy.choose_candidates([]) == ()


def test_an_unhealthy_model_is_no_candidate_and_makes_way_for_one_with_less_headroom(
    first: HandModel, second: HandModel
) -> None:
    tight = offer(second, fit=Fit.TIGHT)
    first.client.mark_unhealthy("test")
    assert policy.choose_candidates([offer(first), tight]) == (tight,)


# --------------------------------------------------------------------------------------- holds


@pytest.mark.parametrize(
    ("overtaken", "waited", "entitled"),
    [(0, 0.0, False), (15, 29.9, False), (16, 0.0, True), (0, 30.0, True), (99, 99.0, True)],
)
def test_sixteen_overtakings_or_thirty_seconds_entitle_to_hold(
    first: HandModel, overtaken: int, waited: float, entitled: bool
) -> None:
    oldest = Waiting([offer(first)], overtaken, waiting_since=100.0)
    assert policy.holds(oldest, 100.0 + waited) is (first if entitled else None)


def test_the_first_model_in_the_waiters_order_is_held(first: HandModel, second: HandModel) -> None:
    assert policy.holds(Waiting([offer(second), offer(first)], overtaken=16), 0.0) is second


def test_a_waiter_without_candidates_holds_nothing() -> None:
    assert policy.holds(Waiting([], overtaken=16), 0.0) is None


# ------------------------------------------------------------------------------------ may_take


def test_with_nobody_waiting_a_newcomer_may_take(first: HandModel) -> None:
    assert policy.may_take(offer(first), claimant=None, waiters=[], now=0.0)


def test_a_newcomer_does_not_overtake_a_waiter_who_could_use_the_capacity(
    first: HandModel,
) -> None:
    waiters = [Waiting([offer(first)])]
    assert not policy.may_take(offer(first), claimant=None, waiters=waiters, now=0.0)


def test_a_newcomer_overtakes_a_waiter_whom_the_capacity_does_not_fit(first: HandModel) -> None:
    assert first.ledger.try_reserve(50, 10) is not None
    big = Waiting([offer(first, 80)])
    assert policy.may_take(offer(first, 10), claimant=None, waiters=[big], now=0.0)


def test_a_newcomer_passes_waiters_for_other_models(first: HandModel, second: HandModel) -> None:
    waiters = [Waiting([offer(second)])]
    assert policy.may_take(offer(first), claimant=None, waiters=waiters, now=0.0)


def test_the_oldest_whom_the_capacity_fits_goes_first(first: HandModel) -> None:
    assert first.ledger.try_reserve(50, 10) is not None
    too_big = Waiting([offer(first, 80)])
    older, younger = Waiting([offer(first, 20)]), Waiting([offer(first, 20)])
    waiters = [too_big, older, younger]
    assert policy.may_take(offer(first, 20), claimant=older, waiters=waiters, now=0.0)
    assert not policy.may_take(offer(first, 20), claimant=younger, waiters=waiters, now=0.0)


def test_a_held_model_is_busy_for_all_but_its_holder(first: HandModel, second: HandModel) -> None:
    assert first.ledger.try_reserve(50, 10) is not None
    holder = Waiting([offer(first, 80)], overtaken=16)
    small = Waiting([offer(first, 10), offer(second, 10)])
    waiters = [holder, small]
    assert not policy.may_take(offer(first, 10), claimant=small, waiters=waiters, now=0.0)
    assert not policy.may_take(offer(first, 10), claimant=None, waiters=waiters, now=0.0)
    assert policy.may_take(offer(first, 80), claimant=holder, waiters=waiters, now=0.0)
    # Only the one model is held.
    assert policy.may_take(offer(second, 10), claimant=small, waiters=waiters, now=0.0)


def test_only_the_oldest_waiter_holds(first: HandModel) -> None:
    assert first.ledger.try_reserve(50, 10) is not None
    oldest = Waiting([offer(first, 80)])
    entitled_but_younger = Waiting([offer(first, 80)], overtaken=16)
    waiters = [oldest, entitled_but_younger]
    assert policy.may_take(offer(first, 10), claimant=None, waiters=waiters, now=0.0)


def test_may_take_says_nothing_about_capacity(first: HandModel) -> None:
    assert first.ledger.try_reserve(10, 10, 2) is not None
    assert policy.may_take(offer(first), claimant=None, waiters=[], now=0.0)
    assert not offer(first).has_capacity


def test_an_unhealthy_model_has_no_capacity(first: HandModel) -> None:
    assert offer(first).has_capacity
    first.client.mark_unhealthy("test")
    assert not offer(first).has_capacity


# ---------------------------------------------------------------------------------- overtaking


def test_overtaken_are_the_older_waiters_who_fit_the_model_that_was_taken(
    first: HandModel, second: HandModel
) -> None:
    on_first, on_second, on_both = (
        Waiting([offer(first)]),
        Waiting([offer(second)]),
        Waiting([offer(second), offer(first)]),
    )
    younger = Waiting([offer(first)])
    waiters = [on_first, on_second, on_both, younger]
    assert policy.overtaken_by(first, claimant=on_both, waiters=waiters) == [on_first]
    assert policy.overtaken_by(first, claimant=None, waiters=waiters) == [
        on_first,
        on_both,
        younger,
    ]


def test_the_largest_body_is_64_bytes_for_each_token_of_the_largest_room() -> None:
    small = HandModel("small", max_ctx=10, pool=10)
    # Room is the smaller of context and pool.
    wide = HandModel("wide", max_ctx=1000, pool=20)
    assert policy.largest_body([small, wide]) == 64 * 20
