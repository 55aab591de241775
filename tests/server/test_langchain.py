"""LangChain's models for both APIs on a real server: a tool is called, its result answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.support.models import SMOLLM2
from tests.support.real_models import FORECAST
from tests.support.running import ServerProcess

pytestmark = [pytest.mark.real, pytest.mark.parametrize("first_model", [SMOLLM2], indirect=True)]

TOOL: Any = {
    "name": "forecast",
    "description": "The weather of the next days.",
    "input_schema": FORECAST,
}
OPENAI_TOOL: Any = {
    "type": "function",
    "function": {"name": "forecast", "description": TOOL["description"], "parameters": FORECAST},
}
ONCE = {"Connection": "close"}
"""These models share connections with each other beyond an event loop, and close none of them."""

ASKED = HumanMessage("What is the weather?")


class Yes(BaseModel):
    yes: bool


def chat_openai(server: ServerProcess, **fields: Any) -> BaseChatModel:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        model="smollm2",
        temperature=0,
        max_retries=0,
        timeout=120,
        default_headers=ONCE,
        **fields,
    )


def chats(server: ServerProcess, max_tokens: int) -> BaseChatModel:
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    return chat_openai(server, max_tokens=max_tokens, extra_body=thoughtless)


def responses(server: ServerProcess, max_tokens: int) -> BaseChatModel:
    fields: dict[str, Any] = {"reasoning": {"effort": "none"}, "use_responses_api": True}
    return chat_openai(server, max_tokens=max_tokens, **fields)


def messages(server: ServerProcess, max_tokens: int) -> BaseChatModel:
    fields: dict[str, Any] = {"model_kwargs": {"extra_body": {"temperature": 0}}}
    return ChatAnthropic(
        base_url=server.url,
        api_key=SecretStr("none"),
        model_name="smollm2",
        max_tokens_to_sample=max_tokens,
        max_retries=0,
        timeout=120,
        default_headers=ONCE,
        stop=None,
        thinking={"type": "disabled"},
        **fields,
    )


Make = Callable[[ServerProcess, int], BaseChatModel]
every_api = pytest.mark.parametrize("make", [chats, responses, messages])


def with_demand(model: BaseChatModel) -> Any:
    if isinstance(model, ChatAnthropic):
        return model.bind_tools([TOOL], tool_choice="forecast", parallel_tool_calls=False)
    assert isinstance(model, ChatOpenAI)
    return model.bind_tools([OPENAI_TOOL], tool_choice="forecast", parallel_tool_calls=False)


@every_api
def test_a_tool_is_called_whole_and_streamed_and_its_result_is_answered(
    real_server: ServerProcess, make: Make
) -> None:
    calling = with_demand(make(real_server, 80))
    called: AIMessage = calling.invoke([ASKED])
    (call,) = called.tool_calls
    jsonschema.validate(call["args"], FORECAST)
    assert (call["name"], called.invalid_tool_calls) == ("forecast", [])

    joined: AIMessageChunk | None = None
    for chunk in calling.stream([ASKED]):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    (streamed,) = joined.tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])

    result = ToolMessage("Rain 歪😀.", tool_call_id=call["id"])
    turns = [ASKED, called, result]
    answered = make(real_server, 8).invoke(turns)
    assert isinstance(answered, AIMessage)
    assert answered.text
    assert answered.tool_calls == []
    assert answered.usage_metadata is not None
    assert 0 < answered.usage_metadata["output_tokens"] <= 8
    assert answered.usage_metadata["input_tokens"] > 0


@every_api
def test_a_text_is_the_same_whole_streamed_and_asynchronously(
    real_server: ServerProcess, make: Make
) -> None:
    model = make(real_server, 8)
    whole = model.invoke([ASKED])
    joined: Any = None
    for chunk in model.stream([ASKED]):
        joined = chunk if joined is None else joined + chunk

    async def later() -> tuple[AIMessage, str]:
        text = ""
        async for chunk in model.astream([ASKED]):
            text += chunk.text
        return await model.ainvoke([ASKED]), text

    awaited, text = asyncio.run(later())
    assert whole.text
    assert whole.text == joined.text == awaited.text == text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 8
    assert awaited.usage_metadata == whole.usage_metadata


@every_api
def test_a_form_is_followed(real_server: ServerProcess, make: Make) -> None:
    model = make(real_server, 40)
    formed = model.with_structured_output(Yes, method="json_schema").invoke([ASKED])
    assert isinstance(formed, Yes)
