"""Where a device replays what it has recorded, a draft guesses all the time or not at all, and
takes the gain where there is one. The costs are those of an H200 with SmolLM2-135M."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dflash_trio.engine.drafting.acceptance import Acceptance
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.drafting.steady_controller import SteadyController
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.simulated import BLOCK, always, right_of, tell

PLAIN = 1.10e-3
GUESSED = {3: 1.85e-3, 5: 1.95e-3, 7: 2.10e-3}
"""Seconds of one sequence's step: of a plain one, and with so many guesses, guessing included."""
RECORDING = (2.2e-3, 1.5e-3)
"""What the first step of another shape takes longer, and the second."""
WAKING = 9e-3
READING = 0.05e-3
"""Of each step that the draft looks at."""
TRAINED = (0.76, 0.56, 0.41, 0.33, 0.26, 0.21, 0.17)
"""Chances that guess 1, 2, ... comes."""


@attrs.define
class Gpu:
    """Answers of 100 to 200 tokens, so many at a time, the next one when one ends."""

    chances: Sequence[float]
    streams: int = 1
    guessed: dict[int, float] = attrs.field(factory=lambda: dict(GUESSED))
    more: float = 0.1
    """Of a plain step: what each further sequence adds to it."""
    verify_limit: int = 256
    tokens: tuple[int, int] = (100, 200)
    """The shortest answer and the longest."""
    now: float = 0.0
    awake: bool = True
    waking: float = 0.0
    batches: list[list[int]] = attrs.field(factory=list)
    """Of each step: the tokens of each sequence."""

    def rate(self, steps: int, *, drafting: bool = True) -> float:
        """Tokens a second."""
        provider: Any = SimpleNamespace(
            kind="simulated", longest=BLOCK, matched=(), caught_up_seconds=0.0,
            steady=True, looks_at_steps=True, propose=self._propose, observe=self._observe,
            nap=self._nap,
        )  # fmt: skip
        controller = SteadyController(BLOCK, verify_limit=self.verify_limit)
        drafter = Drafter(
            provider, controller, verify_limit=self.verify_limit, clock=lambda: self.now
        )
        dice = random.Random(1)
        left: list[list[Any]] = []
        said, same = 0, 0
        for _ in range(steps):
            while len(left) < self.streams:
                left.append([dice.randint(*self.tokens), drafter.new_record([1, 1])])
                same = 0  # its prompt was a step of another shape
            records = [record for _, record in left]
            guesses: list[Any] = [()] * len(left)
            if drafting and (chosen := drafter.choose(records)):
                wanted = [Wanted(row, [1, 1], chosen) for row in range(len(left))]
                guesses = list(drafter.propose(wanted, records))
            drafter.step_begins()
            batch = [1 + len(guess) for guess in guesses]
            same = same + 1 if self.batches and batch == self.batches[-1] else 0
            self.batches.append(batch)
            seconds = self.guessed[batch[0] - 1] if batch[0] > 1 else PLAIN
            seconds *= 1 + self.more * (len(left) - 1)
            seconds += RECORDING[same] if same < len(RECORDING) else 0.0
            self.now += dice.lognormvariate(0, 0.03) * seconds + self.waking
            self.waking = 0.0
            right = [right_of(dice, self.chances, len(guess)) for guess in guesses]
            if drafting:
                tell(drafter, records, guesses, right)
            for item, came in zip(left, right, strict=True):
                said += min(1 + came, item[0])
                item[0] -= 1 + came
            left = [item for item in left if item[0] > 0]
        return said / self.now

    def _propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [[7] * item.limit for item in wanted]

    def _observe(self, _batch: Sequence[BatchSlice], _kept: Sequence[int]) -> None:
        self.now += READING

    def _nap(self, *, asleep: bool) -> None:
        self.awake, self.waking = not asleep, WAKING

    @property
    def guessing(self) -> float:
        """The share of the steps that had guesses."""
        return sum(batch[0] > 1 for batch in self.batches) / len(self.batches)

    @property
    def changes(self) -> int:
        """Steps with another number of guesses than the one before."""
        return sum(a[0] != b[0] for a, b in pairwise(self.batches))


def plainly(gpu: Gpu, steps: int) -> float:
    return attrs.evolve(gpu, batches=[], now=0.0).rate(steps, drafting=False)


def test_what_a_trained_draft_wins_is_taken() -> None:
    gpu = Gpu(TRAINED)
    assert gpu.rate(10_000) > 1.45 * plainly(gpu, 10_000)
    assert gpu.guessing > 0.95


def test_the_gain_is_there_soon() -> None:
    # Ten answers.
    gpu = Gpu(TRAINED)
    assert gpu.rate(700) > 1.15 * plainly(gpu, 700)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.4])
@pytest.mark.parametrize("streams", [1, 4, 16])
def test_guesses_that_lose_cost_next_to_nothing(chance: float, streams: int) -> None:
    gpu = Gpu(always(chance), streams)
    assert gpu.rate(30_000) > 0.97 * plainly(gpu, 30_000)
    assert gpu.guessing < 0.1


@pytest.mark.parametrize("chance", [0.45, 0.5, 0.55])
def test_where_it_is_nearly_the_same_little_is_lost(chance: float) -> None:
    gpu = Gpu(always(chance))
    assert gpu.rate(30_000) > 0.96 * plainly(gpu, 30_000)


def test_each_step_has_equally_many_guesses() -> None:
    gpu = Gpu(TRAINED)
    gpu.rate(10_000)
    assert gpu.changes < 60


@pytest.mark.parametrize(
    ("guessed", "best"),
    [
        ({3: 1.5e-3, 5: 2.3e-3, 7: 3.2e-3}, 3),
        ({3: 1.8e-3, 5: 1.82e-3, 7: 2.6e-3}, 5),
        ({3: 1.8e-3, 5: 1.82e-3, 7: 1.84e-3}, 7),
    ],
)
def test_the_number_of_guesses_that_is_worth_most_is_found(
    guessed: dict[int, float], best: int
) -> None:
    gpu = Gpu(TRAINED, guessed=guessed)
    gpu.rate(10_000)
    with_guesses = [batch[0] - 1 for batch in gpu.batches[2000:] if batch[0] > 1]
    assert with_guesses.count(best) > 0.8 * len(with_guesses)


def test_where_sequences_come_and_go_all_the_time_nothing_is_guessed() -> None:
    # Another shape in every third step: nothing is recorded for long enough.
    gpu = Gpu(TRAINED, streams=16, tokens=(5, 60))
    assert gpu.rate(10_000) > 0.97 * plainly(gpu, 10_000)


def test_a_batch_with_guesses_is_no_larger_than_allowed() -> None:
    gpu = Gpu(TRAINED, streams=16, verify_limit=64)
    gpu.rate(3000)
    assert {sum(batch) for batch in gpu.batches} <= {16, 64}
    gpu = Gpu(TRAINED, streams=16, verify_limit=31)
    gpu.rate(1000)
    assert gpu.guessing == 0


def test_a_draft_that_becomes_good_is_found_out() -> None:
    gpu = Gpu(always(0.2))
    controller = SteadyController(BLOCK, verify_limit=256)
    sequence = controller.new_acceptance()
    dice = random.Random(2)

    def steps(count: int, chance: float) -> float:
        guessing = 0
        for _ in range(count):
            chosen = controller.choose([sequence])
            guessing += chosen > 0
            came = 0
            while came < chosen and dice.random() < chance:
                came += 1
            judged = [(sequence, min(1 + came, chosen), range(came))] if chosen else []
            controller.observe(
                [1 + chosen], judged, committed=1 + came, asked=chosen, draft_seconds=0.0,
                step_seconds=0.0,
            )  # fmt: skip
            controller.took(gpu.guessed[chosen] if chosen else PLAIN)
        return guessing / count

    assert steps(3000, 0.2) < 0.1
    steps(10_000, 0.8)
    assert steps(3000, 0.8) > 0.9


def test_a_try_goes_on_no_longer_where_so_many_guesses_fit_no_more() -> None:
    # Forty sequences have room for five each, and sixty-three, which are counted with them, for
    # three: the try of five never ends by being known.
    controller = SteadyController(BLOCK, verify_limit=256)
    crowd: list[Acceptance] = [controller.new_acceptance() for _ in range(63)]
    guessing = 0
    for step in range(3000):
        some = crowd[:40] if step < 25 else crowd
        chosen = controller.choose(some)
        guessing += chosen > 0
        judged = [(each, 1, ()) for each in some] if chosen else []
        controller.observe(
            [1 + chosen] * len(some), judged, committed=len(some), asked=chosen,
            draft_seconds=0.0, step_seconds=1.0,
        )  # fmt: skip
        controller.took(3.0 if chosen else 1.0)
    assert guessing < 300


def test_steps_of_unequal_sequences_say_nothing_of_what_equal_ones_take() -> None:
    controller = SteadyController(BLOCK, verify_limit=256)
    both: list[Acceptance] = [controller.new_acceptance() for _ in range(2)]
    for _ in range(100):
        assert controller.choose(both) == 0
        controller.observe(
            [1, 4], [(both[1], 1, ())], committed=2, asked=3, draft_seconds=0.0, step_seconds=1.0
        )
        controller.took(1.0)
