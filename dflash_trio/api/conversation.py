"""A conversation as a dialect's parser hands it on: turns that any model's template can render."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from ..generation.request import (
    GenerationRequest,
    Message,
    ThinkingRequest,
    Tool,
    ToolChoice,
)
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
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(factory=ToolChoice)
    thinking: ThinkingRequest = field(factory=ThinkingRequest)

    def for_counting(self, body_bytes: int) -> GenerationRequest:
        """A request with this prompt and nothing to generate. The prompt depends on no more."""
        return GenerationRequest(
            messages=self.messages,
            body_bytes=body_bytes,
            continue_final=self.continue_final,
            tools=self.tools,
            tool_choice=self.tool_choice,
            thinking=self.thinking,
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
    alternate. Calls of tools join the turn that they follow; a tool's result stays a turn of its
    own. System turns stay as they are and do not end a run, because they leave their places
    anyway: see ``text.messages.normalise``.
    """
    merged: list[Message] = []
    last: int | None = None
    for turn in turns:
        role = turn["role"]
        if role in SYSTEM_ROLES:
            merged.append(turn)
        elif last is not None and role != "tool" and merged[last]["role"] == role:
            merged[last] = _joined(merged[last], turn)
        else:
            last = len(merged)
            merged.append(turn)
    return tuple(merged)


def _joined(first: Message, second: Message) -> Message:
    joined: dict[str, Any] = {
        **first,
        **text_turn(first["role"], (first.get("content") or "", second.get("content") or "")),
    }
    thinking = [t["reasoning_content"] for t in (first, second) if t.get("reasoning_content")]
    if thinking:
        joined["reasoning_content"] = "\n".join(thinking)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def call_turn(calls: Iterable[tuple[str, str, str]], text: str = "") -> Message:
    """An assistant turn that calls tools: (id, name, JSON text of the arguments) of each."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ],
    }


def result_turn(call_id: str, text: str) -> Message:
    """A tool's result, for the call of this id."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}
