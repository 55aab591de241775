"""What became of all requests so far: counted by route, model and outcome, timed by model.

Written on the event loop, a few times for each request and never for each token. Every key comes
from the server's own words (routes, names of loaded models, outcomes): no client can add one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Literal

from attrs import define, field

from ..generation.histogram import Histogram
from ..routing.policy import FallbackReason
from .recent_requests import RecentRequests

Outcome = Literal["completed", "refused", "unavailable", "failed", "cancelled"]
"""``refused``: what was asked for is wrong (4xx); ``unavailable``: 503; ``failed``: any other
error, in a stream that had begun too; ``cancelled``: the client left, or had it cancelled."""

NO_MODEL = ""
"""The model of a request that got none: in Prometheus's words, it has no such label."""

WAIT_BOUNDS = (
    0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
FIRST_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Timed = defaultdict[str, Histogram]
"""By the model's name. Seconds."""


def _timed(bounds: tuple[float, ...]) -> Timed:
    return defaultdict(partial(Histogram, bounds))


@define(eq=False)
class RequestTotals:
    """One server's requests since it started."""

    recent: RecentRequests = field(factory=RecentRequests)
    requests: Counter[tuple[str, str, Outcome]] = field(factory=Counter)
    """By route, model and outcome; counted when they are over."""
    fallbacks: Counter[tuple[str, FallbackReason]] = field(factory=Counter)
    """By the model that serves in the primary's place; counted with the reservation."""
    queue_wait: Timed = field(factory=lambda: _timed(WAIT_BOUNDS))
    """Waiting for capacity, of those who got some: 0 for who found it free."""
    first_token: Timed = field(factory=lambda: _timed(FIRST_TOKEN_BOUNDS))
    """From a request's arrival to its first token."""
    duration: Timed = field(factory=lambda: _timed(DURATION_BOUNDS))
    """From a request's arrival to its end, of those who got a model."""
