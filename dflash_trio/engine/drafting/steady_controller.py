"""How many tokens to guess where a device records what it computes, and replays it.

Theory of operation. A GPU replays a step of the shape of the one before. One of another shape is
computed without what was recorded, as is the one behind it, and the third records anew: a single
guess costs as much as ten plain steps and more, while guesses that go on and on cost half a step
each. So what has to be decided is not a number for each step, but whether to guess all the time,
and how many tokens, the same in each step.

For each number of sequences, which makes other shapes, it is measured what a plain step takes and
one with so many guesses, a few steps after it became that; how many tokens such a step commits
follows from the chances of acceptance, which every step with guesses tells of its places. A number
that is not measured has a run of ``RUN`` steps; the best is kept on for as long as it is better
than none. Where guessing lost, it is tried again after a pause, which doubles each time, or when an
answer begins, if by what is known of its kind it should pay.

It bounds no losses: that is what naps are for, which compare whole steps.

Pure: it is told what was measured, reads no clock, and decides the same again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field

from .acceptance import Acceptance, learn

NUMBERS = (3, 5, 7)
"""Of guesses for each sequence, beside as many as there are. With its last token, seven make eight,
and up to eight columns a GPU multiplies by a quick way of its own."""
FIRST = 5
"""The number that is tried first, or the next smaller one."""
SETTLING = 3
"""Steps of one shape that tell nothing of its time."""
ENOUGH = 8
"""Of others, after which that is known."""
SAMPLES = 15
"""The latest ones, whose median it is."""
RUN = 24
"""Steps of a try."""
CHECK = 16
"""Steps after which what is done is thought over."""
GAIN_TO_BEGIN, GAIN_TO_GO_ON = 1.05, 0.98
"""Times the plain rate that is to be expected of guessing."""
BETTER = 1.03
"""Times the rate, for which another number of guesses takes over."""
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
"""Steps between tries where guessing lost."""
FIRST_LOOK, LONGEST_LOOK = 256, 8192
"""Steps with guesses before another number has a try that might be better, and between the next
ones."""


@define
class _Times:
    """Seconds of the latest steps of one shape."""

    samples: deque[float] = field(factory=lambda: deque(maxlen=SAMPLES))

    def add(self, seconds: float) -> None:
        self.samples.append(seconds)

    @property
    def known(self) -> bool:
        return len(self.samples) >= ENOUGH

    @property
    def seconds(self) -> float:
        return sorted(self.samples)[len(self.samples) // 2]


@define
class _Load:
    """Of one number of sequences, or a range of them."""

    guesses: int = 0
    """What is done now."""
    left: int = 0
    """Steps of it until it is thought over."""
    trying: bool = False
    """It is done to see what it takes, or whether it pays by now."""
    times: dict[int, _Times] = field(factory=dict)
    """By the number of guesses; 0: plain steps."""
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    look: int = FIRST_LOOK
    next_look: int = FIRST_LOOK

    def of(self, guesses: int) -> _Times:
        return self.times.setdefault(guesses, _Times())


class SteadyController:
    """``longest``: tokens that can be guessed in one go, in a tree or one after the other.
    ``verify_limit``: tokens that a batch with guesses has at most. ``acceptance``: how guesses are
    judged."""

    def __init__(
        self,
        longest: int,
        *,
        verify_limit: int,
        acceptance: type[Acceptance] = Acceptance,
    ) -> None:
        self._longest = longest
        self._limit = verify_limit
        self._numbers = sorted({longest, *(n for n in NUMBERS if n < longest)})
        self._new_acceptance = acceptance
        self._acceptance = acceptance(longest, fading=0.99, weight=3.0)
        self._loads: dict[int, _Load] = {}
        self._shape = (0, 0)
        """Sequences and guesses of each, of the latest step; and how many steps had it."""
        self._same = 0
        self._latest: _Load | None = None
        self._measured: _Times | None = None
        """What the step that was observed last is to be counted for."""
        self._begins = False
        """An answer has begun since it was last thought over."""

    def new_acceptance(self) -> Acceptance:
        """For a sequence that begins."""
        self._begins = True
        return self._new_acceptance(self._longest, fading=0.97, weight=12.0)

    # --------------------------------------------------------------------------- decisions

    def choose(self, sequences: Sequence[Acceptance]) -> int:
        """How many tokens to guess for each of the sequences of a step; 0: none."""
        count = len(sequences)
        most = min(self._longest, self._limit // count - 1)
        if most < 1:
            return 0
        load, latest = self._load(count), self._latest
        self._latest = load
        if latest is not None and latest is not load and latest.trying:
            self._give_up(latest)
        if load.left <= 0:
            before = load.guesses
            load.guesses = self._decide(load, sequences, [n for n in self._numbers if n <= most])
            load.trying = load.trying and load.guesses > 0
            load.left = RUN if load.guesses and load.guesses != before else CHECK
            self._begins = False
        load.left -= 1
        return min(load.guesses, most)

    @staticmethod
    def _give_up(load: _Load) -> None:
        """A try is over too soon: where sequences come and go all the time, nothing stays recorded
        for long enough to be worth it."""
        if load.of(load.guesses).known:
            return
        load.trying, load.guesses, load.left = False, 0, 0
        load.pause, load.next_pause = load.next_pause, min(2 * load.next_pause, LONGEST_PAUSE)

    def _load(self, count: int) -> _Load:
        # Exactly, where one more makes a difference.
        kind = count if count <= 4 else 4 + count.bit_length()
        return self._loads.setdefault(kind, _Load())

    def _decide(self, load: _Load, sequences: Sequence[Acceptance], numbers: list[int]) -> int:
        if not load.of(0).known or not numbers:
            return 0
        if load.guesses in numbers and not load.of(load.guesses).known:
            return load.guesses  # its run was cut short, by prompts or others that came and went
        known = [n for n in numbers if load.of(n).known]
        rates = self._rates(load, sequences, known)
        best = max(known, key=lambda n: rates[n], default=0)
        if load.guesses not in rates:
            return self._begin(load, numbers, best, rates.get(best, 0.0))
        if load.trying:
            # Judged by what it is worth at best, with another number.
            load.trying = False
            if rates[best] > GAIN_TO_GO_ON:
                load.next_pause = FIRST_PAUSE
        if rates[best] <= GAIN_TO_GO_ON:
            load.pause, load.next_pause = load.next_pause, min(2 * load.next_pause, LONGEST_PAUSE)
            return 0
        if best != load.guesses and rates[best] > BETTER * rates[load.guesses]:
            return best
        load.look -= CHECK
        if load.look <= 0:
            load.look, load.next_look = load.next_look, min(2 * load.next_look, LONGEST_LOOK)
            other = self._other(load, sequences, numbers, rates[best])
            if other:
                load.trying = True
                return other
        return load.guesses

    def _begin(self, load: _Load, numbers: list[int], best: int, gain: float) -> int:
        """Where nothing is guessed."""
        load.pause -= CHECK
        due = load.pause <= 0
        if gain > GAIN_TO_BEGIN and (due or self._begins):
            return best
        if not due:
            return 0
        load.trying = True
        return best or max((n for n in numbers if n <= FIRST), default=numbers[0])

    def _other(
        self, load: _Load, sequences: Sequence[Acceptance], numbers: list[int], gain: float
    ) -> int:
        """A number of guesses that is not measured, and would be better if it took no longer than
        the largest smaller one that is; of those measured, the one that was so the longest ago is
        measured again if it is not far off. 0: none."""
        rates = self._rates(load, sequences, numbers)
        worth = [n for n in numbers if n != load.guesses and rates[n] > 0.9 * gain]
        unknown = [n for n in worth if not load.of(n).known and rates[n] > gain]
        return max(unknown or worth, key=lambda n: rates[n], default=0)

    def _rates(
        self, load: _Load, sequences: Sequence[Acceptance], numbers: Sequence[int]
    ) -> dict[int, float]:
        """Times the plain rate, by the number of guesses."""
        if not numbers:
            return {}
        longest = max(numbers)
        expected = self._acceptance.chances(longest)
        reached = [0.0] * longest
        for sequence in sequences:
            for place, chance in enumerate(sequence.reach(expected)):
                reached[place] += chance
        count, plain = len(sequences), load.of(0).seconds
        found = {}
        for number in numbers:
            taken = [n for n in self._numbers if n <= number and load.of(n).known]
            seconds = load.of(taken[-1]).seconds if taken else plain
            found[number] = (1 + sum(reached[:number]) / count) * plain / seconds
        return found

    def keep(
        self, lengths: Sequence[int], matched: Sequence[int], sequences: Sequence[Acceptance]
    ) -> list[int]:
        """How many guesses to verify of each sequence's, which are known now: all."""
        return list(lengths)

    # -------------------------------------------------------------------------- experience

    def watched(self, sequence: Acceptance, matched: int, judged: int, right: int) -> None:
        """Nothing: guesses are verified, and judged then."""

    def observe(
        self,
        lengths: Sequence[int],
        judged: Sequence[tuple[Acceptance, int, Sequence[int]]],
        *,
        committed: int,
        asked: int,
        draft_seconds: float,
        step_seconds: float,
        caught_up_seconds: float = 0.0,
    ) -> None:
        """See ``drafter.Controller``."""
        learn(self._acceptance, judged)
        shape = len(lengths), max(lengths) - 1
        self._same = self._same + 1 if shape == self._shape else 1
        self._shape = shape
        whole = min(lengths) == max(lengths) and bool(judged) == bool(asked)
        self._measured = None
        if whole and self._same > SETTLING:
            self._measured = self._load(shape[0]).of(shape[1])

    def took(self, seconds: float) -> None:
        """See ``drafter.Controller``."""
        if self._measured is not None:
            self._measured.add(seconds)
            self._measured = None

    def missed(self, sequences: int, seconds: float) -> None:
        """Nothing: plain steps without a draft take less than those with one that rests."""
