"""POST /v1/completions: an answer in the words of OpenAI's older API, text for text."""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from typing import Any

from ..generation.errors import GenerationError
from ..generation.events import TokenAlternative, TokenLogprob
from . import sse
from .answer import (
    AnswerEvent,
    ChoiceEnded,
    ContentDelta,
    WholeAnswer,
    new_id,
    total_usage,
)
from .chat_completions import finish_reason
from .error_responses import answer_for
from .generating import FINGERPRINT, AnswerContext
from .usage import usage_object


class CompletionEncoder:
    """One answer's identity and its encodings, streamed or whole.

    ``echoed``: text that each answer begins with, which was not generated.
    """

    call_prefix = "call_"

    def __init__(self, context: AnswerContext, *, include_usage: bool, echoed: str = "") -> None:
        self._identity = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._n = context.prepared.n
        self._alternatives = context.prepared.logprobs
        self._include_usage = include_usage
        self._echoed = echoed
        self._ended: list[ChoiceEnded] = []
        self._layouts = [LegacyLogprobs(self._alternatives or 0) for _ in range(self._n)]
        head = sse.json_line(self._identity)[:-1]
        # Everything but the text of a delta is the same for each chunk: rendered once.
        self._chunk_head = f"data: {head}".encode()
        # While a usage chunk is due, the others carry a null in its place.
        self._chunk_tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def opening(self) -> bytes:
        """The prompt, if it is to be repeated."""
        if not self._echoed:
            return b""
        return b"".join(self._chunk(index, self._echoed) for index in range(self._n))

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(index, text, logprobs):
                layout = self._layouts[index].of(logprobs) if logprobs else None
                return self._chunk(index, text, logprobs=layout)
            case ChoiceEnded():
                self._ended.append(event)
                return self._chunk(event.index, "", reason=finish_reason(event))
        # Nothing else comes of a prompt without a template: no tools, and no thinking apart.
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
            **self._identity,
            "choices": [
                self._choice(
                    index,
                    self._echoed + choice.content,
                    reason=finish_reason(choice.ending),
                    logprobs=(
                        self._layouts[index].of(choice.logprobs)
                        if self._alternatives is not None
                        else None
                    ),
                )
                for index, choice in enumerate(answer.choices)
            ],
            "usage": usage_object(answer.usage, answer.choices[0].ending.detail),
        }

    def _choice(
        self,
        index: int,
        text: str,
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, index: int, text: str, **more: Any) -> bytes:
        choice = sse.json_line(self._choice(index, text, **more)).encode()
        return self._chunk_head + b',"choices":[' + choice + b"]" + self._chunk_tail


class LegacyLogprobs:
    """Lays out one answer's log probabilities in four lists, as they come.

    ``text_offset`` counts characters, and a token may be a part of one: all that make up a
    character have its offset.
    """

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens' object."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.chosen.piece))
        return {
            "tokens": [_text(entry.chosen) for entry in entries],
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries] if self._alternatives else None,
            "text_offset": offsets,
        }


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The alternatives, and the token itself if it was not among them."""
    top: dict[str, float] = {}
    for alternative in (*entry.top, entry.chosen):
        # Two parts of characters may read alike: the likelier one counts, which comes first.
        top.setdefault(_text(alternative), alternative.logprob)
    return top


def _text(token: TokenAlternative) -> str:
    return token.piece.decode("utf-8", "replace")
