"""The status page at ``/``: a shell, and the few files that it is made of. No data.

The page asks the same routes as any client for what it shows, with a key where one is wanted. So
its files may be had by everybody, and never differ but from one version of the server to the next:
the address of each has a digest of all in it, and browsers may keep it for good.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from quart import Response
from werkzeug.exceptions import NotFound

from .access import PAGE_FILES

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SHELL = "index.html"

SECURITY_HEADERS = {
    # Only the page's own files, only calls to its own server, and no text is ever taken for HTML:
    # what models and clients write can do nothing here.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class StatusPage:
    """The page, read once. ``keyed``: whether the server wants keys, which the page is told so
    that it can ask for one before it is refused."""

    def __init__(self, *, keyed: bool) -> None:
        folder = resources.files(__package__) / "page"
        files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(hashlib.sha256(files[name]).digest())
        self.version = digest.hexdigest()[:16]
        # Relative, so that the page works behind a proxy that has put it under another path.
        place = f"{PAGE_FILES.strip('/')}/{self.version}"
        text = files.pop(_SHELL).decode()
        text = text.replace("{{files}}", place).replace("{{keyed}}", str(keyed).lower())
        self._shell = text.encode()
        self._files = {name: (raw, _TYPES[name.rpartition(".")[2]]) for name, raw in files.items()}

    def shell(self) -> Response:
        """The page itself. Not kept by browsers: it names the files of this version."""
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache"}
        return Response(self._shell, 200, headers, content_type="text/html; charset=utf-8")

    def file(self, version: str, name: str) -> Response:
        """One of its files. Raises NotFound, for those of other versions too."""
        if version != self.version or name not in self._files:
            raise NotFound
        raw, content_type = self._files[name]
        keep = "public, max-age=31536000, immutable"
        headers = {**SECURITY_HEADERS, "cache-control": keep}
        return Response(raw, 200, headers, content_type=content_type)
