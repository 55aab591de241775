"""What broken clients send, and the status that each of it gets."""

from __future__ import annotations

import json
from typing import Any

_HOST = b"Host: 127.0.0.1\r\n"
_CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + _HOST


HTTP: tuple[tuple[bytes, int], ...] = (
    (bytes(range(128, 256)) * 4 + b"\r\n\r\n", 400),
    (b"\0" * 64, 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), 400),  # TLS
    (b"GET /health\r\n\r\n", 400),
    (b"GET /health HTTP/3.0\r\n" + _HOST + b"\r\n", 505),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 505),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n" + _HOST + b"nonsense\r\n\r\n", 400),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + _HOST + b"X: " + b"a" * 102_400 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + _HOST + b"X: a\r\n" * 12_000 + b"\r\n", 431),
    (b"GET http://[::1 HTTP/1.1\r\n" + _HOST + b"\r\n", 400),
    (b"GET ftp://here/ HTTP/1.1\r\n" + _HOST + b"\r\n", 400),
    (b"CONNECT here:443 HTTP/1.1\r\n" + _HOST + b"\r\n", 400),
    (_CHAT + b"Content-Length: -1\r\n\r\n", 400),
    (_CHAT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    (_CHAT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (_CHAT + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    (_CHAT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n", 400),
    (_CHAT + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX", 400),
    (_CHAT + b"Expect: tea\r\n\r\n", 417),
    (
        b"GET / HTTP/1.1\r\n" + _HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: bad\r\nSec-WebSocket-Version: 13\r\n\r\n\x81\x85trailing",
        400,
    ),
)
"""Bytes, and the status: JSON, after which the connection is closed."""


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def _messages(**fields: Any) -> bytes:
    return _chat(max_tokens=5, **fields)


def _responses(**fields: Any) -> bytes:
    return json.dumps({"input": "hi", **fields}).encode()


def _completions(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


_NO_REQUEST: tuple[bytes, ...] = (
    b"",
    b"   ",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 5000,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'{"messages": [], "messages": []}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
    b"{}",
)
"""Wrong on every route."""
_WRONG: dict[str, tuple[bytes, ...]] = {
    "chat": (
        _chat(messages=[]),
        _chat(messages="hi"),
        _chat(messages=[{"role": "nobody", "content": "hi"}]),
        _chat(messages=[{"role": "user", "content": 5}]),
        _chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        _chat(max_tokens=0),
        _chat(max_tokens="many"),
        _chat(max_tokens=True),
        _chat(temperature=-1),
        _chat(temperature="hot"),
        _chat(top_p=2),
        _chat(stop=[""]),
        _chat(stop=["a"] * 100),
        _chat(stream="yes"),
        _chat(logit_bias={"x": 1}),
        _chat(tools=[{"type": "function"}]),
        _chat(tool_choice="required"),
        _chat(grammar="root ::= missing"),
        _chat(response_format={"type": "json_object"}, guided_regex="a"),
        _chat(response_format={"type": "surprise"}),
        _chat(n=0),
        _chat(n=1000),
    ),
    "messages": (
        _chat(),
        _messages(messages=[]),
        _messages(messages=[{"role": "tool", "content": "hi"}]),
        _messages(messages=[{"role": "user", "content": [{"type": "image"}]}]),
        _messages(temperature=3),
        _messages(stop_sequences="a"),
        _messages(tools=[{"name": "f"}]),
        _messages(tool_choice={"type": "any"}),
        _messages(thinking={"type": "enabled", "budget_tokens": 5}),
    ),
    "responses": (
        _responses(input=[]),
        _responses(input=[{"type": "function_call_output", "call_id": "c", "output": "1"}]),
        _responses(previous_response_id="resp_nobody"),
        _responses(max_output_tokens=0),
        _responses(background=True),
        _responses(text={"format": {"type": "surprise"}}),
        _responses(top_logprobs=21),
        _responses(tool_choice="required"),
    ),
    "completions": (
        _completions(prompt=None),
        _completions(prompt=["a", "b"]),
        _completions(prompt=[1, "a"]),
        _completions(suffix="end"),
        _completions(n=2, best_of=3),
        _completions(logprobs=6),
    ),
}

BODIES: tuple[tuple[str, bytes], ...] = tuple(
    (api, body) for api, wrong in _WRONG.items() for body in (*_NO_REQUEST, *wrong)
)
"""Bodies that all get a 400, each with the route."""
