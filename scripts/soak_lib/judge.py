"""What a client may see, and what it may not. Pure: no sockets, no clock."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from attrs import Factory, define, frozen

from .wire import Answer

ERROR_FIELDS = {"message", "type", "param", "code"}
QUEUE_FULL = "503 queue_full"


class Violation(Exception):
    """An answer outside of what is allowed for this kind of client."""


@frozen
class Question:
    """A chat whose answer depends on nothing but the model."""

    content: str
    max_tokens: int
    ignore_eos: bool = True

    def body(self, **fields: Any) -> bytes:
        return json.dumps(
            {
                "messages": [{"role": "user", "content": self.content}],
                "max_tokens": self.max_tokens,
                "ignore_eos": self.ignore_eos,
                "temperature": 0,
                **fields,
            }
        ).encode()


# ------------------------------------------------------------------------------ any answer


def check_answer(
    answer: Answer, allowed: Collection[int], *, method: str = "GET", request_id: str | None = None
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
    return _check_error(answer)


def check_refusal(answer: Answer) -> str:
    """The only 503 that a ready server gives: its queue is full. Raises Violation."""
    label = check_answer(answer, {503})
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


def _listed(statuses: Collection[int]) -> str:
    return " or ".join(map(str, sorted(statuses)))


# --------------------------------------------------------------------------- chat answers


@define
class Goldens:
    """Each model's answer to each question: the first one counts, the others must equal it."""

    texts: dict[tuple[str, Question], str] = Factory(dict)
    compare: bool = True
    compared: int = 0

    def check(self, model: str, question: Question, text: str, ended_by: str | None) -> None:
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
                f"another text than before from {model[0]} for {question.content[:40]!r}: "
                f"{text[:200]!r} ({len(text)}), before {golden[:200]!r} ({len(golden)}), "
                f"ended by {ended_by}"
            )


def check_whole_chat(answer: Answer, question: Question, goldens: Goldens) -> str:
    """A whole chat completion; the model's name. Raises Violation."""
    body = check_json(answer)
    try:
        (choice,) = body["choices"]
        model, text = body["model"], choice["message"]["content"]
        _check_end(question, choice["finish_reason"], body["usage"])
        ended_by = _ended_by(body["usage"])
    except (KeyError, ValueError, TypeError) as error:
        raise Violation(f"not a chat completion ({error!r}): {answer.body[:300]!r}") from None
    goldens.check(model, question, text, ended_by)
    return str(model)


def _ended_by(usage: dict[str, Any]) -> str | None:
    ended_by = usage["completion_tokens_details"].get("ended_by")
    return None if ended_by is None else str(ended_by)


def _check_end(question: Question, reason: str, usage: dict[str, Any]) -> None:
    """That nothing is missing: the number of tokens belongs to the way it ended."""
    tokens, ended_by = usage["completion_tokens"], _ended_by(usage)
    if ended_by not in (None, "no_free_cells"):
        raise Violation(f"ended by {ended_by} after {tokens} tokens")
    whole = tokens == question.max_tokens if reason == "length" else tokens < question.max_tokens
    if question.ignore_eos and reason != "length":
        raise Violation(f"finish_reason {reason} although ignore_eos was set")
    if ended_by is None and not whole:
        raise Violation(f"{tokens} of {question.max_tokens} tokens, and finish_reason {reason}")


@define
class ChatStream:
    """A stream's events as they come. Raises Violation as soon as one is out of order."""

    question: Question
    model_header: str
    with_usage: bool
    text: str = ""
    deltas: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    _identity: tuple[str, str, int] | None = None
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            self._event(block)

    def _event(self, block: bytes) -> None:
        if self.done:
            raise Violation(f"an event after [DONE]: {block[:200]!r}")
        if block == b": keep-alive":
            return
        if not block.startswith(b"data: ") or b"\n" in block:
            raise Violation(f"not an event: {block[:200]!r}")
        data = block.removeprefix(b"data: ")
        if data == b"[DONE]":
            if self.finish_reason is None:
                raise Violation("[DONE] without a finish chunk")
            self.done = True
            return
        try:
            self._chunk(json.loads(data))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Violation(f"a malformed chunk ({error!r}): {data[:200]!r}") from None

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Violation(f"an error in the stream: {chunk['error']}")
        identity = (chunk["id"], chunk["model"], chunk["created"])
        first = self._identity is None
        if not first and identity != self._identity:
            raise Violation(f"a chunk of another answer: {identity}, before {self._identity}")
        self._identity = identity
        if not chunk["choices"]:
            if self.finish_reason is None or self.usage is not None or not self.with_usage:
                raise Violation("a usage chunk where none belongs")
            self.usage = chunk["usage"]
            return
        if self.finish_reason is not None:
            raise Violation("a chunk after the finish chunk")
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        if first != ("role" in delta):
            raise Violation(f"the role is in the first chunk only: {delta}")
        if content := delta.get("content"):
            self.text += content
            self.deltas += 1
        self.finish_reason = choice["finish_reason"]

    def end(self, *, complete: bool, goldens: Goldens) -> str:
        """At the stream's end; the model's name."""
        if not complete:
            raise Violation(f"a stream that was cut after {self.deltas} deltas")
        if not self.done or self._rest or self._identity is None:
            raise Violation(f"a stream without its end; the rest: {self._rest[:100]!r}")
        if self.with_usage:
            if self.usage is None:
                raise Violation("no usage although it was asked for")
            _check_end(self.question, str(self.finish_reason), self.usage)
            goldens.check(self._identity[1], self.question, self.text, _ended_by(self.usage))
        return self._identity[1]
