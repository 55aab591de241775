"""How an engine may change: the lawful transitions, all of them, and no others."""

from __future__ import annotations

import itertools

import pytest

from dflash_trio.engine.health import LAWFUL, EngineHealth, Health

LOADING, HEALTHY, STALLED, LOST = Health

# Written out here on its own, so that a change of the table has to be made twice.
ALLOWED = {
    (LOADING, HEALTHY),
    (LOADING, LOST),
    (HEALTHY, STALLED),
    (HEALTHY, LOST),
    (STALLED, HEALTHY),
    (STALLED, LOST),
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(Health, repeat=2)])
def test_exactly_the_lawful_transitions_change_anything(before: Health, after: Health) -> None:
    health = EngineHealth(before, "earlier")
    if (before, after) in ALLOWED:
        assert health.enter(after, "later")
        assert health.state is after
    else:
        assert not health.enter(after, "later")
        assert (health.state, health.reason) == (before, "earlier")


def test_the_table_names_every_state() -> None:
    assert set(LAWFUL) == set(Health)


def test_the_first_reason_stays_until_it_is_well() -> None:
    health = EngineHealth(HEALTHY)
    health.enter(STALLED, "a step")
    health.enter(LOST, "the device")
    assert health.reason == "a step"
    recovered = EngineHealth(STALLED, "a step")
    recovered.enter(HEALTHY)
    assert recovered.reason is None
