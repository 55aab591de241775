"""Token counts as OpenAI's two older APIs lay them out."""

from __future__ import annotations

from typing import Any

from ..generation.events import Usage


def usage_object(usage: Usage, detail: str | None = None) -> dict[str, Any]:
    """``detail``: why an answer ended before its time."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **draft_details(usage),
            **ending_details(usage, detail),
        },
    }


def draft_details(usage: Usage) -> dict[str, int]:
    """What became of guesses, by OpenAI's names for them, where the model has a draft."""
    if usage.accepted_drafts is None or usage.rejected_drafts is None:
        return {}
    return {
        "accepted_prediction_tokens": usage.accepted_drafts,
        "rejected_prediction_tokens": usage.rejected_drafts,
    }


def ending_details(usage: Usage, detail: str | None) -> dict[str, str]:
    """How thinking and answer ended, where that is told: no API has words of its own for it."""
    found = {"thinking_closed_by": usage.thinking_closed_by, "ended_by": detail}
    return {name: how for name, how in found.items() if how is not None}
