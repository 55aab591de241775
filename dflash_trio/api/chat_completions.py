"""POST /v1/chat/completions: the event stream of a generation in OpenAI's words."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..generation.errors import Draining, EngineFailed, GenerationError
from ..generation.events import SERVER_SHUTDOWN, Event, Failed, Finished, TextDelta, Usage
from . import sse
from .error_responses import answer_for


def usage_object(usage: Usage, detail: str | None = None) -> dict[str, Any]:
    """Token counts as OpenAI lays them out. ``detail``: why an answer ended before its time."""
    completion_details: dict[str, Any] = {"reasoning_tokens": 0}
    if detail is not None:
        completion_details["ended_by"] = detail
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": completion_details,
    }


def error_before_headers(event: Event, *, anything_generated: bool) -> GenerationError | None:
    """The error an ending means while no header was sent; ``None`` when it is an answer."""
    match event:
        case Failed(message):
            return EngineFailed(message)
        case Finished(detail=detail) if detail == SERVER_SHUTDOWN and not anything_generated:
            return Draining()
    return None


class ChatEncoder:
    """One answer's identity and its encodings, streamed or whole."""

    def __init__(self, model: str, fingerprint: str, *, include_usage: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._include_usage = include_usage
        head = sse.json_line(
            {
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": self.created,
                "model": model,
                "system_fingerprint": fingerprint,
            }
        )[:-1]
        # Everything but the text of a delta is the same for each chunk: rendered once.
        self._chunk_head = f"data: {head}".encode()
        self._delta_head = self._chunk_head + b',"choices":[{"index":0,"delta":{"content":'
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        # While a usage chunk is due, the others carry a null in its place.
        self._null_usage = b',"usage":null' if include_usage else b""
        if include_usage:
            self._delta_tail = self._delta_tail.replace(b"}\n\n", b',"usage":null}\n\n')

    def opening(self) -> bytes:
        """The role, before any text."""
        return self._choice({"role": "assistant", "content": None}, None)

    def delta(self, text: str) -> bytes:
        return self._delta_head + sse.json_line(text).encode() + self._delta_tail

    def closing(self, finished: Finished) -> bytes:
        """The finish chunk, the usage chunk if one was asked for, and ``[DONE]``."""
        parts = [self._choice({}, finish_reason(finished))]
        if self._include_usage:
            usage = sse.json_line(usage_object(finished.usage, finished.detail)).encode()
            parts.append(self._chunk_head + b',"choices":[],"usage":' + usage + b"}\n\n")
        parts.append(sse.DONE)
        return b"".join(parts)

    def error(self, message: str) -> bytes:
        """An in-stream error: the last thing a client hears, with no faked normal end."""
        return sse.event(answer_for(EngineFailed(message)).openai_body())

    def encode(self, events: Sequence[Event]) -> tuple[bytes, bool]:
        """All of a wake-up's events as one write, and whether the stream ends with it."""
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        parts = [self.delta(text)] if text else []
        for event in events:
            if isinstance(event, Finished):
                return b"".join([*parts, self.closing(event)]), True
            if isinstance(event, Failed):
                return b"".join([*parts, self.error(event.message)]), True
        return b"".join(parts), False

    def whole(self, text: str, finished: Finished) -> str:
        """The non-streaming answer."""
        return json.dumps(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self.created,
                "model": self._model,
                "system_fingerprint": self._fingerprint,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text, "refusal": None},
                        "logprobs": None,
                        "finish_reason": finish_reason(finished),
                    }
                ],
                "usage": usage_object(finished.usage, finished.detail),
            },
            ensure_ascii=False,
        )

    def _choice(self, delta: dict[str, Any], reason: str | None) -> bytes:
        choice = sse.json_line(
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        ).encode()
        return self._chunk_head + b',"choices":[' + choice + b"]" + self._null_usage + b"}\n\n"


def finish_reason(finished: Finished) -> str:
    """OpenAI's word for how a generation ended."""
    return "stop" if finished.reason == "stop" else "length"
