"""How many looked-up tokens to verify, in texts and at costs that are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.drafting.lookup_controller import LookupController
from dflash_trio.engine.drafting.match_chances import EXPECTED, MatchChances, rank

Matches = Callable[[int], int]
"""How many tokens match before the token at a position of an answer; 0: none does."""
Chance = Callable[[int], float]
"""That a guess is right, by the tokens that match before it."""


def two_cores(tokens: int) -> float:
    """Seconds, as measured: SmolLM2-135M on two cores."""
    return 0.008 if tokens == 1 else 0.007 + 0.0041 * tokens


def gpu(tokens: int) -> float:
    return 0.010 + 0.00002 * tokens


def small_model_on_a_gpu(tokens: int) -> float:
    """Seconds, as measured: SmolLM2-135M on an H200, where more than eight tokens are computed in
    another way."""
    return 0.00100 + 0.00009 * tokens if tokens <= 8 else 0.0032


def always_right(_matched: int) -> float:
    return 1.0


def short_ones_are_wrong(matched: int) -> float:
    return 0.0 if matched < 4 else 1.0


def copying(position: int) -> int:
    """A text that is written again, from its first words on."""
    return position if position > 1 else 0


def incompressible(_position: int) -> int:
    return 0


def names(position: int) -> int:
    """Two tokens that came before, now and then, and nothing of what followed them."""
    return 2 if position % 3 == 0 else 0


@attrs.define
class Desk:
    """A model whose sequences each have a text of their own."""

    texts: Sequence[Matches]
    chance: Chance = always_right
    cost: Callable[[int], float] = two_cores
    partitioned: bool = False
    limit: int = 63
    longest: int = 16
    noise: float = 0.0
    recorded: bool = False
    """A batch of another shape than the two before takes twice as long and more: its graph is
    recorded anew, as on a GPU."""
    dice: random.Random = attrs.field(factory=lambda: random.Random(1))
    seconds: float = 0.0
    plain: float = 0.0
    """What the same tokens take without guesses."""
    batches: list[list[int]] = attrs.field(factory=list)
    controller: LookupController = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.controller = LookupController(
            self.longest, verify_limit=self.limit, partitioned=self.partitioned
        )

    def answers(self, tokens: int) -> float:
        """One more answer of each, of so many tokens; how many times as fast as without guesses
        it was."""
        known = [self.controller.new_acceptance() for _ in self.texts]
        said = [0] * len(known)
        before = self.plain, self.seconds
        while min(said) < tokens:
            self._step(known, said)
        return (self.plain - before[0]) / (self.seconds - before[1])

    def _step(self, known: list[MatchChances], said: list[int]) -> None:
        count = len(known)
        asked = self.controller.choose(known)
        matched = [text(at) for text, at in zip(self.texts, said, strict=True)]
        lengths = [asked if length else 0 for length in matched]
        kept = self.controller.keep(lengths, matched, known) if asked else [0] * count
        assert all(0 <= few <= many for few, many in zip(kept, lengths, strict=True))
        assert not sum(kept) or count + sum(kept) <= self.limit
        self.batches.append(kept)
        committed, judged = 0, []
        for place, sequence in enumerate(known):
            right = 0
            while right < lengths[place]:
                if self.dice.random() >= self.chance(matched[place] + right):
                    break
                right += 1
            accepted = min(right, kept[place])
            if lengths[place]:
                turns = min(right + 1, accepted + 1, lengths[place])
                self.controller.watched(sequence, matched[place], turns, min(right, turns))
            if kept[place]:
                judged.append((sequence, min(accepted + 1, kept[place]), accepted))
            said[place] += accepted + 1
            committed += accepted + 1
        seconds = self._seconds(kept)
        if self.recorded and any(sum(batch) != sum(kept) for batch in self.batches[-3:]):
            seconds *= 2.3
        if self.noise:
            seconds *= self.dice.lognormvariate(0, self.noise)
        self.seconds += seconds
        self.plain += committed / count * self.cost(count)
        self.controller.observe(
            [1 + few for few in kept],
            judged,
            committed=committed,
            asked=asked,
            draft_seconds=0.0,
            step_seconds=seconds,
        )

    def _seconds(self, kept: Sequence[int]) -> float:
        if not self.partitioned:
            return self.cost(len(kept) + sum(kept))
        seconds, done = 0.0, 0
        for length in sorted({1 + few for few in kept}):
            left = sum(1 + few >= length for few in kept)
            seconds += self.cost(left * (length - done))
            done = length
        return seconds


def test_one_answer_that_copies_is_enough_to_know_that_it_pays() -> None:
    """The very first of a model, and what larger batches take is not known either."""
    desk = Desk([copying])
    assert desk.answers(100) > 1.5
    assert desk.answers(100) > 1.6


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_texts_without_repetitions_cost_nothing(
    streams: int, partitioned: bool, noise: float
) -> None:
    desk = Desk([incompressible] * streams, partitioned=partitioned, noise=noise)
    desk.answers(200)
    assert not any(map(sum, desk.batches))


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_short_matches_that_say_little_cost_next_to_nothing(
    streams: int, partitioned: bool, chance: float
) -> None:
    desk = Desk([names] * streams, lambda _matched: chance, partitioned=partitioned)
    assert desk.answers(200) > 0.97
    assert desk.answers(1000) > 0.985


def test_short_and_long_matches_are_told_apart() -> None:
    desk = Desk([lambda position: position % 60], short_ones_are_wrong)
    desk.answers(400)
    assert desk.answers(400) > 1.4
    verified = [sum(kept) for kept in desk.batches[-100:]]
    assert max(verified) > 4


def test_each_sequence_gets_as_many_guesses_as_it_deserves() -> None:
    desk = Desk([copying, names, names, incompressible], short_ones_are_wrong)
    desk.answers(100)
    late = desk.batches[len(desk.batches) // 2 :]
    assert max(kept[0] for kept in late) > 4
    assert not any(sum(kept[1:]) for kept in late)


def test_what_was_not_verified_teaches_all_the_same() -> None:
    """Matches go wrong for long, and nothing is verified; then they come true."""
    good = False
    desk = Desk([lambda position: 5 if position else 0], lambda _matched: 1.0 if good else 0.0)
    desk.answers(300)
    assert not any(map(sum, desk.batches[-200:]))
    good = True
    begin = len(desk.batches)
    desk.answers(100)
    first = next(number for number, kept in enumerate(desk.batches[begin:]) if sum(kept))
    assert first < 30


def test_a_text_that_stops_repeating_is_left_alone_within_a_few_steps() -> None:
    good = True
    desk = Desk([lambda position: 20], lambda _matched: 1.0 if good else 0.0)
    desk.answers(300)
    good = False
    begin = len(desk.batches)
    assert desk.answers(200) > 0.9
    assert not any(map(sum, desk.batches[begin + 30 :]))


def test_on_a_gpu_as_many_are_verified_as_there_are() -> None:
    desk = Desk([copying], cost=gpu)
    desk.answers(300)
    assert desk.answers(300) > 10


def test_what_a_plain_step_takes_is_looked_at_again_now_and_then() -> None:
    desk = Desk([copying], cost=gpu)
    desk.answers(20_000)
    plain = [number for number, kept in enumerate(desk.batches) if not sum(kept)]
    assert plain[-1] > len(desk.batches) - 140
    assert len(plain) < len(desk.batches) / 20


def test_a_batch_of_a_new_size_that_is_slow_at_first_is_not_avoided_for_ever() -> None:
    seen: set[int] = set()

    def builds_graphs(tokens: int) -> float:
        slow = 1 if tokens in seen else 5
        seen.add(tokens)
        return slow * gpu(tokens)

    desk = Desk([copying], cost=builds_graphs)
    desk.answers(300)
    assert desk.answers(1000) > 5


def test_a_machine_that_becomes_slow_for_a_while_changes_no_mind() -> None:
    """As when others take its cores: single steps take a hundred times as long."""
    desk = Desk([copying])
    desk.answers(300)
    calm = two_cores

    def busy(tokens: int) -> float:
        return calm(tokens) * desk.dice.choice((1, 3, 10, 100))

    desk.cost = busy
    desk.answers(60)
    desk.cost = calm
    desk.answers(100)
    assert desk.answers(300) > 1.4


def test_what_batches_took_in_a_bad_moment_is_looked_at_again() -> None:
    """The first of each size takes as long as its tokens one by one: as if nothing could be won."""
    seen: dict[int, int] = {}

    def bad_at_first(tokens: int) -> float:
        seen[tokens] = seen.get(tokens, 0) + 1
        return two_cores(tokens) * (20 if tokens > 1 and seen[tokens] < 2 else 1)

    desk = Desk([copying])
    desk.cost = bad_at_first
    desk.answers(100)
    desk.cost = two_cores
    desk.answers(300)
    assert desk.answers(300) > 1.4


def test_where_larger_batches_really_gain_nothing_looking_again_costs_next_to_nothing() -> None:
    desk = Desk([copying], cost=lambda tokens: 0.01 * tokens)
    desk.answers(300)
    assert desk.answers(1000) > 0.985


@given(
    streams=st.integers(1, 70),
    limit=st.integers(1, 80),
    chance=st.floats(0, 1),
    cost=st.sampled_from([two_cores, gpu]),
    partitioned=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_whatever_comes_of_it_little_is_lost(
    streams: int,
    limit: int,
    chance: float,
    cost: Callable[[int], float],
    partitioned: bool,
    seed: int,
) -> None:
    matches = [lambda position, own=own: (position * own) % 23 for own in range(streams)]
    desk = Desk(
        matches,  # type: ignore[arg-type]
        lambda _matched: chance,
        cost=cost,
        partitioned=partitioned,
        limit=limit,
        dice=random.Random(seed),
    )
    desk.answers(60)
    # What may be owed, and the step that goes beyond it: the largest there is.
    assert desk.seconds - desk.plain < 4 * cost(streams) + 2 * cost(max(limit, streams))


def test_a_guess_further_on_has_a_longer_match_behind_it() -> None:
    chances = MatchChances(fading=0.9, weight=2.0)
    for _ in range(40):
        chances.add(2, judged=2, right=1)  # two matched, then three: right and wrong
    found = chances.chances(EXPECTED)
    assert found[rank(2)] > 0.8
    assert found[rank(3)] < 0.2
    assert found[rank(4)] == EXPECTED[rank(4)]
    reached = chances.reach(EXPECTED, 2, 3)
    assert reached == sorted(reached, reverse=True)
    assert reached[1] < 0.2 < 0.8 < reached[0]


def test_ranks_grow_with_the_match() -> None:
    ranks = [rank(length) for length in range(2, 300)]
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(len(EXPECTED)))


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_plain_steps_take_longer_behind_a_verified_one_is_its_doing(
    streams: int, noise: float
) -> None:
    """Now and then a few guesses come true: not enough for three steps that are recorded anew."""
    desk = Desk(
        [names] * streams,
        lambda _matched: 0.6,
        cost=small_model_on_a_gpu,
        recorded=True,
        noise=noise,
    )
    desk.answers(300)
    assert desk.answers(3000) > 0.97


def test_long_copies_pay_for_what_is_recorded_anew() -> None:
    desk = Desk([copying], cost=small_model_on_a_gpu, recorded=True)
    desk.answers(300)
    assert desk.answers(300) > 2.5
