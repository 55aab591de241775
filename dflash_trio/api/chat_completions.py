"""POST /v1/chat/completions: an answer in the words of OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..generation.errors import GenerationError
from ..generation.events import TokenAlternative, TokenLogprob
from . import sse
from .answer import (
    AnswerEvent,
    CallArguments,
    CallBegun,
    Choice,
    ChoiceEnded,
    ContentDelta,
    ReasoningDelta,
    WholeAnswer,
    new_id,
    total_usage,
)
from .error_responses import answer_for
from .generating import FINGERPRINT, AnswerContext
from .usage import usage_object


class ChatEncoder:
    """One answer's identity and its encodings, streamed or whole."""

    call_prefix = "call_"

    def __init__(self, context: AnswerContext, *, include_usage: bool) -> None:
        self.id = new_id("chatcmpl-")
        self.created = int(time.time())
        self._model = context.model
        self._n = context.prepared.n
        self._include_usage = include_usage
        self._ended: list[ChoiceEnded] = []
        head = sse.json_line(
            {
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": self.created,
                "model": self._model,
                "system_fingerprint": FINGERPRINT,
            }
        )[:-1]
        # Everything but the text of a delta is the same for each chunk: rendered once.
        self._chunk_head = f"data: {head}".encode()
        self._delta_head = self._chunk_head + b',"choices":[{"index":0,"delta":{"content":'
        # While a usage chunk is due, the others carry a null in its place.
        self._null_usage = b',"usage":null' if include_usage else b""
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]' + self._null_usage + b"}\n\n"

    def opening(self) -> bytes:
        """The roles, before any text."""
        role = {"role": "assistant", "content": None}
        return b"".join(self._choice(index, role) for index in range(self._n))

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(0, text, ()):
                return self._delta_head + sse.json_line(text).encode() + self._delta_tail
            case ContentDelta(index, text, logprobs):
                return self._choice(index, {"content": text}, logprobs=logprobs_object(logprobs))
            case ReasoningDelta(index, text):
                return self._choice(index, {"reasoning_content": text})
            case CallBegun(index, call, id_, name):
                function = {"name": name, "arguments": ""}
                begun = {"index": call, "id": id_, "type": "function", "function": function}
                return self._choice(index, {"tool_calls": [begun]})
            case CallArguments(index, call, text):
                more = {"index": call, "function": {"arguments": text}}
                return self._choice(index, {"tool_calls": [more]})
            case ChoiceEnded():
                self._ended.append(event)
                return self._choice(event.index, {}, reason=finish_reason(event))
        return b""

    def closing(self) -> bytes:
        """The usage chunk if one was asked for, and ``[DONE]``."""
        if not self._include_usage:
            return sse.DONE
        usage = usage_object(total_usage(self._ended), self._ended[0].detail)
        line = sse.json_line(usage).encode()
        return self._chunk_head + b',"choices":[],"usage":' + line + b"}\n\n" + sse.DONE

    def failure(self, error: GenerationError) -> bytes:
        return sse.event(answer_for(error).openai_body())

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": logprobs_object(choice.logprobs),
                    "finish_reason": finish_reason(choice.ending),
                }
                for index, choice in enumerate(answer.choices)
            ],
            "usage": usage_object(answer.usage, answer.choices[0].ending.detail),
        }

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = sse.json_line(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        ).encode()
        return self._chunk_head + b',"choices":[' + choice + b"]" + self._null_usage + b"}\n\n"


def _message(choice: Choice) -> dict[str, Any]:
    content = choice.content or ("" if not choice.calls else None)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def finish_reason(ended: ChoiceEnded) -> str:
    """OpenAI's word for how an answer ended."""
    return "length" if ended.reason == "cancelled" else ended.reason


def logprobs_object(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Log probabilities of some tokens of the content; null where there are none."""
    if not logprobs:
        return None
    return {
        "content": [
            {**_alternative(entry.chosen), "top_logprobs": [_alternative(a) for a in entry.top]}
            for entry in logprobs
        ],
        "refusal": None,
    }


def _alternative(alternative: TokenAlternative) -> dict[str, Any]:
    return {
        "token": alternative.piece.decode("utf-8", "replace"),
        "logprob": alternative.logprob,
        "bytes": list(alternative.piece),
    }
