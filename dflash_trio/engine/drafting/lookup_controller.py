"""How many tokens to guess where guessing itself costs little, as from the text so far.

Every step is asked about, and what is not verified is judged all the same, by what comes next. So
chances are known without trying, by how long a match is: a name that came before says little of the
next word, and a sentence that has been copied so far goes on. Each sequence has chances of its own,
which begin as the model's.

Sequences get as many guesses as each deserves: the surest of all first, as long as there are more
tokens a second to be expected with them than without.

What chances were wrong by is kept on an account, in seconds: losses are owed to the plain steps,
and nothing is verified while more than ``MOST_OWED`` of them is. Steps count there as what their
size is known to take: a machine that was busy for a while says nothing of the guesses. It may say
too much of what batches of their size take, though: so guesses that are sure are tried now and
then although they seem not to pay, as far as the account has what that seems to cost.

Pure, like its sibling for drafts that cost something (``controller``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .controller import (
    ALLOWANCE,
    FIRST_PAUSE,
    FREE_TRIES,
    GAIN_TO_BEGIN,
    GAIN_TO_GO_ON,
    LONGEST_PAUSE,
    MOST_OWED,
    MOST_SAVED,
)
from .match_chances import EXPECTED, MatchChances
from .step_costs import StepCosts

_SURE = 0.7
"""How likely a guess has to be for a batch that is larger than any before, or for a try."""
_HOPELESS = 0.05
"""A guess that is less likely to come is not looked at."""


class LookupController:
    """Parameters as of ``controller.DraftController``."""

    def __init__(
        self, longest: int, *, verify_limit: int, partitioned: bool, builds_graphs: bool = False
    ) -> None:
        self._longest = longest
        self._limit = verify_limit
        self._step_costs = StepCosts(partitioned=partitioned, builds_graphs=builds_graphs)
        self._chances = MatchChances(fading=0.98, weight=16.0)
        self._account = 0.0
        self._on = False
        self._free = FREE_TRIES
        self._pause = FIRST_PAUSE
        self._wait = 0

    def new_acceptance(self) -> MatchChances:
        """For a sequence that begins."""
        return MatchChances(fading=0.9, weight=8.0)

    def choose(self, sequences: Sequence[MatchChances]) -> int:
        """How many tokens to look up for each of the sequences of a step."""
        return min(self._longest, max(0, self._limit - len(sequences)))

    def keep(
        self, lengths: Sequence[int], matched: Sequence[int], sequences: Sequence[MatchChances]
    ) -> list[int]:
        """How many guesses of each to verify. ``matched``: tokens, for those that have any."""
        count = len(sequences)
        none = [0] * count
        if self._step_costs.plain_is_due(count) or not any(lengths):
            return none
        plain = self._step_costs.estimate(count)
        if self._account < -MOST_OWED * plain:
            self._on = False
            return none
        expected = self._chances.chances(EXPECTED)
        reached: list[tuple[float, int]] = []
        for place, length in enumerate(lengths):
            if length:
                chances = sequences[place].reach(expected, matched[place], length)
                reached += [(chance, place) for chance in chances if chance > _HOPELESS]
        # Stable, and no guess is surer than those before it in its sequence.
        reached.sort(key=_chance, reverse=True)
        best, gain = self._best(reached, count, plain)
        enough = GAIN_TO_GO_ON if self._on else GAIN_TO_BEGIN
        self._on = gain > enough
        if self._on:
            self._pause, self._wait = FIRST_PAUSE, 0
        else:
            best = self._try(reached, count, plain)
        kept = none
        for _, place in reached[:best]:
            kept[place] += 1
        return kept

    def _try(self, reached: Sequence[tuple[float, int]], count: int, plain: float) -> int:
        """How many guesses to try although none seem to pay; mostly 0."""
        sure = sum(chance >= _SURE for chance, _ in reached)
        if not sure:
            return 0
        if self._wait:
            self._wait -= 1
            return 0
        sure = min(sure, self._most(count))
        counts = _counts([place for _, place in reached[:sure]], count)
        cost = self._step_costs.of_step(count, counts, boldly=True)
        committed = count + sum(chance for chance, _ in reached[:sure])
        if not self._free and self._account < cost - committed / count * plain:
            return 0
        self._free = max(0, self._free - 1)
        self._wait = self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return sure

    def _most(self, count: int) -> int:
        """Guesses in a batch that is at most twice as large as any measured."""
        return min(self._limit, max(2 * self._step_costs.largest, count + 1)) - count

    def _best(
        self, reached: Sequence[tuple[float, int]], count: int, plain: float
    ) -> tuple[int, float]:
        """How many of these guesses are best, and how many times as fast as none that is."""
        # What is twice as large as anything measured is thought to take no longer: so what it takes
        # is known after a few steps.
        largest = self._step_costs.largest
        lengths = [0] * count
        counts: list[int] = []
        best, gain, committed = 0, 0.0, float(count)
        for number, (chance, place) in enumerate(reached[: self._most(count)], 1):
            if count + number > largest + 1 and chance < _SURE:
                break
            at = lengths[place]
            lengths[place] += 1
            if at == len(counts):
                counts.append(0)
            counts[at] += 1
            committed += chance
            seconds = self._step_costs.of_step(count, counts, boldly=True)
            faster = committed / count * plain / seconds if seconds else 0.0
            if faster > gain:
                best, gain = number, faster
        return best, gain

    def watched(self, sequence: MatchChances, matched: int, judged: int, right: int) -> None:
        """Of guesses of a step, verified or not, ``judged`` had their turn and ``right`` came."""
        self._chances.add(matched, judged, right)
        sequence.add(matched, judged, right)

    def observe(
        self,
        lengths: Sequence[int],
        judged: Sequence[tuple[MatchChances, int, Sequence[int]]],
        *,
        committed: int,
        asked: int,
        draft_seconds: float,
        step_seconds: float,
        caught_up_seconds: float = 0.0,
    ) -> None:
        """As of ``controller.DraftController``."""
        count = len(lengths)
        plain = self._step_costs.estimate(count)
        self._account += ALLOWANCE * plain
        if judged:
            longest = max(lengths)
            counts = [sum(n > place for n in lengths) for place in range(1, longest)]
            thought = self._step_costs.of_step(count, counts, boldly=True)
            self._account += committed / count * plain - thought
        self._account = min(max(self._account, -2 * MOST_OWED * plain), MOST_SAVED * plain)
        self._step_costs.observe_step(lengths, step_seconds, judged=bool(judged))

    def took(self, seconds: float) -> None:
        """Nothing: what lies between steps is the same with guesses and without, about."""

    def missed(self, sequences: int, seconds: float) -> None:
        """See ``drafter.Controller``. It saves up for tries all the same."""
        most = MOST_SAVED * self._step_costs.estimate(sequences)
        self._account = min(self._account + ALLOWANCE * seconds, most)


def _counts(places: Sequence[int], count: int) -> list[int]:
    """Sequences that have a first guess, a second, ... if these are whose guesses they are."""
    lengths = [places.count(place) for place in range(count)]
    return [sum(n > at for n in lengths) for at in range(max(lengths))]


def _chance(guess: tuple[float, int]) -> float:
    return guess[0]
