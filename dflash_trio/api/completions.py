"""POST /v1/completions: an answer in the words of OpenAI's older API, text for text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ..generation.events import TokenAlternative, TokenLogprob
from .answer import (
    AnswerEvent,
    ChoiceEnded,
    ContentDelta,
    WholeAnswer,
)
from .generating import AnswerContext
from .openai_stream import OpenAIStream, finish_reason


class CompletionEncoder(OpenAIStream):
    """One answer's encodings, streamed or whole.

    ``echoed``: text that each answer begins with, which was not generated.
    """

    def __init__(self, context: AnswerContext, *, include_usage: bool, echoed: str = "") -> None:
        kind = "text_completion"
        super().__init__(
            context, prefix="cmpl-", kind=kind, chunk_kind=kind, include_usage=include_usage
        )
        self._alternatives = context.prepared.logprobs
        self._echoed = echoed
        self._layouts = [LegacyLogprobs(self._alternatives or 0) for _ in range(self._n)]

    def opening(self) -> bytes:
        """The prompt, if it is to be repeated."""
        if not self._echoed:
            return b""
        return b"".join(self._chunk(_choice(index, self._echoed)) for index in range(self._n))

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(index, text, logprobs):
                layout = self._layouts[index].of(logprobs) if logprobs else None
                return self._chunk(_choice(index, text, logprobs=layout))
            case ChoiceEnded():
                self._ended.append(event)
                return self._chunk(_choice(event.index, "", reason=finish_reason(event)))
        # Nothing else comes of a prompt without a template: no tools, and no thinking apart.
        return b""

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        choices = [
            _choice(
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
        ]
        return self._whole(answer, choices)


def _choice(
    index: int, text: str, *, reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


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
