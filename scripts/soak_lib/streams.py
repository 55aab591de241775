"""Answers of the four routes that generate, whole and streamed. Pure: no sockets, no clock.

A stream is judged as it comes: one class for each route, which knows what may follow what.
"""

from __future__ import annotations

import abc
import json
from typing import Any

from attrs import define

from .judge import Goldens, Question, Violation, check_json
from .wire import Answer

REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "completed": "stop",
    "incomplete": "length",
}
"""Other routes' words for how an answer ended, in chat completions' words."""


def tokens_of(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"])


def ended_by(usage: dict[str, Any]) -> str | None:
    kind = "completion" if "completion_tokens" in usage else "output"
    why = usage[f"{kind}_tokens_details"].get("ended_by")
    return None if why is None else str(why)


def check_end(question: Question, reason: str, usage: dict[str, Any]) -> None:
    """That nothing is missing: the number of tokens belongs to the way it ended."""
    tokens, why = tokens_of(usage), ended_by(usage)
    if why not in (None, "no_free_cells"):
        raise Violation(f"ended by {why} after {tokens} tokens")
    limit = question.max_tokens
    whole = tokens == limit if reason == "length" else tokens <= limit
    if not question.ends_itself and reason != "length":
        raise Violation(f"finish_reason {reason} although ignore_eos was set")
    if why is None and not whole:
        raise Violation(f"{tokens} of {limit} tokens, and finish_reason {reason}")


def check_whole(answer: Answer, question: Question, goldens: Goldens) -> str:
    """A whole answer to a question without tools; the model's name. Raises Violation."""
    body = check_json(answer)
    try:
        model, text, reason = body["model"], *_text_and_reason(question.api, body)
        check_end(question, reason, body["usage"])
        why = ended_by(body["usage"])
    except (KeyError, ValueError, TypeError) as error:
        raise Violation(f"no answer of {question.api} ({error!r}): {answer.body[:300]!r}") from None
    goldens.check(model, question.golden, text, why)
    return str(model)


def _text_and_reason(api: str, body: dict[str, Any]) -> tuple[str, str]:
    if api == "messages":
        (block,) = body["content"]
        return block["text"], REASONS[body["stop_reason"]]
    if api == "responses":
        return response_text(body), REASONS[body["status"]]
    (choice,) = body["choices"]
    text = choice["text"] if api == "completions" else choice["message"]["content"]
    return text, choice["finish_reason"]


def response_text(response: dict[str, Any]) -> str:
    """Of a response whose only item is a message."""
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"])


@define
class AnswerStream(abc.ABC):
    """A stream's events as they come. Raises Violation as soon as one is out of order."""

    question: Question
    model_header: str
    with_usage: bool
    text: str = ""
    deltas: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    model: str | None = None
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            if self.done:
                raise Violation(f"an event after the last one: {block[:200]!r}")
            try:
                self._block(block)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise Violation(f"a malformed event ({error!r}): {block[:200]!r}") from None

    @abc.abstractmethod
    def _block(self, block: bytes) -> None:
        """One event, or a comment."""

    def _say(self, text: str) -> None:
        if text:
            self.text += text
            self.deltas += 1

    def end(self, *, complete: bool, goldens: Goldens) -> str:
        """At the stream's end; the model's name."""
        if not complete:
            raise Violation(f"a stream that was cut after {self.deltas} deltas")
        if not self.done or self._rest or self.model is None:
            raise Violation(f"a stream without its end; the rest: {self._rest[:100]!r}")
        if self.with_usage:
            if self.usage is None:
                raise Violation("no usage although it was asked for")
            check_end(self.question, str(self.finish_reason), self.usage)
            goldens.check(self.model, self.question.golden, self.text, ended_by(self.usage))
        return self.model


@define
class ChatStream(AnswerStream):
    """Chat completions: data lines, a role first, [DONE] last."""

    _identity: tuple[str, str, int] | None = None

    def _block(self, block: bytes) -> None:
        if block == b": keep-alive":
            return
        if not block.startswith(b"data: ") or b"\n" in block:
            raise Violation(f"not an event: {block[:200]!r}")
        data = block.removeprefix(b"data: ")
        if data != b"[DONE]":
            self._chunk(json.loads(data))
            return
        if self.finish_reason is None:
            raise Violation("[DONE] without a finish chunk")
        self.done = True

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Violation(f"an error in the stream: {chunk['error']}")
        identity = (chunk["id"], chunk["model"], chunk["created"])
        first = self._identity is None
        if not first and identity != self._identity:
            raise Violation(f"a chunk of another answer: {identity}, before {self._identity}")
        self._identity, self.model = identity, chunk["model"]
        if not chunk["choices"]:
            if self.finish_reason is None or self.usage is not None or not self.with_usage:
                raise Violation("a usage chunk where none belongs")
            self.usage = chunk["usage"]
            return
        if self.finish_reason is not None:
            raise Violation("a chunk after the finish chunk")
        (choice,) = chunk["choices"]
        self._say(self._text(choice, first=first))
        self.finish_reason = choice["finish_reason"]

    def _text(self, choice: dict[str, Any], *, first: bool) -> str:
        delta = choice["delta"]
        if first != ("role" in delta):
            raise Violation(f"the role is in the first chunk only: {delta}")
        return delta.get("content") or ""


@define
class CompletionStream(ChatStream):
    """Completions: as chats, with texts and without a role."""

    def _text(self, choice: dict[str, Any], *, first: bool) -> str:
        return str(choice["text"])


@define
class NamedStream(AnswerStream):
    """What the two APIs with named events have in common. The name is the data's type."""

    _first: bool = True

    def _block(self, block: bytes) -> None:
        name, end, data = block.partition(b"\ndata: ")
        if not end or b"\n" in data or not name.startswith(b"event: "):
            raise Violation(f"not an event: {block[:200]!r}")
        event = json.loads(data)
        if event["type"] != name.removeprefix(b"event: ").decode():
            raise Violation(f"a name that is not the type: {block[:200]!r}")
        if event["type"] in ("error", "response.failed"):
            raise Violation(f"an error in the stream: {data[:300]!r}")
        if self._first != (event["type"] in ("message_start", "response.created")):
            raise Violation(f"not where it belongs: {block[:200]!r}")
        self._first = False
        self._event(event["type"], event)

    @abc.abstractmethod
    def _event(self, kind: str, event: dict[str, Any]) -> None: ...


@define
class MessagesStream(NamedStream):
    """Messages: blocks with dense indices, then how it ended, then the end."""

    _open: int | None = None
    _blocks: int = 0

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "ping":
                pass
            case "message_start":
                self.model = event["message"]["model"]
                if event["message"]["usage"]["input_tokens"] < 1:
                    raise Violation(f"no input tokens: {event}")
            case "content_block_start":
                if self._open is not None or event["index"] != self._blocks:
                    raise Violation(f"block {event['index']} begins within {self._open}")
                self._open, self._blocks = self._blocks, self._blocks + 1
            case "content_block_delta":
                self._check_open(event)
                self._say(event["delta"]["text"])
            case "content_block_stop":
                self._check_open(event)
                self._open = None
            case "message_delta":
                if self._open is not None or self.finish_reason is not None:
                    raise Violation(f"an end within a block, or another one: {event}")
                self.finish_reason = REASONS[event["delta"]["stop_reason"]]
                self.usage = event["usage"]
            case "message_stop":
                if self.finish_reason is None:
                    raise Violation("message_stop without a stop_reason")
                self.done = True
            case _:
                raise Violation(f"an event of type {kind}")

    def _check_open(self, event: dict[str, Any]) -> None:
        if event["index"] != self._open:
            raise Violation(f"an event of block {event['index']} within {self._open}")


@define
class ResponsesStream(NamedStream):
    """Responses: numbered events, one response, and at the end all that was told before."""

    id: str | None = None
    status: str | None = None
    _number: int = 0

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        if event["sequence_number"] != self._number:
            raise Violation(f"event {event['sequence_number']} instead of {self._number}")
        self._number += 1
        response = event.get("response")
        if response is not None:
            if self.id not in (None, response["id"]):
                raise Violation(f"another response: {response['id']}, before {self.id}")
            self.id, self.model = response["id"], response["model"]
        if kind == "response.output_text.delta":
            self._say(event["delta"])
        elif kind == "response.output_text.done" and event["text"] != self.text:
            raise Violation(f"{event['text'][:200]!r} is not what was told: {self.text[:200]!r}")
        elif kind in ("response.completed", "response.incomplete"):
            assert response is not None
            if response_text(response) != self.text:
                raise Violation(f"the response's text is not what was told: {self.text[:200]!r}")
            self.status = response["status"]
            self.finish_reason = "stop" if kind == "response.completed" else "length"
            self.usage, self.done = response["usage"], True


STREAMS: dict[str, type[AnswerStream]] = {
    "chat": ChatStream,
    "completions": CompletionStream,
    "messages": MessagesStream,
    "responses": ResponsesStream,
}
