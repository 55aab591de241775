"""How many tokens to guess, in worlds whose costs and chances are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.context_size import verify_tokens
from dflash_trio.engine.drafting.acceptance import UNKNOWN, Acceptance, TreeAcceptance
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.costs import CostTable

Chance = Callable[[int], float]
"""Of a guess to be right, by the tokens that its sequence has said."""


def flat(tokens: int) -> float:
    """A GPU: seconds of a step, hardly more for more tokens."""
    return 0.010 + 0.00002 * tokens


def linear(tokens: int) -> float:
    """Two cores: four tokens take two and a half times as long as one."""
    return 0.004 + 0.004 * tokens


def block(asked: int) -> float:
    """A block of guesses in one go."""
    return 0.003 if asked else 0.0


def one_by_one(asked: int) -> float:
    return 0.002 * asked


def nothing(asked: int) -> float:
    return 0.00001 if asked else 0.0


@attrs.define
class World:
    """A model with ``streams`` sequences at a time, each of ``length`` tokens."""

    step: Callable[[int], float]
    draft: Callable[[int], float]
    chance: Chance
    streams: int = 1
    length: int = 200
    supply: float = 1.0
    """The share of questions that there is a guess for."""
    noise: float = 0.0
    partitioned: bool = False
    limit: int = 63
    longest: int = 8
    seed: int = 1
    acceptance: type[Acceptance] = Acceptance

    def run(self, tokens: int, *, constant: int | None = None) -> Outcome:
        """Until so many tokens are said. ``constant``: guesses in each step, instead of what the
        controller says; with 0 that is a model without drafts."""
        dice = random.Random(self.seed)
        controller = DraftController(
            self.longest,
            verify_limit=self.limit,
            partitioned=self.partitioned,
            acceptance=self.acceptance,
        )
        said = [0] * self.streams
        known = [controller.new_acceptance() for _ in said]
        outcome = Outcome()
        while outcome.tokens < tokens:
            asked = controller.choose(known) if constant is None else constant
            lengths = [asked if dice.random() < self.supply else 0 for _ in said]
            if constant is None and asked:
                kept = controller.trim(lengths, known)
                lengths = [min(length, kept) for length in lengths]
            right = [self._right(dice, said[i], length) for i, length in enumerate(lengths)]
            committed = sum(right) + len(said)
            jitter = dice.lognormvariate(0, self.noise) if self.noise else 1.0
            seconds = jitter * self._seconds(lengths)
            draft = self.draft(asked)
            outcome.seconds += seconds + draft
            outcome.tokens += committed
            outcome.steps.append((max(lengths), outcome.seconds, outcome.tokens))
            if constant is None:
                controller.observe(
                    [1 + length for length in lengths],
                    [
                        (known[i], min(length, right[i] + 1), range(right[i]))
                        for i, length in enumerate(lengths)
                        if length
                    ],
                    committed=committed,
                    asked=asked,
                    draft_seconds=draft,
                    step_seconds=seconds,
                )
            for i in range(self.streams):
                said[i] += right[i] + 1
                if said[i] >= self.length:
                    said[i] = 0
                    known[i] = controller.new_acceptance()
        return outcome

    def _right(self, dice: random.Random, said: int, length: int) -> int:
        for place in range(length):
            if dice.random() >= self.chance(said + place):
                return place
        return length

    def _seconds(self, lengths: Sequence[int]) -> float:
        if not self.partitioned:
            return self.step(len(lengths) + sum(lengths))
        seconds, done = 0.0, 0
        for length in sorted({1 + length for length in lengths}):
            left = sum(1 + other >= length for other in lengths)
            seconds += self.step(left * (length - done))
            done = length
        return seconds

    def speed(self, tokens: int) -> float:
        """Times as fast as without drafts."""
        plain = self.run(tokens, constant=0)
        ours = self.run(tokens)
        return (plain.seconds / plain.tokens) / (ours.seconds / ours.tokens)

    def best(self, tokens: int) -> float:
        """The same of the best constant number of guesses."""
        plain = self.run(tokens, constant=0)
        most = min(self.longest, (self.limit - self.streams) // self.streams)
        runs = [self.run(tokens, constant=k) for k in range(most + 1)]
        return max((plain.seconds / plain.tokens) / (r.seconds / r.tokens) for r in runs)


@attrs.define
class Outcome:
    seconds: float = 0.0
    tokens: int = 0
    steps: list[tuple[int, float, int]] = attrs.field(factory=list)
    """Of each step: the most guesses of a sequence, and seconds and tokens so far."""


def always(chance: float) -> Chance:
    return lambda said: chance


COSTS = {
    "GPU, block": (flat, block),
    "GPU, one by one": (flat, one_by_one),
    "GPU, lookup": (flat, nothing),
    "CPU, block": (linear, block),
    "CPU, one by one": (linear, one_by_one),
    "CPU, lookup": (linear, nothing),
}


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.2])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("partitioned", [False, True])
def test_guesses_that_do_not_pay_cost_next_to_nothing(
    costs: str, partitioned: bool, chance: float, streams: int
) -> None:
    step, draft = COSTS[costs]
    world = World(step, draft, always(chance), streams=streams, partitioned=partitioned)
    # Of one generation on each stream, the very first of this model included, and of many.
    assert world.speed(200 * streams) > 0.975
    assert world.speed(2000 * streams) > 0.985


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("costs", COSTS)
def test_steps_that_take_now_longer_and_now_shorter_are_seen_through(
    costs: str, streams: int
) -> None:
    step, draft = COSTS[costs]
    world = World(step, draft, always(0.0), streams=streams, noise=0.1)
    assert world.speed(1000 * streams) > 0.97


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("costs", COSTS)
def test_as_many_are_guessed_as_is_best(costs: str, chance: float, streams: int) -> None:
    step, draft = COSTS[costs]
    world = World(step, draft, always(chance), streams=streams)
    assert world.speed(2000 * streams) > 0.93 * world.best(2000 * streams)


@pytest.mark.parametrize("costs", ["GPU, block", "GPU, lookup", "CPU, lookup"])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_text_that_changes_in_the_middle_is_followed(costs: str, streams: int) -> None:
    step, draft = COSTS[costs]

    def world(chance: Chance) -> World:
        return World(step, draft, chance, streams=streams, length=600)

    half_as_good = 2 / (1 + 1 / world(always(0.9)).best(600 * streams))
    better = world(lambda said: 0.9 if said >= 300 else 0.0)
    worse = world(lambda said: 0.0 if said >= 300 else 0.9)
    assert better.speed(1200 * streams) > 0.9 * half_as_good
    assert worse.speed(1200 * streams) > 0.9 * half_as_good


def test_it_is_known_within_tens_of_steps_that_guesses_have_become_good() -> None:
    world = World(flat, block, lambda said: 0.9 if said >= 500 else 0.0, length=10_000)
    steps = world.run(1000).steps
    change = next(i for i, (_, _, tokens) in enumerate(steps) if tokens >= 500)
    begun = next(i for i, (guesses, _, _) in enumerate(steps) if i > change and guesses > 3)
    assert begun - change < 60


def test_it_is_known_within_tens_of_steps_that_guesses_have_become_bad() -> None:
    world = World(flat, block, lambda said: 0.0 if said >= 500 else 0.9, length=10_000)
    steps = world.run(1000).steps
    change = next(i for i, (_, _, tokens) in enumerate(steps) if tokens >= 500)
    late = steps[change + 30 :]
    assert len(late) > 300
    assert sum(guesses > 0 for guesses, _, _ in late) < len(late) / 10


@pytest.mark.parametrize("costs", sorted({*COSTS} - {"GPU, lookup"}))  # where a try costs nothing
def test_two_steps_are_tried_before_there_is_any_evidence(costs: str) -> None:
    step, draft = COSTS[costs]
    steps = World(step, draft, always(0.0)).run(15).steps
    guesses = [guesses for guesses, _, _ in steps]
    assert guesses[:3] == [0, 0, 0]
    assert sum(map(bool, guesses)) == 2
    assert max(guesses) == 1


def test_the_first_step_of_a_new_shape_may_be_slow() -> None:
    seen: set[int] = set()

    def builds_graphs(tokens: int) -> float:
        slow = 1 if tokens in seen else 6
        seen.add(tokens)
        return slow * flat(tokens)

    ours = World(builds_graphs, block, always(0.9)).run(2000)
    plain = World(flat, block, always(0.9)).run(2000, constant=0)
    assert plain.seconds / plain.tokens > 2.5 * ours.seconds / ours.tokens


def test_a_machine_that_becomes_slow_for_a_while_changes_no_mind() -> None:
    now = 0

    def busy(tokens: int) -> float:
        nonlocal now
        now += 1
        return flat(tokens) * (3 if 100 < now < 130 else 1)

    steps = World(busy, block, always(0.9), length=10_000).run(3000).steps
    after = steps[200:]
    assert sum(guesses > 3 for guesses, _, _ in after) > 0.9 * len(after)


def test_what_a_plain_step_takes_is_looked_at_again_now_and_then() -> None:
    steps = World(flat, nothing, always(0.95), length=100_000).run(5000).steps
    plain = [i for i, (guesses, _, _) in enumerate(steps) if not guesses]
    assert plain[-1] > len(steps) - 140
    assert len(plain) < len(steps) / 20


@given(
    streams=st.integers(1, 70),
    limit=st.integers(1, 80),
    chance=st.floats(0, 1),
    supply=st.floats(0, 1),
    costs=st.sampled_from(sorted(COSTS)),
    partitioned=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_with_guesses_never_exceeds_the_limit_and_the_account_never_the_bounds(
    streams: int, limit: int, chance: float, supply: float, costs: str, partitioned: bool
) -> None:
    step, draft = COSTS[costs]

    def checked(tokens: int) -> float:
        assert tokens <= max(limit, streams)
        return step(tokens)

    world = World(
        checked,
        draft,
        always(chance),
        streams=streams,
        supply=supply,
        limit=limit,
        partitioned=partitioned,
        length=30,
    )
    ours = world.run(60 * streams)
    assert ours.steps == world.run(60 * streams).steps, "it decides the same again"
    plain = world.run(60 * streams, constant=0)
    # A short first generation: two tries for nothing, and what they led to.
    slower = ours.seconds / ours.tokens - plain.seconds / plain.tokens
    assert slower * ours.tokens < 8 * (step(streams) + draft(8))


@pytest.mark.parametrize("acceptance", [Acceptance, TreeAcceptance])
@pytest.mark.parametrize("chance", [0.95, 0.6, 0.05])
@pytest.mark.parametrize("token", [0.0, 0.5])
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(("streams", "longest"), [(3, 22), (4, 15), (8, 15), (32, 15), (40, 15)])
def test_of_guesses_that_cost_nothing_no_more_are_verified_than_fit_in_a_batch(
    acceptance: type[Acceptance],
    chance: float,
    token: float,
    on_cpu: bool,
    streams: int,
    longest: int,
) -> None:
    limit = verify_tokens(streams, longest, on_cpu=on_cpu)
    largest = 0

    def step(tokens: int) -> float:
        nonlocal largest
        largest = max(largest, tokens)
        return 1.0 + token * (tokens - streams)

    world = World(
        step,
        lambda asked: 0.0001 if asked else 0.0,
        always(chance),
        streams=streams,
        limit=limit,
        longest=longest,
        partitioned=True,
        acceptance=acceptance,
    )
    world.run(200 * streams)
    assert largest <= limit
    assert largest > streams or 2 * streams > limit, "it does guess where one for each fits"


def test_a_question_that_nobody_had_a_guess_for_does_not_make_asking_cheap() -> None:
    controller = DraftController(7, verify_limit=63, partitioned=True)
    known = [controller.new_acceptance()]
    asked = 0
    for _ in range(1000):
        if chosen := controller.choose(known):
            asked += 1
            assert controller.keep([0], [0], known) == [0]
        controller.observe(
            [1],
            [],
            committed=1,
            asked=chosen,
            draft_seconds=0.00002 if chosen else 0.0,
            step_seconds=0.01,
        )
    assert 1 < asked < 100


# ------------------------------------------------------------------------------------ costs


def test_costs_between_known_sizes_are_interpolated_and_beyond_go_on_as_before() -> None:
    table = CostTable()
    assert table.estimate(5) == 0.0
    for _ in range(3):
        table.observe(2, 0.010)
    assert table.estimate(1) == table.estimate(50) == pytest.approx(0.010)
    for _ in range(3):
        table.observe(6, 0.018)
    assert table.estimate(4) == pytest.approx(0.014)
    assert table.estimate(8) == pytest.approx(0.022)
    assert table.knows(4)
    assert not table.knows(7)


def test_a_size_that_costs_more_for_a_reason_is_believed_in_the_end() -> None:
    table = CostTable()
    for _ in range(20):
        for size in (1, 2, 4, 8):
            table.observe(size, 0.010 if size != 4 else 0.018)
    assert table.estimate(4) > 0.016
    assert table.estimate(8) < 0.013


def test_a_single_slow_measurement_moves_the_estimate_a_little_only() -> None:
    table = CostTable()
    for _ in range(10):
        for size in (1, 2, 4, 8):
            table.observe(size, 0.010)
    table.observe(4, 0.5)
    assert table.estimate(4) < 0.013
    table.observe(6, 0.015)
    assert table.estimate(6) < 0.013


# ------------------------------------------------------------------------------- acceptance


def test_chances_are_told_apart_by_place_and_by_sequence() -> None:
    model = Acceptance(4, fading=0.97, weight=3.0)
    assert model.chances(4) == [UNKNOWN] * 4
    good, bad = (Acceptance(4, fading=0.9, weight=2.0) for _ in range(2))
    for _ in range(30):
        for sequence, judged, accepted in ((good, 3, 2), (bad, 1, 0)):
            for which in (model, sequence):
                which.fade()
                which.add(judged, range(accepted))
    first, second, third, _ = model.chances(4)
    assert second > 0.85
    assert first == pytest.approx(0.5, abs=0.05)
    assert third < 0.1
    assert good.reach(model.chances(2))[1] > 0.8
    assert bad.reach(model.chances(2))[0] < 0.15


def test_what_was_long_ago_is_forgotten() -> None:
    acceptance = Acceptance(2, fading=0.9, weight=2.0)
    for _ in range(100):
        acceptance.fade()
        acceptance.add(1, (0,))
    for _ in range(25):
        acceptance.fade()
        acceptance.add(1, ())
    assert acceptance.reach([0.5])[0] < 0.2
    assert acceptance.evidence < 10.1
