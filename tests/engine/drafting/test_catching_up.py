"""A draft that works off a long prompt: no try, no measure of guessing, and a debt with a bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import attrs
import pytest

from dflash_trio.engine.drafting.controller import MOST_AT_ONCE, DraftController
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.scripted_provider import CheckingProvider

PLAIN = 0.010
CHUNK = 0.85
"""Seconds of the draft, for what the target's prompts are computed in at a time."""
GUESS = 0.001


@attrs.define
class Stream:
    """One sequence after the other, whose prompts the draft has not seen."""

    chance: float = 0.95
    chunk: float = CHUNK
    guess: float = GUESS
    """Seconds, for each token asked for."""
    first_guess: float | None = None
    """Seconds that the first two questions take, whatever is asked for."""
    seconds: float = 0.0
    tokens: int = 0
    asked: int = 0
    caught_up: float = 0.0
    controller: DraftController = attrs.field(
        factory=lambda: DraftController(16, verify_limit=63, partitioned=True)
    )
    dice: random.Random = attrs.field(factory=lambda: random.Random(1))

    def answer(self, tokens: int, *, chunks: int = 0) -> None:
        """A prompt of so many of the draft's goes, and an answer."""
        known = self.controller.new_acceptance()
        ends = self.tokens + tokens
        while self.tokens < ends:
            asked = self.controller.choose([known])
            caught_up = guessing = 0.0
            length = 0
            if asked:
                self.asked += 1
                if chunks:
                    chunks -= 1
                    caught_up = self.chunk
                if not chunks:
                    guessing = self.guess * asked
                    if self.first_guess and self.asked <= 2:
                        guessing = self.first_guess
                length = self.controller.trim([0 if chunks else asked], [known])
            right = 0
            while right < length and self.dice.random() < self.chance:
                right += 1
            step = PLAIN * (1 + 0.05 * length)
            self.controller.observe(
                [1 + length],
                [(known, min(right + 1, length), range(right))] if length else [],
                committed=1 + right,
                asked=asked,
                draft_seconds=caught_up + guessing,
                step_seconds=step,
                caught_up_seconds=caught_up,
            )
            self.caught_up += caught_up
            self.seconds += caught_up + guessing + step
            self.tokens += 1 + right

    @property
    def lost(self) -> float:
        """Seconds, against plain steps."""
        return self.seconds - PLAIN * self.tokens


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_after_a_long_prompt_short_ones_are_guessed_for(chunks: int) -> None:
    stream = Stream()
    stream.answer(500, chunks=chunks)
    before = stream.lost
    for _ in range(19):
        stream.answer(500)
    assert stream.lost < before
    assert stream.seconds - chunks * CHUNK < 0.4 * PLAIN * stream.tokens


@pytest.mark.parametrize("chunks", [1, 3, 50])
@pytest.mark.parametrize("chunk", [0.05, CHUNK, 30.0])
def test_catching_up_for_guesses_that_do_not_pay_has_a_bound(chunks: int, chunk: float) -> None:
    stream = Stream(chance=0.0, chunk=chunk)
    for _ in range(400):
        stream.answer(250, chunks=chunks)
    # What is owed at most, the go that goes beyond it, and a hundredth of the time.
    assert stream.lost < MOST_AT_ONCE * PLAIN + chunk + 0.025 * PLAIN * stream.tokens


def test_long_prompts_with_short_answers_do_not_keep_a_draft_busy() -> None:
    """Each guess is right, and all of them together do not earn back what a prompt takes."""
    stream = Stream(chance=1.0)
    for _ in range(10_000):
        stream.answer(10, chunks=3)
    assert stream.lost < MOST_AT_ONCE * PLAIN + CHUNK + 0.025 * PLAIN * stream.tokens


def test_drafts_come_back_when_what_was_owed_is_paid() -> None:
    stream = Stream(chance=1.0)
    for _ in range(100):
        stream.answer(10, chunks=3)
    asked = stream.asked
    stream.answer(1000)
    assert stream.asked == asked
    stream.answer(100 * MOST_AT_ONCE)
    before = stream.asked, stream.tokens
    stream.answer(2000)
    assert stream.asked - before[0] > 100


@pytest.mark.parametrize("seconds", [0.5, CHUNK, 60.0])
def test_what_asking_took_in_a_bad_moment_is_looked_at_again(seconds: float) -> None:
    stream = Stream(first_guess=seconds, chance=0.0)
    stream.answer(100)
    assert stream.asked == 2
    stream.chance = 0.95
    stream.answer(100 * MOST_AT_ONCE)
    before = stream.tokens, stream.seconds
    stream.answer(5000)
    assert stream.seconds - before[1] < 0.5 * PLAIN * (stream.tokens - before[0])


def test_what_asking_really_takes_stays_a_hundredth_of_the_time() -> None:
    stream = Stream(chance=0.0, guess=CHUNK)
    stream.answer(100)
    before = stream.tokens, stream.seconds
    assert stream.asked == 2
    stream.answer(100_000)
    assert stream.asked > 5
    tokens, seconds = stream.tokens - before[0], stream.seconds - before[1]
    assert seconds < 1.02 * PLAIN * tokens


# -------------------------------------------------------------------------- the way there


class Slow(CheckingProvider):
    """Takes 10 s for what is asked, of which it spends 7 on the prompt."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(lambda _tokens, _limit: [])
        self.clock = clock

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.clock[0] += 10.0
        self.caught_up_seconds = 7.0
        return super().propose(wanted)


class Told(DraftController):
    """Asks in every other step."""

    def __init__(self) -> None:
        super().__init__(4, verify_limit=63, partitioned=True)
        self.steps = count()
        self.told: list[tuple[object, object]] = []

    def choose(self, sequences: object) -> int:
        return 0 if next(self.steps) % 2 else 4

    def observe(self, *_: object, **told: object) -> None:
        self.told.append((told["draft_seconds"], told["caught_up_seconds"]))


def test_the_controller_hears_what_catching_up_took_in_this_step() -> None:
    clock, controller = [0.0], Told()
    drafter = Drafter(Slow(clock), controller, verify_limit=63, clock=lambda: clock[0])
    record = drafter.new_record([1])
    for _ in range(2):
        if drafter.choose([record]):
            drafter.propose([Wanted(0, [1], 4)], [record])
        drafter.step_begins()
        drafter.observe([BatchSlice(0, 0, (1,), 1)], [0], [[]])
    assert controller.told == [(10.0, 7.0), (0.0, 0.0)]
