"""A draft that is not worth it is not looked after in each step, and gets its chance again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.naps import AWAKE, FIRST_NAP, LONGEST_NAP, Naps
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice


def spent_awake(naps: Naps, steps: int, *, used: bool = False, looking: float = 0.1) -> list[bool]:
    awake = []
    for _ in range(steps):
        awake.append(not naps.asleep)
        naps.step(used=used and not naps.asleep, looking=looking, seconds=1.0)
    return awake


def test_naps_become_longer_while_guesses_are_not_worth_it() -> None:
    awake = spent_awake(Naps(), 60_000)
    assert all(awake[:AWAKE])
    assert not any(awake[AWAKE : AWAKE + FIRST_NAP])
    assert sum(awake[20_000:]) / 40_000 < 0.07
    late = awake[20_000:]
    asleep, longest = 0, 0
    for is_awake in late:
        asleep = 0 if is_awake else asleep + 1
        longest = max(longest, asleep)
    assert longest == LONGEST_NAP


def test_a_draft_that_guesses_does_not_nap() -> None:
    assert all(spent_awake(Naps(), 5000, used=True))


def test_looking_that_costs_next_to_nothing_is_not_saved() -> None:
    assert all(spent_awake(Naps(), 5000, looking=0.01))


def test_a_draft_that_became_useful_naps_shortly_next_time() -> None:
    naps = Naps()
    spent_awake(naps, 60_000)
    while naps.asleep:
        naps.step(used=False, looking=0.0, seconds=1.0)
    spent_awake(naps, AWAKE, used=True)
    spent_awake(naps, AWAKE)
    assert naps.asleep
    assert not any(spent_awake(naps, FIRST_NAP))
    assert not naps.asleep


class Counting:
    """A provider that counts the steps that it is shown."""

    kind, longest, matched, caught_up_seconds = "counting", 4, (), 0.0

    def __init__(self, looks: bool) -> None:
        self.looks_at_steps = looks
        self.observed = 0

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        self.observed += 1


class Never:
    """A controller that thinks nothing of guesses, and counts how often it is asked."""

    asked = 0
    trying = False

    def new_acceptance(self) -> None:
        return None

    def choose(self, sequences: Sequence[object]) -> int:
        self.asked += 1
        return 0

    def observe(self, *_: object, **__: object) -> None:
        pass


@pytest.mark.parametrize("looks", [True, False])
def test_a_napping_draft_is_told_of_no_step_and_asked_nothing(looks: bool) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001  # each look at the clock: so looking takes as long as the step
        return now

    provider = Counting(looks)
    controller = Never()
    drafter = Drafter(provider, controller, clock=clock)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    steps = AWAKE + FIRST_NAP + 10
    for at in range(steps):
        assert drafter.choose([record]) == 0
        drafter.step_begins()
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record), kept=1, accepted=0, judged=0, right=(),
            error=None,
        )  # fmt: skip
        drafter.observe([BatchSlice(0, at, (1,), 1)], [1], [[run]])  # type: ignore[list-item]
    watched = AWAKE + 10 if looks else steps
    assert provider.observed == controller.asked == watched


@pytest.mark.parametrize("length", [50, 1000])
def test_a_draft_that_is_never_right_naps_however_cheap_its_tries_are(length: int) -> None:
    now = 0.0
    wrong = SimpleNamespace(
        kind="wrong", longest=15, matched=(), caught_up_seconds=0.0, looks_at_steps=True
    )  # fmt: skip

    def propose(wanted: Sequence[Wanted]) -> list[list[int]]:
        nonlocal now
        now += 0.0001
        return [[7] * item.limit for item in wanted]

    def observe(*_: object) -> None:
        nonlocal now
        now += 0.0001

    wrong.propose, wrong.observe = propose, observe
    controller = DraftController(15, verify_limit=256, partitioned=False)
    drafter = Drafter(wrong, controller, clock=lambda: now)  # type: ignore[arg-type]
    shown = 0
    for at in range(20 * AWAKE):
        if at % length == 0:
            record = drafter.new_record([1])
        guesses: Sequence[int] = ()
        if chosen := drafter.choose([record]):
            (guesses,) = drafter.propose([Wanted(0, [1], chosen)], [record])  # type: ignore[assignment]
        drafter.step_begins()
        now += 0.002 + 0.00001 * len(guesses)
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record), kept=1, accepted=0,
            judged=min(1, len(guesses)), right=(), error=None,
        )  # fmt: skip
        tokens = (1, *guesses)
        before = now
        drafter.observe([BatchSlice(0, at, tokens, len(tokens))], [1], [[run]])  # type: ignore[list-item]
        shown += now > before
    assert shown < 6 * AWAKE
