"""What a route may answer to a hostile body, and what it may not. Pure: no sockets, no clock."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from soak_lib.judge import ERROR_FIELDS, Violation
from soak_lib.wire import Answer

from .cases import Case
from .shapes import STREAM_ENDS, WHOLE_ANSWERS

ALLOWED = frozenset({200, 400, 404, 413, 415, 417, 503})
"""Nothing else: above all no 500, which would blame the server for what a client sent."""
LONGEST_ERROR = 4096
"""Bytes of an error's body: a large request must not come back in it."""
ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC_FIELDS = {"type", "error", "request_id"}


def judge(case: Case, answer: Answer) -> str:
    """The answer's kind, for the table. Raises Violation."""
    if not answer.status:
        raise Violation("the connection ended without a response")
    _check_frame(case, answer)
    if answer.status == 200:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            check_stream(case, answer.body)
            return "200 stream"
        _check_whole(case, answer)
        return "200"
    return _check_error(case, answer)


def _check_frame(case: Case, answer: Answer) -> None:
    headers, shown = answer.headers, answer.body[:300]
    if answer.status not in ALLOWED:
        raise Violation(f"status {answer.status}: {shown!r}")
    if not answer.complete:
        raise Violation(f"a {answer.status} that was cut: {shown!r}")
    request_id = headers.get("x-request-id")
    if not request_id or len(request_id) > 128 or not request_id.isascii():
        raise Violation(f"x-request-id is {request_id!r}")
    if is_anthropic(case) and headers.get("request-id") != request_id:
        raise Violation(f"request-id is {headers.get('request-id')!r}, not {request_id!r}")
    if "evil" in headers or "x-evil" in headers:
        raise Violation("the body made a header of its own")
    lower = answer.body.lower()
    if answer.status != 200 and (b"traceback (most" in lower or b"<html" in lower[:20]):
        raise Violation(f"a traceback or HTML: {shown!r}")


def is_anthropic(case: Case) -> bool:
    return case.path.startswith(("/v1/messages", "/messages"))


def parse(data: bytes | str) -> Any:
    """Strict JSON. Raises Violation."""

    def refuse(name: str) -> NoReturn:
        raise Violation(f"{name} in an answer")

    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise Violation(f"not JSON ({error}): {data[:300]!r}") from None
    # A text that cannot be sent on, such as half a character, is none.
    if "\\ud" in text.lower() and re.search(
        "[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)
    ):
        raise Violation(f"half a character in an answer: {data[:300]!r}")
    return value


def _check_whole(case: Case, answer: Answer) -> None:
    if answer.headers.get("content-type") != "application/json":
        raise Violation(f"content-type {answer.headers.get('content-type')!r} for JSON")
    value = parse(answer.body)
    if not isinstance(value, dict) or not value.keys() >= WHOLE_ANSWERS[case.route]:
        raise Violation(f"not an answer of {case.route}: {answer.body[:300]!r}")


def _check_error(case: Case, answer: Answer) -> str:
    status, shown = answer.status, answer.body[:300]
    if answer.headers.get("content-type") != "application/json":
        raise Violation(f"content-type {answer.headers.get('content-type')!r}: {shown!r}")
    if len(answer.body) > LONGEST_ERROR:
        raise Violation(f"an error of {len(answer.body)} bytes: {shown!r}")
    if status == 503 and not answer.headers.get("retry-after", "").isdigit():
        raise Violation(f"a 503 without Retry-After: {shown!r}")
    value = parse(answer.body)
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        raise Violation(f"not an error: {shown!r}")
    message, code = error.get("message"), None
    if is_anthropic(case):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
        right = value.keys() == ANTHROPIC_FIELDS and value["type"] == "error"
        right &= error.keys() == {"type", "message"} and error["type"] == kind
        right &= value.get("request_id") == answer.headers["x-request-id"]
    else:
        code = error.get("code")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        right = value.keys() == {"error"} and error.keys() == ERROR_FIELDS
        right &= error.get("type") == kind
        right &= all(isinstance(error.get(name), str | None) for name in ("param", "code"))
    if not right or not isinstance(message, str) or not message.strip():
        raise Violation(f"a {status} in a wrong shape: {shown!r}")
    return f"{status} {code}" if code else str(status)


def check_stream(case: Case, body: bytes) -> None:
    """That a stream is whole, strict, and ends as its API says. Raises Violation."""
    ends = STREAM_ENDS.get(case.route)
    if ends is None:
        raise Violation(f"a stream from {case.route}")
    if not body.endswith(b"\n\n"):
        raise Violation(f"a stream ends within an event: {body[-200:]!r}")
    last = ""
    for block in body.decode("utf-8").removesuffix("\n\n").split("\n\n"):
        if block == ": keep-alive":
            continue
        if last in ends:
            raise Violation(f"an event after the last one: {block[:200]!r}")
        last = _event(block)
    if last not in ends:
        raise Violation(f"a stream without its end: {body[-200:]!r}")


def _event(block: str) -> str:
    """What an event is called: its type, or its data where that is no JSON."""
    # A client may split at any line end that Unicode knows.
    lines = block.splitlines()
    named = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
    if len(lines) != 1 or not lines[0].startswith("data: "):
        raise Violation(f"not an event: {block[:200]!r}")
    data = lines[0].removeprefix("data: ")
    if data == "[DONE]":
        return data
    value = parse(data)
    if not isinstance(value, dict) or value.get("error"):
        raise Violation(f"an error in a stream: {block[:300]!r}")
    kind = value.get("type")
    if named is not None and named != kind:
        raise Violation(f"an event of two types: {block[:200]!r}")
    return str(kind)
