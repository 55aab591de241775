"""Who may call: API keys, and the guard of a local server against a web page's requests."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from attrs import field, frozen
from werkzeug.datastructures import Headers

from ..net.listener import is_loopback
from .cors import CorsPolicy, is_preflight
from .error_responses import ErrorAnswer, http_answer

OPEN_PATHS = frozenset({"", "/health", "/v1/health"})
PAGE_FILES = "/page/"
"""Where the status page's own files are: the same for everybody, and without any data."""

LOCALHOST = "localhost"


def _comparable(host: str) -> str:
    return host.lower().rstrip(".")


def is_open_path(path: str) -> bool:
    """What needs no key, and answers before the models are loaded."""
    return path.rstrip("/") in OPEN_PATHS or path.startswith(PAGE_FILES)


@frozen
class AccessPolicy:
    """The listener's rules.

    ``local_only``: bound to loopback, so foreign pages are refused. ``own_name``: what the operator
    called that address, which is local then too; empty: nothing.
    """

    api_keys: tuple[bytes, ...]
    local_only: bool
    cors: CorsPolicy = field(factory=CorsPolicy)
    own_name: str = field(default="", converter=_comparable)

    def refusal(self, method: str, path: str, headers: Headers) -> ErrorAnswer | None:
        """Why a request is not let in; ``None`` when it is."""
        if self.api_keys:
            # A browser sends no key with a preflight, and learns nothing by it but the rules.
            preflight = is_preflight(method, headers)
            if preflight or is_open_path(path) or self._has_key(headers):
                return None
            return http_answer(
                401,
                "This server wants an API key: send it as Authorization: Bearer KEY or as "
                "x-api-key: KEY.",
                {"www-authenticate": "Bearer"},
            )
        if self.local_only:
            # DNS rebinding: a page of some site, whose name now resolves to this machine.
            host, origin = headers.get("Host"), headers.get("Origin")
            # An HTTP/1.0 client may send none, which arrives as an empty one. Browsers always do.
            if host and not self._is_local(f"//{host}"):
                return http_answer(
                    403, "This server answers to local host names only; set an API key to open it."
                )
            if origin is not None and not (self._is_local(origin) or self.cors.names(origin)):
                return http_answer(403, "Requests of web pages from elsewhere are not answered.")
        return None

    def _is_local(self, url: str) -> bool:
        try:
            name = _comparable(urlsplit(url).hostname or "")
        except ValueError:
            return False
        return name != "" and (name in (LOCALHOST, self.own_name) or is_loopback(name))

    def _has_key(self, headers: Headers) -> bool:
        """Compared as bytes, each with every key, in time that does not tell where they differ."""
        offered: list[str] = []
        authorization = headers.get("Authorization")
        if authorization is not None:
            scheme, _, credential = authorization.partition(" ")
            if scheme.lower() == "bearer":
                offered.append(credential.strip())
        api_key = headers.get("X-Api-Key")
        if api_key is not None:
            offered.append(api_key)
        granted = False
        for text in offered:
            # Header values reach us decoded as latin-1: this restores the bytes that were sent.
            raw = text.encode("latin-1", "replace")
            for key in self.api_keys:
                granted |= hmac.compare_digest(raw, key)
        return granted
