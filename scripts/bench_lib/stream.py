"""The client: one streamed answer at a time on a plain connection, at little cost per token.

The generator shares the machine with what it measures, so an event is looked at with one regular
expression and parsed as JSON only where it has the counts. It still reads HTTP as HTTP: the
chunked coding is taken off properly, wherever its borders lie.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any
from urllib.parse import SplitResult

import trio

from .figures import Request

_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)"\s*:\s*"[^"]')
"""An event with some text in it. OpenAI's two forms, and the two names in use for thinking."""
_MOST_HEADERS = 64 * 1024


class BadAnswer(Exception):
    """The server's answer cannot be measured. ``str()`` is one line."""


class Client:
    """One stream's connection; opened when needed, kept where the server keeps it."""

    def __init__(self, url: SplitResult) -> None:
        self._url = url
        self._socket: trio.SocketStream | None = None
        self._unread = b""
        self._was_used = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        stream, self._socket = self._socket, None
        self._unread = b""
        self._was_used = False
        if stream is not None:
            await trio.aclose_forcefully(stream)

    def request_bytes(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = [
            f"{method} {self._url.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {self._url.netloc}",
            "Accept: text/event-stream, application/json",
        ]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode() + body

    async def connect(self) -> None:
        """Open the connection, if it is not open."""
        if self._socket is None:
            assert self._url.hostname is not None
            self._socket = await trio.open_tcp_stream(self._url.hostname, self._url.port or 80)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _receive(self) -> bytes:
        assert self._socket is not None
        return bytes(await self._socket.receive_some(65536))

    async def _open(self, request: bytes) -> tuple[int, dict[str, str]]:
        """Send; status and headers. ``self._unread`` is what came behind them."""
        data = b""
        if self._was_used:
            # A server may close after an answer without having said so. Then nothing of the
            # request was read, and it may be sent again.
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                data = await self._first_of(request)
            if not data:
                await self._close()
        data = data or await self._first_of(request)
        self._was_used = True
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = await self._receive()
            if not more or len(data) > _MOST_HEADERS:
                raise BadAnswer(f"no response, but {data[:80]!r}")
            data += more
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        self._unread = data[end + 4 :]
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {n.lower(): v.strip() for n, _, v in pairs}

    async def _first_of(self, request: bytes) -> bytes:
        await self.connect()
        assert self._socket is not None
        await self._socket.send_all(request)
        return await self._receive()

    async def _body(self, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """The body's parts as they come, without the chunked coding."""
        data, self._unread = self._unread, b""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            left = 0  # of the current chunk, with the line end behind it
            while True:
                parts = []
                while data:
                    if left > 2:
                        part = data[: left - 2]
                        parts.append(part)
                        data = data[len(part) :]
                        left -= len(part)
                    elif left:
                        skipped = min(left, len(data))
                        data = data[skipped:]
                        left -= skipped
                    else:
                        line_end = data.find(b"\r\n")
                        if line_end < 0:
                            break
                        size = int(data[:line_end].partition(b";")[0], 16)
                        if not size:
                            yield b"".join(parts)
                            await self._end_of_trailers(data[line_end + 2 :])
                            return
                        data = data[line_end + 2 :]
                        left = size + 2
                if parts:
                    yield b"".join(parts)
                more = await self._receive()
                if not more:
                    raise BadAnswer("the answer was cut")
                data += more
        length = int(headers.get("content-length", -1))
        while length:
            if not data:
                data = await self._receive()
                if not data and length > 0:
                    raise BadAnswer("the answer was cut")
                if not data:
                    await self._close()
                    return
            yield data
            length -= len(data) if length > 0 else 0
            data = b""

    async def _end_of_trailers(self, data: bytes) -> None:
        while not data.endswith(b"\r\n"):
            more = await self._receive()
            if not more:
                raise BadAnswer("the answer was cut")
            data += more

    async def get_json(self, path: str) -> tuple[int, Any]:
        """A short question's status and answer; ``None`` for one that is not JSON."""
        status, headers = await self._open(self.request_bytes("GET", path))
        body = b"".join([part async for part in self._body(headers)])
        await self._close()
        try:
            return status, json.loads(body)
        except ValueError:
            return status, None

    async def stream(self, request: bytes) -> Request:
        """Send a request for a stream and read it to its end."""
        await self.connect()
        sent = perf_counter()
        status, headers = await self._open(request)
        if status != 200:
            body = b"".join([part async for part in self._body(headers)])
            raise BadAnswer(f"status {status}: {_shown(body)}")
        first = last = before = 0.0
        gaps: list[float] = []
        usage: dict[str, Any] | None = None
        rest = b""
        async with contextlib.aclosing(self._body(headers)) as body_parts:
            async for data in body_parts:
                now = perf_counter()
                *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
                        if event.startswith(b"event: error"):
                            raise BadAnswer(_shown(event))
                        continue
                    last = now
                    if _TEXT.search(event):
                        if before:
                            gaps.append(now - before)
                        else:
                            first = now
                        before = now
                    if b'"completion_tokens"' in event:
                        usage = json.loads(event[5:]).get("usage") or usage
                    elif event.startswith((b'data: {"error"', b'data:{"error"')):
                        raise BadAnswer(_shown(event))
        if headers.get("connection", "").lower() == "close":
            await self._close()
        if usage is None:
            raise BadAnswer("the stream has no usage chunk, so its tokens cannot be counted")
        details = usage.get("prompt_tokens_details") or {}
        return Request(
            sent,
            first or last,
            last,
            gaps,
            usage["completion_tokens"],
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
        )


def _shown(data: bytes) -> str:
    """The beginning, in one line."""
    return " ".join(data[:300].decode("utf-8", "replace").split())
