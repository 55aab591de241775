"""The many words for how much to think, and what they mean together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.api.chat_request import parse_chat_call
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import ThinkingRequest

HI = [{"role": "user", "content": "hi"}]
OFF = ThinkingRequest(enabled=False)


def read(**fields: Any) -> Any:
    return parse_chat_call(json.dumps({"messages": HI, **fields}).encode()).request


def kwargs(value: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": value}}


@pytest.mark.parametrize(
    ("word", "effort"),
    [
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "x-high"),
        ("x-high", "x-high"),
        ("max", "max"),
    ],
)
def test_an_effort_turns_thinking_on_at_its_tier(word: str, effort: Any) -> None:
    wanted = ThinkingRequest(True, None, effort)
    assert read(reasoning_effort=word).thinking == wanted
    assert read(reasoning={"effort": word}).thinking == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"thinking_budget_tokens": 0},
        kwargs(False),
        {**kwargs(False), "reasoning_effort": "high", "thinking_budget_tokens": 5},
        {"thinking": {"type": "disabled"}, "reasoning_effort": "high"},
        {"reasoning": {"enabled": False, "max_tokens": 5}},
    ],
    ids=str,
)
def test_thinking_is_off_if_the_first_that_decides_says_so(fields: dict[str, Any]) -> None:
    assert read(**fields).thinking == OFF


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, ThinkingRequest()),
        ({"thinking": {"type": "adaptive"}}, ThinkingRequest()),
        ({"reasoning": {"summary": "auto"}}, ThinkingRequest()),
        ({"thinking_budget_tokens": -1}, ThinkingRequest()),
        (kwargs(None), ThinkingRequest()),
        (kwargs(True), ThinkingRequest(True)),
        ({"thinking": {"type": "enabled"}}, ThinkingRequest(True)),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, ThinkingRequest(True, 7)),
        ({"thinking_budget_tokens": 7}, ThinkingRequest(True, 7)),
        ({"reasoning": {"max_tokens": 7}}, ThinkingRequest(True, 7)),
        ({"reasoning": {"enabled": True}}, ThinkingRequest(True)),
        ({**kwargs(True), "reasoning_effort": "none"}, ThinkingRequest(True)),
        (
            {"thinking": {"type": "enabled"}, "reasoning_effort": "low"},
            ThinkingRequest(True, None, "low"),
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 7}, "thinking_budget_tokens": 9},
            ThinkingRequest(True, 7),
        ),
        (
            {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
            ThinkingRequest(True, None, "low"),
        ),
    ],
    ids=str,
)
def test_what_is_said_about_thinking_becomes_one_request(
    fields: dict[str, Any], wanted: ThinkingRequest
) -> None:
    assert read(**fields).thinking == wanted


def test_the_templates_own_switch_still_reaches_the_template() -> None:
    assert read(**kwargs(False)).template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort", "xhigh"),
        ({"reasoning_effort": 5}, "reasoning_effort", "a string"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens", "at least 1"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude", "not available"),
        ({"thinking": {}}, "thinking.type", "is required"),
        ({"thinking": {"type": "on"}}, "thinking.type", "enabled, disabled"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            "thinking.budget_tokens",
            "least 1",
        ),
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens", "at least -1"),
        (kwargs("false"), "chat_template_kwargs.enable_thinking", "true or false"),
    ],
)
def test_words_that_nobody_uses_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(**fields)
    assert error.value.param == param
    assert says in str(error.value)
