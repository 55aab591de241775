"""A draft that is not worth it is not looked after in each step, and gets its chance again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.lookup_controller import LookupController
from dflash_trio.engine.drafting.naps import (
    AWAKE,
    FIRST_NAP,
    LONGEST_NAP,
    PROBE,
    STALE,
    Naps,
)
from dflash_trio.engine.drafting.prompt_lookup import PromptLookup
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.scripted_provider import Always


def spent_awake(
    naps: Naps, steps: int, *, won: float = 0.0, takes: float = 0.1, sequences: int = 1
) -> list[bool]:
    """``won``: in each step that it is awake for; ``takes``: what looking takes of a plain step."""
    awake = []
    for at in range(steps):
        looks = not naps.asleep
        awake.append(looks)
        guessed = looks and won != 0 and at % 4 == 0
        naps.step(sequences, 1.0 + takes * looks, guessed=guessed, won=4 * won if guessed else 0.0)
    return awake


def test_naps_become_longer_while_guesses_are_not_worth_it() -> None:
    awake = spent_awake(Naps(), 60_000)
    probed = AWAKE + PROBE
    assert all(awake[:AWAKE])
    assert not any(awake[AWAKE:probed])
    assert all(awake[probed : probed + AWAKE])
    assert not any(awake[probed + AWAKE : probed + AWAKE + FIRST_NAP])
    late = awake[20_000:]
    assert sum(late) / len(late) < 0.07
    asleep, longest = 0, 0
    for is_awake in late:
        asleep = 0 if is_awake else asleep + 1
        longest = max(longest, asleep)
    assert longest == LONGEST_NAP


def test_a_draft_that_wins_more_than_looking_takes_does_not_nap() -> None:
    assert all(spent_awake(Naps(), 5000, won=0.2))
    # Less than looking might take, and yet more than it takes: known after a short nap.
    awake = spent_awake(Naps(), STALE * AWAKE, won=0.025, takes=0.015)
    assert awake.count(False) == PROBE


def test_a_draft_that_wins_less_than_looking_takes_naps() -> None:
    awake = spent_awake(Naps(), 60_000, won=0.05, takes=0.1)
    assert sum(awake[20_000:]) / 40_000 < 0.07


def test_looking_that_costs_next_to_nothing_is_saved_now_and_then_to_find_that_out() -> None:
    awake = spent_awake(Naps(), STALE * AWAKE, takes=0.005)
    assert awake.count(False) == PROBE
    again = spent_awake(Naps(), 3 * (STALE * AWAKE + PROBE), takes=0.005)
    assert again.count(False) == 3 * PROBE


def test_slow_steps_after_it_fell_asleep_or_woke_say_nothing() -> None:
    naps = Naps()
    awake, since, before = 0, 0, False
    for _ in range(60_000):
        since = 0 if naps.asleep is not before else since + 1
        before = naps.asleep
        awake += not naps.asleep
        seconds = 1.0 if naps.asleep else 1.1
        naps.step(1, 12.0 * seconds if since < 4 else seconds, guessed=False, won=0.0)
    assert awake / 60_000 < 0.07


def test_a_draft_that_became_useful_naps_shortly_next_time() -> None:
    naps = Naps()
    spent_awake(naps, 60_000)
    while naps.asleep:
        naps.step(1, 1.0, guessed=False, won=0.0)
    spent_awake(naps, AWAKE, won=0.2)
    assert not naps.asleep
    spent_awake(naps, AWAKE)
    assert naps.asleep
    assert not any(spent_awake(naps, FIRST_NAP))
    assert not naps.asleep


def test_what_looking_takes_is_told_apart_from_how_many_sequences_there_are() -> None:
    naps = Naps()
    for round_ in range(60):
        # Awake it is mostly alone, and asleep there are sixteen, whose steps take longer.
        for _ in range(100):
            sequences = 16 if naps.asleep or round_ % 2 else 1
            seconds = (4.0 if sequences == 16 else 1.0) * (1.0 if naps.asleep else 1.002)
            naps.step(sequences, seconds, guessed=False, won=0.0)
    assert not naps.asleep


@pytest.mark.parametrize(("won", "least", "most"), [(0.1, -1.0, 0.05), (0.03, 0.8, 1.0)])
def test_of_a_draft_that_guesses_in_every_step_it_is_found_out_too(
    won: float, least: float, most: float
) -> None:
    naps, slept = Naps(), 0
    for _ in range(30_000):
        guesses = not naps.asleep and not naps.wants_plain
        slept += naps.asleep
        naps.step(1, 1.0 if naps.asleep else 1.05, guessed=guesses, won=won if guesses else 0.0)
    assert least < slept / 30_000 < most


def test_what_was_asked_for_in_vain_is_no_part_of_what_looking_takes() -> None:
    naps = Naps()
    for _ in range(STALE * AWAKE):
        asked = not naps.asleep and not naps.wants_plain
        naps.step(1, 1.01 if asked else 1.0, guessed=False, won=-0.01 if asked else 0.0)
    assert not naps.asleep


def test_guesses_that_lose_much_are_napped_from_though_looking_takes_nothing() -> None:
    naps = Naps()
    shown = sum(spent_awake(naps, 40 * AWAKE, won=-0.03, takes=0.0))
    assert shown < 10 * AWAKE


def test_one_slow_step_is_no_reason_to_nap() -> None:
    naps = Naps()
    for at in range(20_000):
        slow = at % 400 == 7 and not naps.asleep
        naps.step(1, 40.0 if slow else 1.0, guessed=False, won=0.0)
    assert not naps.asleep


def step_over(drafter: Drafter, batch: list[BatchSlice], run: Any) -> None:
    """As the scheduler does."""
    if drafter.asleep:
        drafter.missed(batch)
    else:
        drafter.observe(batch, [1], [[run]])


class Counting:
    """A provider that counts the steps that it is shown."""

    kind, longest, matched, caught_up_seconds = "counting", 4, (), 0.0

    def __init__(self, looks: bool, looking: Callable[[], None]) -> None:
        self.looks_at_steps = looks
        self.looking = looking
        self.observed = 0
        self.asleep = False

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        assert not self.asleep
        self.observed += 1
        self.looking()

    def nap(self, *, asleep: bool) -> None:
        assert asleep is not self.asleep
        self.asleep = asleep


class Never:
    """A controller that thinks nothing of guesses, and counts how often it is asked."""

    asked = 0
    won = 0.0
    asks_always = False

    def new_acceptance(self) -> None:
        return None

    def choose(self, sequences: Sequence[object]) -> int:
        self.asked += 1
        return 0

    def observe(self, *_: object, **__: object) -> None:
        pass

    def missed(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("looks", [True, False])
def test_a_napping_draft_is_told_of_no_step_and_asked_nothing(looks: bool) -> None:
    now = 0.0

    def looking() -> None:
        nonlocal now
        now += 0.001

    provider = Counting(looks, looking)
    controller = Never()
    drafter = Drafter(provider, controller, verify_limit=63, clock=lambda: now)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    steps = AWAKE + PROBE + AWAKE + FIRST_NAP + 10
    for at in range(steps):
        assert drafter.choose([record]) == 0
        drafter.step_begins()
        now += 0.001
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record), kept=1, accepted=0, judged=0, right=(),
            error=None,
        )  # fmt: skip
        step_over(drafter, [BatchSlice(0, at, (1,), 1)], run)
    assert provider.observed == (2 * AWAKE + 10 if looks else steps)
    # Not in the first step of two times awake: it knows nothing yet of what could follow.
    assert controller.asked == provider.observed - (2 if looks else 0)


def test_what_guessing_takes_is_not_taken_for_what_looking_takes() -> None:
    # Every fifth step has guesses, which take longer than the step itself, and looking is free.
    now, share = 0.0, []
    provider = SimpleNamespace(
        kind="dear", longest=4, matched=(), caught_up_seconds=0.0, looks_at_steps=True,
        observe=lambda *_: None, nap=lambda asleep: None,
    )  # fmt: skip

    def propose(wanted: Sequence[Wanted]) -> list[list[int]]:
        nonlocal now
        now += 0.012
        return [[7] * item.limit for item in wanted]

    provider.propose = propose

    class NowAndThen(Never):
        def choose(self, _: object) -> int:
            self.asked += 1
            return 4 if self.asked % 5 == 0 else 0

        def keep(self, lengths: Sequence[int], *_: object) -> list[int]:
            return list(lengths)

    drafter = Drafter(provider, NowAndThen(), verify_limit=63, clock=lambda: now)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    for at in range(20 * AWAKE):
        guesses: Sequence[int] = ()
        if chosen := drafter.choose([record]):
            (guesses,) = drafter.propose([Wanted(0, [1], chosen)], [record])  # type: ignore[assignment]
        drafter.step_begins()
        now += 0.008
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record), kept=1, accepted=0,
            judged=min(1, len(guesses)), right=(), error=None,
        )  # fmt: skip
        step_over(drafter, [BatchSlice(0, at, (1, *guesses), 1 + len(guesses))], run)
        share.append(drafter._naps._share())
    known = [found for found in share if found is not None]
    assert known
    assert max(map(abs, known)) < 1e-6


def test_a_draft_that_takes_longer_than_a_step_and_brings_nothing_ends_no_engine() -> None:
    now, shown = 0.0, 0
    provider = SimpleNamespace(
        kind="slow", longest=4, matched=(), caught_up_seconds=0.0, looks_at_steps=True,
        observe=lambda *_: None, nap=lambda asleep: None,
    )  # fmt: skip

    def propose(wanted: Sequence[Wanted]) -> list[list[int]]:
        nonlocal now
        now += 0.02
        return [[] for _ in wanted]

    provider.propose = propose
    controller = DraftController(4, verify_limit=63, partitioned=False)
    drafter = Drafter(provider, controller, verify_limit=63, clock=lambda: now)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    for at in range(20 * AWAKE):
        if chosen := drafter.choose([record]):
            drafter.propose([Wanted(0, [1], chosen)], [record])
        drafter.step_begins()
        now += 0.008
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record), kept=1, accepted=0, judged=0, right=(),
            error=None,
        )  # fmt: skip
        shown += not drafter.asleep
        step_over(drafter, [BatchSlice(0, at, (1,), 1)], run)
    assert shown > AWAKE


def test_whatever_a_controller_says_a_batch_stays_within_its_limit() -> None:
    provider = SimpleNamespace(
        matched=(), propose=lambda wanted: [[7] * item.limit for item in wanted]
    )
    drafter = Drafter(provider, Always(8), verify_limit=20)  # type: ignore[arg-type]
    records = [drafter.new_record([1]) for _ in range(4)]
    guesses = drafter.propose([Wanted(row, [1], 8) for row in range(4)], records)
    assert [len(guess) for guess in guesses] == [8, 8, 0, 0]
    crowd = [drafter.new_record([1]) for _ in range(21)]
    guesses = drafter.propose([Wanted(row, [1], 8) for row in range(21)], crowd)
    assert not any(guesses)


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

    wrong.propose, wrong.observe, wrong.nap = propose, observe, lambda asleep: None
    controller = DraftController(15, verify_limit=256, partitioned=False)
    drafter = Drafter(wrong, controller, verify_limit=256, clock=lambda: now)  # type: ignore[arg-type]
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
        step_over(drafter, [BatchSlice(0, at, tokens, len(tokens))], run)
        shown += now > before
    assert shown < 6 * AWAKE


def test_prompt_lookup_that_takes_next_to_nothing_naps_to_find_that_out_alone() -> None:
    now, dice, missed = 0.0, random.Random(4), 0
    provider = PromptLookup()
    controller = LookupController(provider.longest, verify_limit=64, partitioned=True)
    drafter = Drafter(provider, controller, verify_limit=64, clock=lambda: now)
    tokens = [dice.randrange(40) for _ in range(50)]
    record = drafter.new_record(tokens)
    for at in range(3000):
        guesses: Sequence[int] = ()
        if chosen := drafter.choose([record]):
            now += 0.00002
            (guesses,) = drafter.propose([Wanted(0, tokens, chosen)], [record])  # type: ignore[assignment]
        drafter.step_begins()
        now += 0.008 + 0.003 * len(guesses)
        batch = [BatchSlice(0, at, (tokens[-1], *guesses), 1 + len(guesses))]
        tokens.append(dice.randrange(40))
        run = SimpleNamespace(
            sequence=SimpleNamespace(drafts=record, answer=tokens), kept=1, accepted=0,
            judged=min(1, len(guesses)), right=(), error=None,
        )  # fmt: skip
        missed += drafter.asleep
        step_over(drafter, batch, run)
    assert missed == PROBE
