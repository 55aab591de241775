"""A draft that is not worth it is not looked after in each step, and gets its chance again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.lookup_controller import LookupController
from dflash_trio.engine.drafting.naps import FIRST_AWAKE, PROBE, Naps
from dflash_trio.engine.drafting.prompt_lookup import PromptLookup
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.scripted_provider import Always


@attrs.define
class World:
    """What steps take, in plain steps of one sequence that nobody looks at."""

    takes: float = 0.0
    """Looking, of a plain step."""
    guesses: Callable[[int], tuple[float, float] | None] = lambda _at: None
    """In a step: what it takes with guesses, and tokens that each sequence gets of it, in plain
    steps of as many sequences. ``None``: it has none."""
    turning: float = 0.0
    """What falling asleep and waking take."""
    sequences: Callable[[int], int] = lambda _at: 1
    plain: Callable[[int], float] = lambda _sequences: 1.0
    drift: float = 0.0
    """Of the machine's speed, a step."""
    naps: Naps = attrs.field(factory=Naps)
    dice: random.Random = attrs.field(factory=lambda: random.Random(7))
    awake: list[bool] = attrs.field(factory=list)

    def run(self, steps: int, *, answers: int = 200) -> float:
        """How fast that was, to a server without a draft. ``answers``: steps of each."""
        took = alone = 0.0
        speed, before, untold = 1.0, self.naps.asleep, 0
        for at in range(steps):
            if at % answers == 0:
                self.naps.begins()
                untold = self.naps.untold and untold
            asleep = self.naps.asleep
            self.awake.append(not asleep)
            sequences = self.sequences(at)
            speed = min(1.4, max(0.7, speed * math.exp(self.dice.gauss(0, self.drift))))
            plain = self.plain(sequences) * speed
            seconds = plain * self.dice.uniform(0.9, 1.1)
            if self.dice.random() < 0.01:
                seconds += self.dice.uniform(1, 6)  # whatever else the machine does
            guess, tokens = None if asleep else self.guesses(at), 1.0
            ordinary = seconds
            if guess is not None:
                longer, tokens = guess
                seconds *= longer
            if not asleep:
                seconds += self.takes * plain
            if asleep is not before:
                seconds += self.turning * plain
            before = asleep
            took += seconds
            alone += tokens * ordinary
            committed = int(sequences * tokens)
            assert committed == sequences * tokens
            if untold:
                untold -= 1
                continue
            self.naps.step(sequences, seconds, committed=committed, guessed=guess is not None)
            untold = self.naps.untold
        return alone / took


def now_and_then(every: int, longer: float, tokens: float) -> Callable[[int], Any]:
    return lambda at: (longer, tokens) if at % every == 0 else None


LOSING = {
    "looking takes a tenth": World(0.1),
    "looking takes a fifth of sixteen": World(0.2, sequences=lambda _at: 16),
    "tries that are dear": World(0.05, now_and_then(20, 11.0, 2.0)),
    "guesses that seem to pay": World(0.0, now_and_then(5, 3.5, 3.0)),
    "waking takes long": World(0.1, turning=12.0),
    "others come and go": World(
        0.15, sequences=lambda at: (1, 4, 16, 15, 14, 3)[at // 37 % 6], plain=lambda n: 1 + 0.15 * n
    ),
    "on a machine that drifts": World(0.05, drift=0.002),
}


@pytest.mark.parametrize("name", LOSING)
def test_a_draft_that_loses_costs_a_hundredth(name: str) -> None:
    world = attrs.evolve(LOSING[name], naps=Naps(), dice=random.Random(1), awake=[])
    assert world.run(5000) > 0.97
    assert world.run(40_000) > 0.98
    assert 0 < sum(world.awake[5000:]) < 0.35 * 40_000


def test_the_first_nap_comes_when_nothing_is_known_and_tells_what_plain_steps_take() -> None:
    world = World()
    world.run(FIRST_AWAKE + PROBE + 10)
    assert world.awake == [True] * FIRST_AWAKE + [False] * PROBE + [True] * 10


@pytest.mark.parametrize(
    ("longer", "tokens", "least"), [(1.6, 2.5, 1.45), (2.15, 2.5, 1.08), (1.8, 9.0, 4.5)]
)
def test_a_draft_that_wins_is_awake(longer: float, tokens: float, least: float) -> None:
    world = World(0.1, lambda _at: (longer, tokens), turning=5.0, sequences=lambda _at: 2)
    assert world.run(40_000) > least
    assert sum(world.awake) > 0.9 * 40_000


def test_of_what_is_won_by_little_some_is_left_at_the_worst() -> None:
    assert World(0.1, lambda _at: (2.3, 2.5), sequences=lambda _at: 2).run(40_000) > 1.0


def test_a_draft_that_costs_next_to_nothing_is_awake() -> None:
    world = World(0.004)
    assert world.run(40_000) > 0.99
    assert sum(world.awake) > 0.85 * 40_000


def test_a_machine_that_becomes_slower_and_faster_is_not_taken_for_a_draft_that_loses() -> None:
    world = World(drift=0.002)
    assert world.run(40_000) > 0.99
    assert sum(world.awake) > 0.7 * 40_000


def test_a_draft_that_becomes_useful_is_found_out() -> None:
    world = World(0.1, turning=5.0)
    world.run(20_000)
    world.guesses = lambda _at: (1.5, 3.0)
    seen = len(world.awake)
    world.run(8000)
    assert all(world.awake[seen + 4000 : seen + 5000])
    world.guesses = lambda _at: None
    world.run(20_000)
    assert sum(world.awake[-10_000:]) < 0.2 * 10_000


def test_it_wakes_where_an_answer_begins() -> None:
    world, woke = World(0.3), []
    before = False
    world.run(20_000, answers=100)
    for at, awake in enumerate(world.awake):
        if awake and not before and at > 2000:
            woke.append(at % 100)
        before = awake
    assert woke
    assert not any(woke)


def test_it_wakes_in_a_long_answer_too() -> None:
    world = World(0.3)
    world.run(20_000, answers=100_000)
    assert any(world.awake[10_000:])


def test_as_many_sequences_as_never_were_before_are_looked_at_alone() -> None:
    world = World(0.0)
    world.run(1000)
    assert world.naps._plain(4) is None
    # Four take three times as long, which is no loss of the draft's.
    world.sequences, world.plain = lambda _at: 4, lambda n: 3.0 if n == 4 else 1.0
    world.run(200)
    assert world.naps._plain(4) == pytest.approx(3.0, rel=0.1)
    assert world.naps._saved is not None
    assert world.naps._saved > 0


def test_clocks_that_do_not_move_end_no_engine() -> None:
    naps = Naps()
    for at in range(20_000):
        naps.step(1 + at % 3, 0.0, committed=1 + at % 3, guessed=at % 5 == 0)
    assert naps._saved == 0.0


def run_of(record: Any, *, judged: int = 0) -> Any:
    """A token said, and no guess that was right."""
    return SimpleNamespace(
        sequence=SimpleNamespace(drafts=record), kept=1, accepted=0, judged=judged, right=(),
        error=None,
    )  # fmt: skip


def step_over(drafter: Drafter, batch: list[BatchSlice], run: Any) -> None:
    """As the scheduler does."""
    if drafter.asleep:
        drafter.missed(batch)
    else:
        drafter.observe(batch, [1], [[run]])


class Counting:
    """A provider that counts the steps that it is shown."""

    kind, longest, matched, caught_up_seconds, steady = "counting", 4, (), 0.0, False

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

    def new_acceptance(self) -> None:
        return None

    def choose(self, sequences: Sequence[object]) -> int:
        self.asked += 1
        return 0

    def observe(self, *_: object, **__: object) -> None:
        pass

    def took(self, seconds: float) -> None:
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
    steps = FIRST_AWAKE + 3000
    asleep = 0
    for at in range(steps):
        assert drafter.choose([record]) == 0
        drafter.step_begins()
        now += 0.001
        run = run_of(record)
        asleep += drafter.asleep
        step_over(drafter, [BatchSlice(0, at, (1,), 1)], run)
    # Looking takes as long as a step, so it sleeps for most of the time; or is free.
    assert (asleep > 2500) is looks
    assert provider.observed == controller.asked == steps - asleep


def test_in_a_long_nap_hardly_a_clock_is_read() -> None:
    now, read = 0.0, 0

    def clock() -> float:
        nonlocal read
        read += 1
        return now

    def looking() -> None:
        nonlocal now
        now += 0.001

    provider = Counting(looks=True, looking=looking)
    drafter = Drafter(provider, Never(), verify_limit=63, clock=clock)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    slept, of_these = 0, 0
    for at in range(FIRST_AWAKE + 3000):
        before, asleep = read, drafter.asleep
        drafter.choose([record])
        drafter.step_begins()
        now += 0.001
        run = run_of(record)
        step_over(drafter, [BatchSlice(0, at, (1,), 1)], run)
        if asleep and drafter.asleep:
            slept, of_these = slept + 1, of_these + read - before
    assert slept > 2500
    assert of_these < 0.5 * slept  # else two and more of each step


def test_what_guessing_takes_is_lost_once_and_by_the_step_that_it_was_for() -> None:
    # Every fifth step has guesses, which take longer than the step itself; looking is free.
    now, told = 0.0, []
    provider = SimpleNamespace(
        kind="dear", longest=4, matched=(), caught_up_seconds=0.0, steady=False,
        looks_at_steps=True, observe=lambda *_: None, nap=lambda asleep: None,
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

    def step(sequences: int, seconds: float, *, committed: int, guessed: bool) -> None:
        told.append((sequences, round(seconds, 6), committed, guessed))

    drafter._naps = SimpleNamespace(asleep=False, step=step, untold=0)  # type: ignore[assignment]
    record = drafter.new_record([1])
    for at in range(21):
        guesses: Sequence[int] = ()
        if chosen := drafter.choose([record]):
            (guesses,) = drafter.propose([Wanted(0, [1], chosen)], [record])  # type: ignore[assignment]
        drafter.step_begins()
        now += 0.008
        run = run_of(record, judged=min(1, len(guesses)))
        step_over(drafter, [BatchSlice(0, at, (1, *guesses), 1 + len(guesses))], run)
    assert told == [(1, 0.02 if at % 5 == 4 else 0.008, 1, at % 5 == 4) for at in range(20)]


def test_a_draft_that_takes_longer_than_a_step_and_brings_nothing_ends_no_engine() -> None:
    now, shown = 0.0, 0
    provider = SimpleNamespace(
        kind="slow", longest=4, matched=(), caught_up_seconds=0.0, steady=False,
        looks_at_steps=True, observe=lambda *_: None, nap=lambda asleep: None,
    )  # fmt: skip

    def propose(wanted: Sequence[Wanted]) -> list[list[int]]:
        nonlocal now
        now += 0.02
        return [[] for _ in wanted]

    provider.propose = propose
    controller = DraftController(4, verify_limit=63, partitioned=False)
    drafter = Drafter(provider, controller, verify_limit=63, clock=lambda: now)  # type: ignore[arg-type]
    record = drafter.new_record([1])
    for at in range(20 * FIRST_AWAKE):
        if chosen := drafter.choose([record]):
            drafter.propose([Wanted(0, [1], chosen)], [record])
        drafter.step_begins()
        now += 0.008
        run = run_of(record)
        shown += not drafter.asleep
        step_over(drafter, [BatchSlice(0, at, (1,), 1)], run)
    assert shown > FIRST_AWAKE


def test_whatever_a_controller_says_a_batch_stays_within_its_limit() -> None:
    provider = SimpleNamespace(
        matched=(), steady=False, propose=lambda wanted: [[7] * item.limit for item in wanted]
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
        kind="wrong", longest=15, matched=(), caught_up_seconds=0.0, steady=False,
        looks_at_steps=True,
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
    for at in range(10_000):
        if at % length == 0:
            record = drafter.new_record([1])
        guesses: Sequence[int] = ()
        if chosen := drafter.choose([record]):
            (guesses,) = drafter.propose([Wanted(0, [1], chosen)], [record])  # type: ignore[assignment]
        drafter.step_begins()
        now += 0.002 + 0.00001 * len(guesses)
        run = run_of(record, judged=min(1, len(guesses)))
        tokens = (1, *guesses)
        step_over(drafter, [BatchSlice(0, at, tokens, len(tokens))], run)
    assert now < 1.02 * 10_000 * 0.002


def test_prompt_lookup_that_takes_next_to_nothing_naps_for_plain_steps_alone() -> None:
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
    assert missed == 3 * PROBE
