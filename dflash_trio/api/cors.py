"""Which web pages may read the answers: cross-origin resource sharing, for named origins only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import field, frozen
from werkzeug.datastructures import Headers

ANY_ORIGIN = "*"
METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED = (
    "x-request-id, request-id, x-dflash-model, x-dflash-route, x-dflash-waited, "
    "x-dflash-fallback, retry-after"
)
"""Headers of ours that a page's script may read."""
MAX_AGE = 7200
"""Seconds that a browser may remember a preflight; none remembers one for longer."""

_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]+", re.ASCII)


def _comparable(origin: str) -> str:
    """As browsers write it: in small letters, without the scheme's own port."""
    origin = origin.strip().lower()
    scheme, _, host = origin.partition("://")
    own_port = {"https": ":443", "http": ":80"}.get(scheme, "")
    return f"{scheme}://{host.removesuffix(own_port)}" if host else origin


def _all_comparable(origins: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(_comparable, origins))


@frozen
class CorsPolicy:
    """``origins``: those that the operator named. ``*`` among them is every origin."""

    origins: frozenset[str] = field(default=(), converter=_all_comparable)

    def names(self, origin: str | None) -> bool:
        """Whether pages of an origin may call."""
        if origin is None:
            return False
        return ANY_ORIGIN in self.origins or _comparable(origin) in self.origins

    def headers(self, method: str, request: Headers) -> Mapping[str, str]:
        """What goes with every answer to this request, good or bad."""
        if not self.origins:
            return {}
        everyone = ANY_ORIGIN in self.origins
        preflight = is_preflight(method, request)
        vary = [] if everyone else ["Origin"]
        if preflight:
            vary += ["Access-Control-Request-Method", "Access-Control-Request-Headers"]
        headers = {"vary": ", ".join(vary)} if vary else {}
        origin = request.get("Origin")
        if origin is None or not self.names(origin):
            return headers
        # Never with credentials: keys travel in headers that a page has to set by itself.
        headers["access-control-allow-origin"] = ANY_ORIGIN if everyone else origin
        if not preflight:
            headers["access-control-expose-headers"] = EXPOSED
            return headers
        headers["access-control-allow-methods"] = METHODS
        headers["access-control-max-age"] = str(MAX_AGE)
        wanted = request.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["access-control-allow-headers"] = wanted
        return headers


def is_preflight(method: str, request: Headers) -> bool:
    """Whether a browser asks what it may do, before it does it."""
    return (
        method == "OPTIONS" and "Origin" in request and "Access-Control-Request-Method" in request
    )
