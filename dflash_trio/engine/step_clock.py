"""When a step has taken too long to be just slow."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import frozen

STALL_FLOOR = 60.0
"""Seconds that no step is called stalled before."""
STALL_FACTOR = 10.0
"""How many times what its tokens took at the slowest measured rate a step may take."""
STALL_UNMEASURED = 600.0
"""Seconds before a step counts as stalled while no step has been measured yet."""


@frozen(eq=False)
class StepUnderWay:
    """A decode that has begun and has not returned."""

    began: float
    """Seconds, on the clock."""
    tokens: int
    limit: float
    """Seconds it may take before it counts as stalled."""


class StepClock:
    """One engine's steps: written by its thread, read by others.

    Each attribute is replaced whole, so a reader sees a step or no step, never half of one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.under_way: StepUnderWay | None = None
        self._clock = clock
        self._slowest: float | None = None  # seconds per token

    def begin(self, tokens: int) -> None:
        """A step of so many tokens goes to the device now."""
        limit = STALL_UNMEASURED
        if self._slowest is not None:
            limit = max(STALL_FLOOR, STALL_FACTOR * tokens * self._slowest)
        self.under_way = StepUnderWay(self._clock(), tokens, limit)

    def end(self) -> None:
        """It has returned. One that stalled says nothing about the rate and is not measured."""
        step, self.under_way = self.under_way, None
        if step is not None and step.tokens:
            taken = self._clock() - step.began
            if taken <= step.limit:
                self._slowest = max(self._slowest or 0.0, taken / step.tokens)

    def stalled(self) -> StepUnderWay | None:
        """The step under way, if it has taken longer than it may."""
        step = self.under_way
        if step is not None and self._clock() - step.began > step.limit:
            return step
        return None
