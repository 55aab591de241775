"""The APIs: how to ask, and how to read an answer, streamed or whole.

Reading is strict where a client would be hurt: an event that is not JSON, an answer without its
terminal event or something after it is a problem with a name. What it does not know, it skips.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs
from attrs import define, frozen


@frozen
class Answer:
    """One answer, as far as it came."""

    text: str = ""
    finish: str | None = None
    """The API's word for how it ended; ``None`` while it has not said so."""
    terminal: bool = False
    """Whether it ended as this API's answers must, to the last event."""
    tokens: int | None = None
    """Generated tokens, where the answer says so."""
    problem: str | None = None
    """What is malformed in it, or the error that it carries."""


@define
class _Draft:
    """An answer while its events are read."""

    text: list[str] = attrs.field(factory=list)
    finish: str | None = None
    terminal: bool = False
    tokens: int | None = None
    problem: str | None = None

    def blame(self, problem: str) -> None:
        self.problem = self.problem or problem


class Malformed(Exception):
    """Bytes that this API must not send."""


def events(body: bytes) -> Iterator[tuple[str, str]]:
    """Name (``""`` without one) and data of each server-sent event; comments are skipped.

    Raises Malformed for bytes after the last empty line: an event that was cut.
    """
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    blocks = text.split("\n\n")
    for block in blocks[:-1]:
        name, data = "", []
        for line in block.split("\n"):
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
        if data:
            yield name, "\n".join(data)
    if blocks[-1].strip():
        raise Malformed(f"it stops inside an event: {blocks[-1][:60]!r}")


class Dialect(abc.ABC):
    """One API. Stateless."""

    name: ClassVar[str]
    path: ClassVar[str]
    finalized: ClassVar[str]
    """How an answer that the server ends early has to say that it ended."""

    def request(
        self, model: str, prompt: str, tokens: int, *, stream: bool, extra: Mapping[str, Any]
    ) -> bytes:
        """The body of a greedy request."""
        fields = {"model": model, "temperature": 0, "stream": stream, **extra}
        return json.dumps({**fields, **self._question(prompt, tokens, stream)}).encode()

    @abc.abstractmethod
    def _question(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """The fields that differ from API to API."""

    def read(self, body: bytes, *, stream: bool) -> Answer:
        """An answer from its bytes, which may be cut anywhere. Never raises."""
        draft = _Draft()
        try:
            if stream:
                for name, data in events(body):
                    if draft.terminal:
                        draft.blame("something follows the terminal event")
                    self._take(draft, name, data)
            else:
                self._read_whole(draft, _object(body.decode("utf-8", "replace")))
        except Malformed as malformed:
            draft.blame(str(malformed))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            draft.blame(f"it has not the shape of this API: {error!r}")
        return Answer(
            "".join(draft.text), draft.finish, draft.terminal, draft.tokens, draft.problem
        )

    @abc.abstractmethod
    def _take(self, draft: _Draft, name: str, data: str) -> None:
        """One event of a stream."""

    @abc.abstractmethod
    def _read_whole(self, draft: _Draft, body: dict[str, Any]) -> None:
        """A whole answer's object."""


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise Malformed(f"not JSON: {data[:60]!r}") from None
    if not isinstance(value, dict):
        raise Malformed(f"not a JSON object: {data[:60]!r}")
    return value


class Chat(Dialect):
    """OpenAI's chat completions. Ends with a ``finish_reason``, then ``[DONE]``."""

    name = "chat"
    path = "/v1/chat/completions"
    finalized = "length"

    def _question(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
        }
        if stream:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def _take(self, draft: _Draft, name: str, data: str) -> None:
        if data == "[DONE]":
            _take_done(draft)
            return
        chunk = _object(data)
        if "error" in chunk:
            draft.blame(f"an error inside the stream: {str(chunk['error'])[:80]}")
            return
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            draft.text += [delta.get("reasoning_content") or "", delta.get("content") or ""]
            draft.finish = choice.get("finish_reason") or draft.finish
        if chunk.get("usage"):
            draft.tokens = chunk["usage"].get("completion_tokens")

    def _read_whole(self, draft: _Draft, body: dict[str, Any]) -> None:
        choice = body["choices"][0]
        message = choice["message"]
        draft.text += [message.get("reasoning_content") or "", message.get("content") or ""]
        draft.finish = choice["finish_reason"]
        draft.terminal = draft.finish is not None
        draft.tokens = (body.get("usage") or {}).get("completion_tokens")


class Messages(Dialect):
    """Anthropic's messages. Ends with a ``stop_reason`` in ``message_delta``, ``message_stop``."""

    name = "messages"
    path = "/v1/messages"
    finalized = "max_tokens"

    def _question(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}

    def _take(self, draft: _Draft, name: str, data: str) -> None:
        event = _object(data)
        kind = event["type"]
        if name and name != kind:
            draft.blame(f"event {name} carries type {kind}")
        if kind == "content_block_delta":
            delta = event["delta"]
            draft.text += [delta.get("thinking") or "", delta.get("text") or ""]
        elif kind == "message_delta":
            draft.finish = event["delta"].get("stop_reason") or draft.finish
            draft.tokens = (event.get("usage") or {}).get("output_tokens", draft.tokens)
        elif kind == "message_stop":
            draft.terminal = draft.finish is not None
            if not draft.terminal:
                draft.blame("message_stop without a stop_reason")
        elif kind == "error":
            draft.blame(f"an error inside the stream: {str(event.get('error'))[:80]}")

    def _read_whole(self, draft: _Draft, body: dict[str, Any]) -> None:
        for block in body["content"]:
            draft.text += [block.get("thinking") or "", block.get("text") or ""]
        draft.finish = body["stop_reason"]
        draft.terminal = draft.finish is not None
        draft.tokens = (body.get("usage") or {}).get("output_tokens")


class Responses(Dialect):
    """OpenAI's responses. Ends with ``response.completed`` or ``response.incomplete``."""

    name = "responses"
    path = "/v1/responses"
    finalized = "incomplete: max_output_tokens"

    def _question(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        return {"input": prompt, "max_output_tokens": tokens, "store": False}

    def _take(self, draft: _Draft, name: str, data: str) -> None:
        event = _object(data)
        kind = event["type"]
        if name and name != kind:
            draft.blame(f"event {name} carries type {kind}")
        if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            draft.text.append(event["delta"])
        elif kind in ("response.completed", "response.incomplete"):
            self._end(draft, event["response"])
        elif kind in ("response.failed", "error"):
            draft.blame(f"an error inside the stream: {data[:80]}")

    def _read_whole(self, draft: _Draft, body: dict[str, Any]) -> None:
        for item in body["output"]:
            draft.text += [part.get("text") or "" for part in item.get("content") or ()]
        self._end(draft, body)

    @staticmethod
    def _end(draft: _Draft, response: Mapping[str, Any]) -> None:
        status = response["status"]
        if status not in ("completed", "incomplete"):
            raise Malformed(f"the response's status is {status}")
        reason = (response.get("incomplete_details") or {}).get("reason")
        draft.finish = f"{status}: {reason}" if reason else status
        draft.terminal = True
        draft.tokens = (response.get("usage") or {}).get("output_tokens")


class Completions(Dialect):
    """OpenAI's older completions. They end as chats do, and have a text where those have deltas."""

    name = "completions"
    path = "/v1/completions"
    finalized = "length"

    def _question(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def _take(self, draft: _Draft, name: str, data: str) -> None:
        if data == "[DONE]":
            _take_done(draft)
            return
        chunk = _object(data)
        if "error" in chunk:
            draft.blame(f"an error inside the stream: {str(chunk['error'])[:80]}")
            return
        for choice in chunk.get("choices") or ():
            draft.text.append(choice.get("text") or "")
            draft.finish = choice.get("finish_reason") or draft.finish
        if chunk.get("usage"):
            draft.tokens = chunk["usage"].get("completion_tokens")

    def _read_whole(self, draft: _Draft, body: dict[str, Any]) -> None:
        choice = body["choices"][0]
        draft.text.append(choice["text"])
        draft.finish = choice["finish_reason"]
        draft.terminal = draft.finish is not None
        draft.tokens = (body.get("usage") or {}).get("completion_tokens")


def _take_done(draft: _Draft) -> None:
    draft.terminal = draft.finish is not None
    if not draft.terminal:
        draft.blame("[DONE] without a finish_reason")


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (Chat(), Messages(), Responses(), Completions())
}
