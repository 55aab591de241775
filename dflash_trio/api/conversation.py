"""A conversation as a dialect's parser hands it on: turns that any model's template can render."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from ..generation.request import GenerationRequest, Message
from ..text.messages import content_text
from .json_body import json_type_name, printable
from .validation import FieldProblem

SYSTEM_ROLES = ("system", "developer")


@frozen
class Conversation:
    """What of a body becomes the prompt, and the model that the body names."""

    messages: tuple[Message, ...]
    continue_final: bool = False
    """The last turn is the assistant's, to be continued and not answered."""
    model: str | None = None

    def for_counting(self, body_bytes: int) -> GenerationRequest:
        """A request with this prompt and nothing to generate. The prompt depends on no more."""
        return GenerationRequest(
            messages=self.messages,
            body_bytes=body_bytes,
            continue_final=self.continue_final,
        )


_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of OpenAI's content parts, each with its key that holds the text."""


def part_text(part: Any, where: str) -> str:
    """The text of one of OpenAI's content parts. Raises FieldProblem below ``where``."""
    if not isinstance(part, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(part)}", where)
    kind = part.get("type")
    key = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if key is None:
        what = printable(kind) if isinstance(kind, str) else json_type_name(kind)
        raise FieldProblem(f"is of type {what}; only text is understood here", where)
    text = part.get(key)
    if not isinstance(text, str):
        raise FieldProblem(f"must be a string, not {json_type_name(text)}", f"{where}.{key}")
    return text


def text_turn(role: str, texts: Iterable[str]) -> Message:
    """A turn of texts, joined as the parts of a content are; empty ones count for nothing."""
    return {"role": role, "content": content_text(list(texts))}


def merge_turns(turns: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """One turn for each run of turns of one role, as if their contents were one's parts.

    For dialects whose messages are pieces of a turn: many templates demand that user and assistant
    alternate. System turns stay as they are and do not end a run, because they leave their places
    anyway: see ``text.messages.normalise``.
    """
    merged: list[Message] = []
    last: int | None = None
    for turn in turns:
        if turn["role"] in SYSTEM_ROLES:
            merged.append(turn)
        elif last is not None and merged[last]["role"] == turn["role"]:
            merged[last] = text_turn(turn["role"], (merged[last]["content"], turn["content"]))
        else:
            last = len(merged)
            merged.append(turn)
    return tuple(merged)
