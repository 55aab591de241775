"""POST /v1/chat/completions: an answer in the words of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
)
from .generating import AnswerContext
from .openai_stream import OpenAIStream, finish_reason


class ChatEncoder(OpenAIStream):
    """One answer's encodings, streamed or whole."""

    def __init__(self, context: AnswerContext, *, include_usage: bool) -> None:
        super().__init__(
            context,
            prefix="chatcmpl-",
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
            include_usage=include_usage,
        )
        # Most chunks are plain text of a single answer: all of them but the text, rendered once.
        self._delta_head = self._chunk_head + b',"choices":[{"index":0,"delta":{"content":'
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]' + self._chunk_tail

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

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": logprobs_object(choice.logprobs),
                "finish_reason": finish_reason(choice.ending),
            }
            for index, choice in enumerate(answer.choices)
        ]
        return self._whole(answer, choices)

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )


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
