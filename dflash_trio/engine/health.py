"""How an engine is, and the only ways that may change."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import define


class Health(Enum):
    LOADING = "loading"
    """Not loaded yet."""
    HEALTHY = "healthy"
    """Takes requests."""
    STALLED = "stalled"
    """Takes none, for a reason that may pass."""
    LOST = "lost"
    """Takes none any more."""


LAWFUL: Mapping[Health, frozenset[Health]] = {
    Health.LOADING: frozenset({Health.HEALTHY, Health.LOST}),
    Health.HEALTHY: frozenset({Health.STALLED, Health.LOST}),
    Health.STALLED: frozenset({Health.HEALTHY, Health.LOST}),
    Health.LOST: frozenset(),
}
"""From each state, the states that may follow. The whole machine."""


@define
class EngineHealth:
    """One engine's state. Owned by its client, on the event loop."""

    state: Health = Health.LOADING
    reason: str | None = None
    """Why it takes no requests: the first reason since it last did; ``None`` while it is well, and
    while it loads."""

    def enter(self, state: Health, reason: str | None = None) -> bool:
        """Go on to ``state`` if that may follow. ``False``, and nothing has changed, if it may not:
        what is reported of an engine may cross with its end, or come twice."""
        if state not in LAWFUL[self.state]:
            return False
        self.state = state
        self.reason = None if state is Health.HEALTHY else self.reason or reason
        return True
