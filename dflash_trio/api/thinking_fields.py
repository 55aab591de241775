"""The fields of chat completions that say how much to think, in the words of several APIs.

OpenAI's ``reasoning_effort``, OpenRouter's ``reasoning``, Anthropic's ``thinking``, llama.cpp's
``thinking_budget_tokens`` and ``chat_template_kwargs.enable_thinking``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ..config import Effort
from ..generation.request import ThinkingRequest
from .field_schemas import describe, one_of, schema_field
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter, in_range

EFFORT_WORDS: Mapping[str, Effort | None] = {
    "none": None,
    "minimal": None,
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "x-high",
    "x-high": "x-high",
    "max": "max",
}
"""What clients call an effort; ``None``: no thinking at all."""

THINKING_TYPES = ("enabled", "disabled", "adaptive")


@frozen
class EffortWord:
    """One of EFFORT_WORDS, understood."""

    effort: Effort | None


def _structure_effort(value: Any, _: Any) -> EffortWord:
    if not isinstance(value, str):
        raise FieldProblem(f"must be a string, not {json_type_name(value)}")
    if value not in EFFORT_WORDS:
        raise FieldProblem(f"must be one of {', '.join(EFFORT_WORDS)}, not {printable(value)}")
    return EffortWord(EFFORT_WORDS[value])


converter.register_structure_hook(EffortWord, _structure_effort)
describe(EffortWord, one_of(*EFFORT_WORDS))


@frozen
class ThinkingObject:
    """``thinking``: ``adaptive`` leaves it to the model, as saying nothing does."""

    type: str = schema_field(one_of(*THINKING_TYPES))
    budget_tokens: int | None = field(default=None, validator=in_range(1))

    @type.validator
    def _known_type(self, _: Any, value: str) -> None:
        if value not in THINKING_TYPES:
            raise FieldProblem(
                f"must be one of {', '.join(THINKING_TYPES)}, not {printable(value)}", "type"
            )


@frozen
class ReasoningObject:
    """``reasoning``. Its other keys are ignored."""

    effort: EffortWord | None = None
    max_tokens: int | None = field(default=None, validator=in_range(1))
    enabled: bool | None = None
    exclude: bool | None = field(default=None)

    @exclude.validator
    def _not_available(self, _: Any, value: bool | None) -> None:
        if value:
            raise FieldProblem("is not available; thinking is always shown", "exclude")


def thinking_request(
    *,
    effort: EffortWord | None = None,
    reasoning: ReasoningObject | None = None,
    thinking: ThinkingObject | None = None,
    budget_tokens: int | None = None,
    enable_thinking: bool | None = None,
) -> ThinkingRequest:
    """What all of it together asks for.

    Whether to think is decided by the first of these that says so: ``enable_thinking``, the type
    of ``thinking``, ``reasoning.enabled``, an effort, a budget. ``budget_tokens``: -1 is no
    budget, 0 is no thinking.
    """
    reasoning = reasoning or ReasoningObject()
    word = effort or reasoning.effort
    typed = (
        {"enabled": True, "disabled": False}.get(thinking.type) if thinking is not None else None
    )
    budget = thinking.budget_tokens if thinking is not None else None
    if budget is None and budget_tokens is not None and budget_tokens >= 0:
        budget = budget_tokens
    if budget is None:
        budget = reasoning.max_tokens
    said = (
        enable_thinking,
        typed,
        reasoning.enabled,
        None if word is None else word.effort is not None,
        None if budget is None else budget > 0,
    )
    enabled = next((answer for answer in said if answer is not None), None)
    if enabled is False:
        return ThinkingRequest(enabled=False)
    return ThinkingRequest(enabled, budget or None, word.effort if word is not None else None)
