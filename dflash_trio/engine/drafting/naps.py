"""When a draft need not look at what its model computes.

A draft that reads its model's layers, or looks each token up, costs something in each step, whether
anything is guessed or not: on a fast device a tenth of a small model's step, for copying what goes
into layers to the host, and for what Python does beside. So it has to win at least that. While it
is awake, what its guesses win and lose is counted; where that is less than what looking takes, the
draft naps for some steps, and is watched again for some, by turns. What it missed it may not know,
so it guesses worse for a while when it wakes.

What looking takes is the difference between plain steps with it and without, from the beginning of
one to that of the next. So each draft but one that wins much naps for a short while, to find out,
and now and then again.
"""

from __future__ import annotations

from attrs import define, field

AWAKE = 128
"""Steps without prompts in which it shows whether guesses are worth it."""
SUSPECTED = 0.15
"""What looking may take, of a step, as long as nothing is known."""
DEAR, TOO_DEAR = 0.01, 0.02
"""Of a step: looking that takes less is not worth a nap, unless guesses lose so much with it that
it is not little after all."""
PROBE, FIRST_NAP, LONGEST_NAP = 64, 512, 2048
"""Steps. Where guesses begin to be worth it, that is found so much later at the worst."""
STALE = 64
"""Times awake in a row after which it is looked again what looking takes."""
_SETTLING = 8
"""Steps that say nothing, after it fell asleep or woke: llama.cpp plans its memory anew."""
_PLAIN = 16
"""Steps that are kept free of guesses then, if it is not known yet what looking takes."""
_BEHIND = 2
"""Plain steps behind one with guesses say nothing: they may take longer for that."""
_WEIGHT = 0.05
"""Of a new measurement, where there are many."""
_OUTLIER = 1.5
"""A step counts as no more than this many times what was known."""


@define
class _Average:
    """Of plain steps, in seconds, and how many there were."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.count += 1
        self.seconds += max(_WEIGHT, 1 / self.count) * (seconds - self.seconds)


@define
class Naps:
    """Pure: it is told of each step, and reads no clock."""

    asleep: bool = False
    _steps: int = 0
    _won: float = 0.0
    _seconds: float = 0.0
    _next: int = PROBE
    _since_guesses: int = 0
    _awake_in_a_row: int = 0
    # By the number of sequences.
    _watched: dict[int, _Average] = field(factory=dict)
    _alone: dict[int, _Average] = field(factory=dict)

    def step(self, sequences: int, seconds: float, *, guessed: bool, won: float) -> None:
        """A step of so many ``sequences`` without prompts took ``seconds``, with all that comes
        before the next one. ``guessed``: it had guesses. ``won``: by them, and lost where that is
        negative: guesses asked for in vain are lost, too."""
        self._steps += 1
        self._since_guesses = 0 if guessed else self._since_guesses + 1
        if self._since_guesses > _BEHIND and self._steps > _SETTLING:
            table = self._alone if self.asleep else self._watched
            plain = seconds + won  # without what was asked for in vain, which is counted already
            if plain > 0:  # or else the clock is too coarse to tell
                table.setdefault(sequences, _Average()).add(plain)
        if self.asleep:
            if self._steps >= self._next:
                known = self._next != PROBE
                self._next = min(2 * self._next, LONGEST_NAP) if known else FIRST_NAP
                self._begin(asleep=False)
            return
        self._won += won
        self._seconds += seconds
        if self._steps < AWAKE:
            return
        share = self._share()
        takes = SUSPECTED if share is None else share
        costs = takes * self._seconds - self._won
        naps = costs > (0 if takes > DEAR else TOO_DEAR * self._seconds)
        self._awake_in_a_row = 0 if naps else self._awake_in_a_row + 1
        if share is None:
            self._next = PROBE
        elif not naps:
            self._next = FIRST_NAP
            if self._awake_in_a_row >= STALE:
                self._alone.clear()
                self._watched.clear()
        self._begin(asleep=naps)

    @property
    def wants_plain(self) -> bool:
        """It has just woken, and knows nothing yet of what could follow; or it woke to find out
        what looking takes, and nothing should be guessed for that."""
        if self.asleep or not self._alone:
            return False
        woke = not self._awake_in_a_row and not self._steps
        return woke or (self._steps < _SETTLING + _PLAIN and self._share() is None)

    def _begin(self, *, asleep: bool) -> None:
        self.asleep = asleep
        self._steps = 0
        self._won = self._seconds = 0.0

    def _share(self) -> float | None:
        """What looking takes of a plain step; ``None``: nothing is known of it."""
        both = [(self._watched[n], slept) for n, slept in self._alone.items() if n in self._watched]
        steps = sum(slept.count for _, slept in both)
        if not steps:
            return None
        saved = sum(slept.count * (1 - slept.seconds / awake.seconds) for awake, slept in both)
        return saved / steps
