"""The objects of the Responses API: items of an answer, and the response around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..generation.events import TokenLogprob, Usage
from .chat_completions import logprobs_object
from .usage import draft_details, ending_details

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


def shown_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """As in a chat completion; an empty list where there are none."""
    shown = logprobs_object(logprobs)
    return list(shown["content"]) if shown is not None else []


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": shown_logprobs(logprobs),
    }


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def message_item(
    id_: str, content: Sequence[Mapping[str, Any]], status: ItemStatus
) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(content),
    }


def reasoning_item(
    id_: str, content: Sequence[Mapping[str, Any]], status: ItemStatus
) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": list(content),
        "encrypted_content": None,
    }


def call_item(
    id_: str, call_id: str, name: str, arguments: str, status: ItemStatus
) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def response_usage(usage: Usage, detail: str | None) -> dict[str, Any]:
    """``detail``: why the answer ended before its time."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            # Nobody is billed for writing to the cache here, and nobody counts it.
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **draft_details(usage),
            **ending_details(usage, detail),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_object(
    head: Mapping[str, Any],
    status: Status,
    output: Sequence[Mapping[str, Any]],
    *,
    completed_at: int | None = None,
    error: Mapping[str, str] | None = None,
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``head``: what is the same through the whole of an answer."""
    return {
        **head,
        "status": status,
        "completed_at": completed_at,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(output),
        "usage": usage,
    }
