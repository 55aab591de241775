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
    """A decode that has begun and has not returned, or a draft at work."""

    began: float
    """Seconds, on the clock."""
    tokens: int
    """Of the decode; 0: it is the draft."""
    limit: float
    """Seconds it may take before it counts as stalled."""

    def __str__(self) -> str:
        return f"a step of {self.tokens} tokens" if self.tokens else "its draft"


class StepClock:
    """One engine's steps: written by its thread, read by others.

    Each attribute is replaced whole, so a reader sees a step or no step, never half of one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.under_way: StepUnderWay | None = None
        self._clock = clock
        self._slowest: float | None = None  # seconds per token
        self._slowest_draft: float | None = None  # seconds in one go

    def begin(self, tokens: int) -> None:
        """A step of so many tokens goes to the device now."""
        limit = STALL_UNMEASURED
        if self._slowest is not None:
            limit = max(STALL_FLOOR, STALL_FACTOR * tokens * self._slowest)
        self.under_way = StepUnderWay(self._clock(), tokens, limit)

    def begin_draft(self) -> None:
        """The draft is asked or told something now, between two steps."""
        limit = STALL_UNMEASURED
        if self._slowest_draft is not None:
            limit = max(STALL_FLOOR, STALL_FACTOR * self._slowest_draft)
        self.under_way = StepUnderWay(self._clock(), 0, limit)

    def end(self) -> None:
        """It has returned. What stalled says nothing about the rate and is not measured."""
        step, self.under_way = self.under_way, None
        if step is None:
            return
        taken = self._clock() - step.began
        if taken > step.limit:
            return
        if step.tokens:
            self._slowest = max(self._slowest or 0.0, taken / step.tokens)
        else:
            self._slowest_draft = max(self._slowest_draft or 0.0, taken)

    def stalled(self, stood_still: StandingStill | None = None) -> StepUnderWay | None:
        """The step under way, if it has taken longer than it may, apart from the time in which
        this process ``stood_still``."""
        step = self.under_way
        if step is None:
            return None
        taken = self._clock() - step.began
        if stood_still is not None:
            taken -= stood_still.within(step, taken)
        return step if taken > step.limit else None


class StandingStill:
    """How long a process was stopped, as somebody sees who looks at its steps again and again and
    comes late: a signal, a container or a virtual machine halted it, and its step with it."""

    def __init__(self) -> None:
        self._late = 0.0
        self._step: StepUnderWay | None = None
        self._seconds = 0.0

    def looked(self, late: float) -> None:
        """Now, and so many seconds later than was meant."""
        self._late = late

    def within(self, step: StepUnderWay, taken: float) -> float:
        """Seconds of a step that has ``taken`` so many until now. Once for each look."""
        if step is not self._step:
            self._step, self._seconds = step, 0.0
        self._seconds += min(self._late, taken)
        return self._seconds
