"""What a prompt says of tools and thinking, whatever the template knows of them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trio.config import ModelConfig
from dflash_trio.generation.request import (
    GenerationRequest,
    PreparedPrompt,
    ThinkingRequest,
    Tool,
    ToolChoice,
)
from dflash_trio.routing.served_model import ServedModel
from dflash_trio.text.chat_template import TemplateError
from tests.support.scripted import PLAIN_TEMPLATE

from .test_served_model import served

WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"at": {}}})
KNOWS_TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]\n{% endif %}"
    + PLAIN_TEMPLATE
)
OPENS = PLAIN_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
ASKS = (
    PLAIN_TEMPLATE
    + "{% if add_generation_prompt and enable_thinking is defined %}"
    + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LEAVES_IT = PLAIN_TEMPLATE + "{# </think> #}"


def ask(content: str = "hi", **changes: Any) -> GenerationRequest:
    messages = changes.pop("messages", ({"role": "user", "content": content},))
    return GenerationRequest(messages=messages, body_bytes=100, **changes)


def text_of(model: ServedModel, request: GenerationRequest) -> str:
    return model.render_chat(request).text


def thinks_open(prepared: PreparedPrompt) -> bool:
    assert prepared.thinking is not None
    return prepared.thinking.new_splitter().thinking


# -------------------------------------------------------------------------------------- tools


def test_a_template_that_knows_tools_is_given_them() -> None:
    assert text_of(served(KNOWS_TOOLS), ask(tools=(WEATHER,))) == "[weather ]\nhi\n>"


def test_a_template_that_knows_none_has_them_in_the_system_turn() -> None:
    text = text_of(served(), ask(tools=(WEATHER,)))
    assert "weather" in text
    assert "Tells the weather." in text
    assert text.endswith("hi\n>")


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, KNOWS_TOOLS])
def test_tools_that_may_not_be_called_are_not_shown_and_calls_are_not_read(template: str) -> None:
    model = served(template)
    request = ask(tools=(WEATHER,), tool_choice=ToolChoice("none"))
    assert text_of(model, request) == "hi\n>"
    assert model.prepare(request).tool_format is None


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, KNOWS_TOOLS])
def test_offered_tools_mean_that_calls_are_read(template: str) -> None:
    prepared = served(template).prepare(ask(tools=(WEATHER,)))
    assert prepared.tool_format == "hermes"
    assert prepared.tools == (WEATHER,)
    assert prepared.constraint is None


def test_earlier_calls_and_results_show_also_where_the_template_knows_no_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain, 42"},
    )
    text = text_of(served(), ask(messages=turns))
    assert "weather" in text
    assert "rain, 42" in text


def test_a_call_that_is_demanded_is_under_a_grammar() -> None:
    prepared = served().prepare(ask(tools=(WEATHER,), tool_choice=ToolChoice("required")))
    assert prepared.constraint is not None


# ----------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("template", "enabled", "end", "is_open"),
    [
        (OPENS, None, "><think>\n", True),
        (OPENS, True, "><think>\n", True),
        (OPENS, False, "><think>\n\n</think>\n\n", None),
        (ASKS, None, ">", False),
        (ASKS, True, "><think>\n", True),
        (ASKS, False, "><think>\n\n</think>\n\n", None),
        (LEAVES_IT, None, ">", False),
        (LEAVES_IT, True, "><think>\n", True),
        (LEAVES_IT, False, ">", None),
    ],
)
def test_thinking_is_opened_and_closed_as_asked(
    template: str, enabled: bool | None, end: str, is_open: bool | None
) -> None:
    """``is_open`` None: the whole output is answer."""
    model = served(template)
    request = ask(thinking=ThinkingRequest(enabled=enabled))
    assert text_of(model, request).endswith("hi\n" + end)
    prepared = model.prepare(request)
    if is_open is None:
        assert prepared.thinking is None
    else:
        assert thinks_open(prepared) is is_open


@pytest.mark.parametrize(("option", "is_open"), [("auto", False), ("on", True), ("off", None)])
def test_the_operators_word_counts_where_the_request_says_nothing(
    option: str, is_open: bool | None
) -> None:
    model = served(ASKS, thinking=option)
    prepared = model.prepare(ask())
    assert (thinks_open(prepared) if prepared.thinking else None) is is_open
    assert model.prepare(ask(thinking=ThinkingRequest(enabled=False))).thinking is None


def test_thinking_cannot_be_turned_on_where_the_template_knows_none() -> None:
    with pytest.raises(TemplateError, match="thinking is set to on"):
        served(PLAIN_TEMPLATE, thinking="on")


def test_a_model_that_does_not_think_ignores_all_of_it() -> None:
    asked = ThinkingRequest(enabled=True, budget_tokens=5, effort="low")
    model = served(PLAIN_TEMPLATE)
    assert model.prepare(ask(thinking=asked)).thinking is None
    assert text_of(model, ask(thinking=asked)) == text_of(model, ask())


def limit(model: ServedModel, max_tokens: int | None = 100, **asked: Any) -> tuple[int, str]:
    request = ask(max_tokens=max_tokens, thinking=ThinkingRequest(**asked))
    plan = model.prepare(request).thinking
    assert plan is not None
    return plan.limit, plan.limited_by


def test_thinking_is_bounded_by_the_first_of_budget_tier_ceiling_and_room_for_the_reply() -> None:
    model = served(
        OPENS,
        max_ctx=1000,
        hard_limit_reply_budget=30,
        think_max_tokens=60,
        reasoning_efforts={"low": 10},
    )
    assert limit(model) == (60, "budget")
    assert limit(model, effort="low") == (10, "budget")
    assert limit(model, effort="max") == (60, "budget")
    assert limit(model, budget_tokens=7) == (7, "budget")
    assert limit(model, budget_tokens=7, effort="max") == (7, "budget")
    assert limit(model, budget_tokens=5000) == (60, "budget")
    # The reply keeps its budget, but never more than half.
    assert limit(model, max_tokens=80) == (50, "reply_budget")
    assert limit(model, max_tokens=40) == (20, "reply_budget")
    assert limit(model, max_tokens=1) == (1, "reply_budget")


def test_what_there_is_no_room_for_does_not_count_as_room_for_the_reply() -> None:
    model = served(OPENS, max_ctx=100, think_max_tokens=1000, hard_limit_reply_budget=1000)
    prompt = len(model.tokenize_chat(ask()))
    left = 100 - prompt
    assert limit(model, max_tokens=5000) == (left - left // 2, "reply_budget")


def test_a_template_hears_the_effort_in_the_words_it_knows() -> None:
    model = served(PLAIN_TEMPLATE + "{{ reasoning_effort }}{# </think> #}")
    for effort, word in (("low", "low"), ("medium", "medium"), ("x-high", "high"), ("max", "high")):
        assert text_of(model, ask(thinking=ThinkingRequest(effort=effort))).endswith(f">{word}")


def test_a_turn_that_is_continued_may_be_in_the_middle_of_a_thought() -> None:
    def continued(content: str) -> PreparedPrompt:
        turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": content})
        return served(OPENS).prepare(ask(messages=turns, continue_final=True))

    assert thinks_open(continued("<think>\nperhaps"))
    assert continued("<think>\nperhaps</think>So").thinking is None
    assert continued("So").thinking is None


def test_the_config_of_a_tool_parser_wins_over_the_template() -> None:
    model = served(KNOWS_TOOLS, tool_parser="mistral")
    assert isinstance(model.config, ModelConfig)
    assert model.prepare(ask(tools=(WEATHER,))).tool_format == "mistral"
