"""Token counts as OpenAI's two older APIs lay them out."""

from __future__ import annotations

from typing import Any

from ..generation.events import Usage


def usage_object(usage: Usage, detail: str | None = None) -> dict[str, Any]:
    """``detail``: why an answer ended before its time."""
    completion: dict[str, Any] = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.thinking_closed_by is not None:
        completion["thinking_closed_by"] = usage.thinking_closed_by
    if detail is not None:
        completion["ended_by"] = detail
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": completion,
    }
