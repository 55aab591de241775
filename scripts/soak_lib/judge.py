"""What a client may see, and what it may not. Pure: no sockets, no clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from typing import Any

from attrs import Factory, define, frozen

from .wire import Answer

ERROR_FIELDS = {"message", "type", "param", "code"}
QUEUE_FULL = "503 queue_full"
QUEUE_FULL_WORDS = "Every model that fits this request is busy"
"""What Messages, whose errors have no codes, say for the same."""
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
"""The routes that generate."""
ANTHROPIC_TYPES = {
    400: {"invalid_request_error"},
    404: {"not_found_error"},
    413: {"request_too_large"},
    503: {"overloaded_error"},
}


class Violation(Exception):
    """An answer outside of what is allowed for this kind of client."""


@frozen
class Question:
    """One whose answer depends on nothing but the model, to one of the routes that generate."""

    content: str
    max_tokens: int
    ignore_eos: bool = True
    api: str = "chat"

    @property
    def path(self) -> str:
        return PATHS[self.api]

    @property
    def ends_itself(self) -> bool:
        """Whether the model may end the answer before its limit."""
        return not self.ignore_eos or self.api == "messages"  # which knows no such field

    @property
    def golden(self) -> tuple[str, str, int, bool]:
        """What must give the same text. A prompt is the same on every route with a template."""
        family = "a text" if self.api == "completions" else "a conversation"
        return family, self.content, self.max_tokens, self.ends_itself

    def fields(self, **fields: Any) -> dict[str, Any]:
        limit = "max_output_tokens" if self.api == "responses" else "max_tokens"
        conversation: dict[str, Any] = {"messages": [{"role": "user", "content": self.content}]}
        if self.api == "responses":
            conversation = {"input": self.content}
        elif self.api == "completions":
            conversation = {"prompt": self.content}
        return {
            **conversation,
            limit: self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": 0,
            **fields,
        }

    def body(self, **fields: Any) -> bytes:
        return json.dumps(self.fields(**fields)).encode()


# ------------------------------------------------------------------------------ any answer


def check_answer(
    answer: Answer,
    allowed: Collection[int],
    *,
    method: str = "GET",
    request_id: str | None = None,
    api: str = "chat",
) -> str:
    """Its status, with the error's code if it has one. Raises Violation."""
    if not answer.status:
        raise Violation(f"no response; expected {_listed(allowed)}")
    shown = answer.body[:300]
    if answer.status not in allowed:
        raise Violation(f"status {answer.status}, expected {_listed(allowed)}: {shown!r}")
    if not answer.complete:
        raise Violation(f"a {answer.status} that was cut after {len(answer.body)} bytes of body")
    given = answer.headers.get("x-request-id")
    if not given or (request_id is not None and given != request_id):
        raise Violation(f"x-request-id is {given!r}, expected {request_id or 'one'}")
    if b"Traceback" in answer.body or b"<html" in answer.body.lower():
        raise Violation(f"a traceback or HTML: {shown!r}")
    if answer.status == 503 and not answer.headers.get("retry-after", "").isdigit():
        raise Violation(f"a 503 without Retry-After: {shown!r}")
    if method == "HEAD":
        if answer.body:
            raise Violation("an answer to HEAD with a body")
        return str(answer.status)
    if answer.status < 400:
        return str(answer.status)
    return _check_anthropic_error(answer) if api == "messages" else _check_error(answer)


def check_refusal(answer: Answer, api: str = "chat") -> str:
    """The only 503 that a ready server gives: its queue is full. Raises Violation."""
    label = check_answer(answer, {503}, api=api)
    if label != QUEUE_FULL:
        raise Violation(f"{label}: {answer.body[:300]!r}")
    return label


def check_json(answer: Answer) -> Any:
    """The body of a whole JSON answer. Raises Violation."""
    if answer.headers.get("content-type") != "application/json":
        raise Violation(f"content-type {answer.headers.get('content-type')!r} for JSON")
    # That the length is right was checked while reading: else the answer counts as cut.
    if "content-length" not in answer.headers:
        raise Violation("a whole answer without Content-Length")
    try:
        return answer.json()
    except ValueError as error:
        raise Violation(f"not JSON ({error}): {answer.body[:300]!r}") from None


def _check_error(answer: Answer) -> str:
    body = check_json(answer)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != ERROR_FIELDS:
        raise Violation(f"not an error object: {answer.body[:300]!r}")
    kinds = {"server_error"} if answer.status >= 500 else {"invalid_request_error"}
    if answer.status in (501, 505):  # the server's refusal, the client's mistake
        kinds = {"server_error", "invalid_request_error"}
    if error["type"] not in kinds or not isinstance(error["message"], str) or not error["message"]:
        raise Violation(f"a {answer.status} with a wrong type or message: {error}")
    return f"{answer.status} {error['code']}" if error["code"] else str(answer.status)


def _check_anthropic_error(answer: Answer) -> str:
    body = check_json(answer)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"type", "message"}:
        raise Violation(f"not an error object: {answer.body[:300]!r}")
    if body["type"] != "error" or body["request_id"] != answer.headers.get("request-id"):
        raise Violation(f"an error without its request's id: {answer.body[:300]!r}")
    kinds = ANTHROPIC_TYPES.get(answer.status, {"invalid_request_error", "api_error"})
    if error["type"] not in kinds or not isinstance(error["message"], str) or not error["message"]:
        raise Violation(f"a {answer.status} with a wrong type or message: {error}")
    if answer.status == 503 and QUEUE_FULL_WORDS in error["message"]:
        return QUEUE_FULL
    return f"{answer.status} {error['type']}"


def _listed(statuses: Collection[int]) -> str:
    return " or ".join(map(str, sorted(statuses)))


# ------------------------------------------------------------------------- compared answers


@define
class Goldens:
    """Each model's answer to each question: the first one counts, the others must equal it."""

    texts: dict[tuple[str, Hashable], str] = Factory(dict)
    compare: bool = True
    compared: int = 0

    def check(self, model: str, question: Hashable, text: str, ended_by: str | None) -> None:
        """``question``: a ``Question.golden``, or whatever else must always give the same."""
        if not self.compare:
            return
        golden = self.texts.get((model, question))
        if golden is None:
            if ended_by is None:
                self.texts[model, question] = text
            return
        self.compared += 1
        same = text == golden if ended_by is None else golden.startswith(text)
        if not same:
            raise Violation(
                f"another text than before from {model[0]} for {str(question)[:80]}: "
                f"{text[:200]!r} ({len(text)}), before {golden[:200]!r} ({len(golden)}), "
                f"ended by {ended_by}"
            )
