"""The latest requests for an answer, for people to look at: how each ended and what it took.

No prompt and no answer, and not more of them than fit a page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

KEPT = 20
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Of the routes, as the API's description has them, those whose requests are kept."""
SHOWN = (
    "request_id",
    "route",
    "model",
    "outcome",
    "status",
    "queue_s",
    "ttft_s",
    "total_s",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "fallback",
)
"""Of the fields of a request's line in the log, those that are shown; named as there."""


class RecentRequests:
    """A ring of the last ``KEPT``, written on the event loop. ``clock``: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._requests: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def wants(self, route: str) -> bool:
        """Whether requests of a route are kept."""
        return route in GENERATING

    def add(self, fields: Mapping[str, Any]) -> None:
        """``fields``: those of its line, of a request that is over now."""
        shown = {name: fields[name] for name in SHOWN}
        self._requests.appendleft({**shown, "ended_at": round(self._clock(), 3)})

    def newest_first(self) -> list[dict[str, Any]]:
        """A copy of the list; its entries are never changed."""
        return list(self._requests)
