"""When a draft need not look at what its model computes.

A draft that reads its model's layers costs something in each step, whether anything is guessed or
not: on a fast device several hundredths of a small model's step. Where guesses have not been worth
it for long, that is saved: the draft naps for some steps, and is watched again for some, by turns.
What it missed it does not know, so it guesses worse for a while when it wakes.
"""

from __future__ import annotations

from attrs import define

AWAKE = 512
"""Steps without prompts in which it shows whether guesses are worth it."""
LEAST_USED = 0.03
"""Of these steps, the share with guesses that were expected to pay. Tries are none: cheap ones come
to more."""
DEAR = 0.01
"""Of a step: looking that takes less is not worth a nap."""
FIRST_NAP, LONGEST_NAP = 1024, 8192
"""Steps. The longest is ten seconds of a model that takes a millisecond."""
_WEIGHT = 0.05
"""Of a new measurement."""


@define
class Naps:
    """Pure: it is told of each step, and reads no clock."""

    asleep: bool = False
    _steps: int = 0
    _used: int = 0
    _share: float = 0.0
    """What looking takes, of a step."""
    _next: int = FIRST_NAP

    def step(self, *, used: bool, looking: float, seconds: float) -> None:
        """A step without prompts took ``seconds``, and ``looking`` at it some more. ``used``: it
        had guesses, and not for a try."""
        self._steps += 1
        if self.asleep:
            if self._steps >= self._next:
                self._next = min(2 * self._next, LONGEST_NAP)
                self.asleep, self._steps, self._used = False, 0, 0
            return
        self._used += used
        if seconds > 0:
            self._share += _WEIGHT * (min(1.0, looking / seconds) - self._share)
        if self._steps < AWAKE:
            return
        if self._used >= LEAST_USED * self._steps:
            self._next = FIRST_NAP
        else:
            self.asleep = self._share > DEAR
        self._steps = self._used = 0
