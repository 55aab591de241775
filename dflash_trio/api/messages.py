"""POST /v1/messages: an answer in the words of Anthropic's Messages API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..generation.errors import GenerationError, InvalidRequest
from . import sse
from .answer import (
    AnswerEvent,
    Call,
    CallArguments,
    CallBegun,
    CallEnded,
    Choice,
    ChoiceEnded,
    ContentDelta,
    ReasoningDelta,
    WholeAnswer,
    new_id,
)
from .error_responses import answer_for
from .generating import AnswerContext
from .json_body import parse_json_object
from .usage import draft_details, ending_details

SIGNATURE = "dflash-trio-unsigned"
"""Of every block of thinking. Clients want one that is not empty; nothing is signed here, and it
says so. In a conversation that comes back it is not looked at."""
BROKEN_INPUT = "INVALID_JSON"
"""The key of a call's ``input`` that holds the model's text where that is no JSON object. By this
name Anthropic's documentation, too, has broken arguments wrapped."""

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "cancelled": "max_tokens",
    "tool_calls": "tool_use",
}
_EMPTY_TEXT = {"type": "text", "text": ""}


class MessagesEncoder:
    """One answer's identity and its encodings, streamed or whole."""

    call_prefix = "toolu_"

    def __init__(self, context: AnswerContext) -> None:
        self.id = new_id("msg_")
        self._request_id = context.request_id
        self._model = context.model
        self._prompt_tokens = context.prepared.prompt_tokens
        self._open: str | None = None
        """The type of the block that is under way."""
        self._index = -1
        """Of the last block that began."""
        self._has_arguments = False
        """The call that is under way has got some."""
        self._delta_head = self._delta_tail = b""
        """What surrounds the text of the open block's deltas: the same for all of them."""
        self._ended: ChoiceEnded | None = None

    # ----------------------------------------------------------------------------- a stream

    def opening(self) -> bytes:
        """The message without its content. What was cached is not known yet: all of the prompt
        counts as input until the numbers at the end replace these."""
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], end, _usage(self._prompt_tokens, 0, 0))
        return _event("message_start", message=message)

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._encoded, events))

    def _encoded(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(text=""):  # log probabilities alone, which have no place here
                return b""
            case ContentDelta(text=text):
                return self._within("text", _EMPTY_TEXT) + self._delta(text)
            case ReasoningDelta(text=text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._within("thinking", block) + self._delta(text)
            case CallBegun(id=id_, name=name):
                self._has_arguments = False
                call = {"type": "tool_use", "id": id_, "name": name, "input": {}}
                return self._close() + self._begin("tool_use", call)
            case CallArguments(text=text):
                self._has_arguments = True
                return self._delta(text)
            case CallEnded():
                return self._close()
            case ChoiceEnded():
                self._ended = event
                # Clients take the first block's text without looking whether there is one.
                nothing = self._begin("text", _EMPTY_TEXT) if self._index < 0 else b""
                return nothing + self._close()

    def _within(self, kind: str, block: dict[str, Any]) -> bytes:
        """Make sure that a block of this kind is open."""
        if self._open == kind:
            return b""
        return self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        name, key = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        self._delta_head = (
            "event: content_block_delta\n"
            f'data: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{name}","{key}":'
        ).encode()
        self._delta_tail = b"}}\n\n"
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, text: str) -> bytes:
        return self._delta_head + sse.json_line(text).encode() + self._delta_tail

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        last = b""
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            last = _event("content_block_delta", index=self._index, delta=signature)
        elif kind == "tool_use" and not self._has_arguments:
            # Joined pieces must be JSON, which no pieces are not.
            last = self._delta("{}")
        return last + _event("content_block_stop", index=self._index)

    def closing(self) -> bytes:
        """How it ended, with the final numbers, and the end."""
        assert self._ended is not None
        delta = self._end(self._ended)
        usage = usage_object(self._ended)
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failure(self, error: GenerationError) -> bytes:
        body = answer_for(error).anthropic_body(self._request_id)
        return _event("error", error=body["error"], request_id=body["request_id"])

    def keep_alive(self) -> bytes:
        return _event("ping")

    # ------------------------------------------------------------------------------ a whole

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        (choice,) = answer.choices
        end = self._end(choice.ending)
        return self._message(_blocks(choice), end, usage_object(choice.ending))

    @staticmethod
    def _end(ended: ChoiceEnded) -> dict[str, Any]:
        """Anthropic's words for how an answer ended."""
        matched = ended.stop_sequence
        reason = _STOP_REASONS[ended.reason] if matched is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


def usage_object(ended: ChoiceEnded) -> dict[str, Any]:
    """Token counts; a prompt's tokens that were cached count there and not as input."""
    usage = ended.usage
    details = {
        "thinking_tokens": usage.reasoning_tokens,
        **draft_details(usage),
        **ending_details(usage, ended.detail),
    }
    counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return {**counts, "output_tokens_details": details}


def _usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """The content: thinking, text and calls as they came. One empty text if there is nothing."""
    blocks: list[dict[str, Any]] = []
    cut = {event.call for event in choice.events if isinstance(event, CallEnded) and event.cut}
    for event in choice.events:
        match event:
            case ReasoningDelta(_, text):
                blocks.append({"type": "thinking", "thinking": text, "signature": SIGNATURE})
            case ContentDelta(_, text) if text:
                blocks.append({"type": "text", "text": text})
            case CallBegun(_, number, id_, name):
                arguments = call_input(choice.calls[number], cut=number in cut)
                blocks.append({"type": "tool_use", "id": id_, "name": name, "input": arguments})
    return blocks or [dict(_EMPTY_TEXT)]


def call_input(call: Call, *, cut: bool) -> dict[str, Any]:
    """A call's arguments as the object that ``input`` has to be.

    Those that were ``cut`` short are as much of them as is complete; what is no JSON of an object
    all the same is wrapped as text.
    """
    text = call.arguments
    if not text.strip():
        return {}
    parsed = _object_or_none(text)
    if parsed is None and cut:
        parsed = _object_or_none(_complete_part(text))
    return {BROKEN_INPUT: text} if parsed is None else parsed


def _object_or_none(text: str) -> dict[str, Any] | None:
    """By the rules for what clients send: so whatever comes out can be sent as JSON, too."""
    try:
        return parse_json_object(text.encode())
    except InvalidRequest:
        return None


_MARKS = re.compile(r'(:\s*)?"(?:[^"\\]|\\.)*"|["{}\[\],]', re.DOTALL)
"""Whole strings, with the colon before those that are values of an object; what nests or separates
values; and the quote that begins a string without end."""
_CLOSERS = {"{": "}", "[": "]"}
_DEEPEST = 200
"""Brackets; far more than arguments have, and few enough to copy."""


def _complete_part(text: str) -> str:
    """The longest beginning of a JSON text that is complete but for closing brackets, closed.

    A number or word at the very end does not count: it might have gone on.
    """
    closers: list[str] = []
    end, missing = 0, ""
    for mark in _MARKS.finditer(text):
        match mark[0]:
            case '"':
                break
            case "{" | "[" as opened if len(closers) < _DEEPEST:
                closers.append(_CLOSERS[opened])
                end = mark.end()
            case "}" | "]" if closers:
                closers.pop()
                end = mark.end()
            case "," if closers:
                end = mark.start()
            case "{" | "[" | "}" | "]" | ",":
                break
            case _ if mark[1] is not None or closers[-1:] == ["]"]:
                end = mark.end()
            case _:  # a key
                continue
        missing = "".join(reversed(closers))
    return text[:end] + missing
