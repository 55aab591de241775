"""What the streams of OpenAI's two older APIs have in common: the chunk's head and the end."""

from __future__ import annotations

import time
from typing import Any

from ..generation.errors import GenerationError
from . import sse
from .answer import ChoiceEnded, WholeAnswer, new_id, total_usage
from .error_responses import answer_for
from .generating import FINGERPRINT, AnswerContext
from .usage import usage_object


class OpenAIStream:
    """One answer's identity, and how its stream ends. ``prefix``: of its id; ``kind``: its
    ``object``; ``chunk_kind``: that of its chunks."""

    call_prefix = "call_"

    def __init__(
        self,
        context: AnswerContext,
        *,
        prefix: str,
        kind: str,
        chunk_kind: str,
        include_usage: bool,
    ) -> None:
        self.id = new_id(prefix)
        self.created = int(time.time())
        self._n = context.prepared.n
        self._include_usage = include_usage
        self._ended: list[ChoiceEnded] = []
        self._identity = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": context.model,
            "system_fingerprint": FINGERPRINT,
        }
        # Everything but its choice is the same for each chunk: rendered once.
        head = sse.json_line({**self._identity, "object": chunk_kind})[:-1]
        self._chunk_head = f"data: {head}".encode()
        # While a usage chunk is due, the others carry a null in its place.
        self._chunk_tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        line = sse.json_line(choice).encode()
        return self._chunk_head + b',"choices":[' + line + b"]" + self._chunk_tail

    def closing(self) -> bytes:
        """The usage chunk if one was asked for, and ``[DONE]``."""
        if not self._include_usage:
            return sse.DONE
        # They ended in any order. A whole answer speaks of the first by number.
        endings = sorted(self._ended, key=lambda ended: ended.index)
        usage = usage_object(total_usage(endings), endings[0].detail)
        line = sse.json_line(usage).encode()
        return self._chunk_head + b',"choices":[],"usage":' + line + b"}\n\n" + sse.DONE

    def failure(self, error: GenerationError) -> bytes:
        return sse.event(answer_for(error).openai_body())

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def _whole(self, answer: WholeAnswer, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The non-streaming answer's body."""
        usage = usage_object(answer.usage, answer.choices[0].ending.detail)
        return {**self._identity, "choices": choices, "usage": usage}


def finish_reason(ended: ChoiceEnded) -> str:
    """OpenAI's word for how an answer ended."""
    return "length" if ended.reason == "cancelled" else ended.reason
