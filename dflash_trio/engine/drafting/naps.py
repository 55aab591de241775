"""When a draft need not look at what its model computes.

A draft that reads its model's layers, or looks each token up, costs something in each step, whether
anything is guessed or not. A guess that does not pay costs more, and not only where it is made: a
GPU records its graphs anew for a batch of another shape, and again for the plain one behind it. No
sum of parts that are measured one by one has all of that. So the whole is compared: what steps take
with a draft that is awake, for the tokens that they commit, and what plain steps take while it naps
and is not in the way at all.

What it wins or loses so is kept on an account, in seconds, which gets ``ALLOWANCE`` of all time.
Where that is overdrawn the draft naps, until it has saved enough to lose some plain steps
(``Stakes``). So one that loses much is awake for a moment now and then, one that loses little for
longer, and one that wins all the time, but for short naps that tell what plain steps take now. Each
nap begins with such a look: a machine that became slower, and not the draft, may be what the time
was lost by.

Waking is dear where a device plans its memory anew for it: a GPU takes ten steps' time for it, and
as much again until it has recorded the new ones.
What that has cost is lost, whatever is done next. So a draft that wins by now stays awake, though
the account is overdrawn, as long as its stakes allow.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field, frozen

FIRST_AWAKE = 96
"""Steps without prompts at the beginning, when nothing is known."""
PROBE = 64
"""Steps asleep that tell what plain steps take."""
ALLOWANCE = 0.01
"""Of the time, what may be lost."""
PATIENCE = 128
"""Steps that a draft which may wake waits for an answer to begin: of one whose beginning it has
missed it knows less."""
STALE_SOON, STALE = 1024, 8192
"""Steps awake after which plain ones are looked at again: of a draft that wins less than
``MUCH`` of the time, and of any other."""
MUCH = 0.05
UNTOLD = 7
"""Steps of a long nap that are not looked at, for one that is."""
_SETTLING = 8
"""Steps that say nothing of others, after falling asleep or waking: llama.cpp plans its memory."""
_LATELY = 32
"""Steps."""
_BEHIND = 2
"""Plain steps behind one with guesses that may take longer for that."""
_ENOUGH = 16
"""Steps of so many sequences, after which it is known what they take."""
_UNKNOWN = 32
"""Steps awake of which that is not known."""
_WEIGHT = 0.03
"""Of a new measurement, where there are many."""
_OUTLIER, _MOST = 1.5, 16.0
"""A plain step counts as no more than this many times what was known, since what is slow now and
then is slow with and without a draft, and no number of steps makes it even; one with guesses, or
right behind them, as no more than the other."""


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


@frozen
class Stakes:
    """What may be lost at a time, in plain steps."""

    initial: float = 4
    """At first, beside the steps in which nothing is known."""
    to_try: float = 16
    """Saved up before a draft that lost wakes."""
    most_saved: float = 32
    """Where guesses cease to be worth it, that is found once they have lost this much."""
    least_awake: int = 32
    """Steps. The first ones take longer for the waking itself."""
    most_owed: float = 0
    """By a draft that wins by now."""


HIGH_STAKES = Stakes(initial=64, to_try=32, most_saved=64, least_awake=64, most_owed=64)
"""For a draft that guesses all the time: some texts it knows well, and loses with others, and it is
told by several answers what it is worth."""


@define
class Naps:
    """Pure: it is told of each step, and reads no clock."""

    stakes: Stakes = Stakes()
    asleep: bool = False
    _steps: int = 0
    """Since it fell asleep or woke."""
    _behind: int = _BEHIND
    """Plain steps since one with guesses, as far as they are told apart."""
    _saved: float | None = None
    """The account. ``None``: nothing is known yet."""
    _losing: bool = False
    """It naps since that was overdrawn, and not only to look at plain steps."""
    _waited: int = 0
    """Steps for an answer to begin."""
    _won: float = 0.0
    _seconds: float = 0.0
    """What was won in the time awake, and what time that was."""
    _lately: deque[float] = field(factory=lambda: deque(maxlen=_LATELY))
    """What the latest steps have won, after the waking."""
    _unknown: int = 0
    """Steps since it woke of which it is not known what they take without it."""
    _alone: dict[int, _Average] = field(factory=dict)
    """Plain steps asleep, by the number of sequences."""
    _before: dict[int, tuple[float, int]] = field(factory=dict)
    """Seconds and counts of these when it fell asleep."""

    def step(self, sequences: int, seconds: float, *, committed: int, guessed: bool) -> None:
        """A step of so many ``sequences`` without prompts took ``seconds``, with all that comes
        before the next one, and ``committed`` so many tokens. ``guessed``: it had guesses. It is
        taken for the ``untold`` ones before it, too."""
        times = 1 + self.untold
        self._steps += times
        self._behind = 0 if guessed else min(self._behind + 1, _BEHIND)
        plain = self._plain(sequences)
        if plain is not None:
            ordinary = self._behind == _BEHIND and self._steps > _SETTLING
            seconds = min(seconds, (_OUTLIER if ordinary else _MOST) * plain)
        self._save(ALLOWANCE * seconds * times)
        if self.asleep:
            self._sleep(sequences, seconds, plain)
        else:
            self._watch(seconds, None if plain is None else committed / sequences * plain - seconds)
        if plain is not None and self._saved is not None:
            self._saved = min(self._saved, self.stakes.most_saved * plain)

    @property
    def untold(self) -> int:
        """Steps of this nap that it need not be told of, between two that it is."""
        return UNTOLD if self.asleep and self._steps >= PROBE else 0

    def begins(self) -> None:
        """An answer begins, of which nothing is computed yet."""
        if self.asleep and self._may_wake:
            self._wake()

    # ------------------------------------------------------------------------------ asleep

    def _sleep(self, sequences: int, seconds: float, plain: float | None) -> None:
        if self._steps > _SETTLING:
            self._alone.setdefault(sequences, _Average()).add(seconds)
        elif plain is not None:
            self._save(plain - seconds)
        if self._steps == PROBE:
            self._judge_again()
        if self._may_wake:
            self._waited += 1 + self.untold
            if not self._losing or self._waited >= PATIENCE:
                self._wake()

    def _judge_again(self) -> None:
        """Whether it was the draft that lost, now that it is known what plain steps take: so what
        they took meanwhile is halfway between what they did before and do now."""
        if self._saved is None:
            self._saved = self.stakes.initial * self._usual
            return
        before = after = 0.0
        for sequences, (seconds, count) in self._before.items():
            more = self._alone[sequences].count - count
            before += more * seconds
            after += more * self._alone[sequences].seconds
        if not before:
            return
        difference = (self._won + self._seconds) * (after / before - 1.0) / 2
        self._save(difference)
        if self._losing and self._won + difference >= -ALLOWANCE * self._seconds:
            self._losing = False
            self._saved = max(self._saved, self.stakes.to_try * self._usual)

    @property
    def _may_wake(self) -> bool:
        if self._steps < PROBE or self._saved is None:
            return False
        return not self._losing or self._saved >= self.stakes.to_try * self._usual

    def _wake(self) -> None:
        self.asleep = False
        self._steps = self._unknown = self._waited = 0
        self._won = self._seconds = 0.0
        self._lately.clear()

    @property
    def _usual(self) -> float:
        """Seconds of a plain step, on an average."""
        steps = sum(each.count for each in self._alone.values())
        return sum(each.count * each.seconds for each in self._alone.values()) / steps

    # ------------------------------------------------------------------------------- awake

    def _watch(self, seconds: float, won: float | None) -> None:
        if won is None:
            self._unknown += 1
        else:
            self._won += won
            self._seconds += seconds
            self._save(won)
            if self._steps > _SETTLING:
                self._lately.append(won)
        if self._saved is None:
            if self._steps >= FIRST_AWAKE:
                self._nap(losing=False)
        elif self._saved < 0 and self._steps >= self.stakes.least_awake and not self._wins_by_now:
            self._nap(losing=True)
        elif self._unknown >= _UNKNOWN or self._is_stale:
            self._nap(losing=False)

    @property
    def _wins_by_now(self) -> bool:
        assert self._saved is not None
        return self._saved >= -self.stakes.most_owed * self._usual and sum(self._lately) > 0

    @property
    def _is_stale(self) -> bool:
        if self._steps >= STALE:
            return True
        return self._steps >= STALE_SOON and self._won < MUCH * self._seconds

    def _nap(self, *, losing: bool) -> None:
        self.asleep = True
        self._losing = losing
        self._steps = 0
        self._before = {n: (each.seconds, each.count) for n, each in self._alone.items()}

    def _save(self, seconds: float) -> None:
        if self._saved is not None:
            self._saved += seconds

    def _plain(self, sequences: int) -> float | None:
        """Seconds of a plain step without it; ``None``: not known."""
        exact = self._alone.get(sequences)
        if exact is not None and exact.count >= _ENOUGH:
            return exact.seconds
        known = [n for n, each in self._alone.items() if each.count >= _ENOUGH]
        below = max((n for n in known if n < sequences), default=None)
        above = min((n for n in known if n > sequences), default=None)
        if below is None or above is None:
            return None
        low, high = self._alone[below].seconds, self._alone[above].seconds
        return low + (high - low) * (sequences - below) / (above - below)
