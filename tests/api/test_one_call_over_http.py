"""An answer that may call once is over with that call, on every route that has tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.testing.dialects import events
from tests.support.http_client import request
from tests.support.running import RunningServer, running
from tests.support.scripted import paced, scripted_config, scripted_load

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}ANSWER:"
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
LIMIT = 600


def asked(route: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    function = {"name": "f", "parameters": PARAMETERS}
    match route:
        case "chat":
            tools: Any = [{"type": "function", "function": function}]
            body = {"messages": messages, "tools": tools, "parallel_tool_calls": False}
            body |= {"max_tokens": LIMIT, "stop": ["STOP"]}
            return "/v1/chat/completions", {**body, **more}
        case "messages":
            tools = [{"name": "f", "input_schema": PARAMETERS}]
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            body = {"messages": messages, "tools": tools, "tool_choice": choice}
            body |= {"max_tokens": LIMIT, "stop_sequences": ["STOP"]}
            return "/v1/messages", {**body, **more}
    tools = [{"type": "function", **function}]
    body = {"input": "hi", "tools": tools, "parallel_tool_calls": False}
    body |= {"max_output_tokens": LIMIT, "stop": ["STOP"]}
    return "/v1/responses", {**body, **more}


async def ending(server: RunningServer, route: str, *, stream: bool, **more: Any) -> Any:
    """How it ended in the route's words, the state of its call, and the tokens that it cost."""
    path, body = asked(route, stream=stream, **more)
    if route == "chat" and stream:
        body["stream_options"] = {"include_usage": True}
    response = await request(server.port, "POST", path, body)
    assert response.status == 200
    if not stream:
        whole = response.json()
        match route:
            case "chat":
                (choice,) = whole["choices"]
                assert len(choice["message"]["tool_calls"]) == 1
                return choice["finish_reason"], None, whole["usage"]["completion_tokens"]
            case "messages":
                assert whole["stop_sequence"] is None
                return whole["stop_reason"], None, whole["usage"]["output_tokens"]
        final = whole
    else:
        told = [json.loads(data) for _, data in events(response.body) if data != "[DONE]"]
        match route:
            case "chat":
                reasons = [c["finish_reason"] for chunk in told for c in chunk["choices"]]
                (reason,) = [reason for reason in reasons if reason is not None]
                return reason, None, told[-1]["usage"]["completion_tokens"]
            case "messages":
                last = told[-2]
                assert last["delta"]["stop_sequence"] is None
                return last["delta"]["stop_reason"], None, last["usage"]["output_tokens"]
        final = told[-1]["response"]
    (item,) = final["output"]
    return final["status"], item["status"], final["usage"]["output_tokens"]


ENDS = {
    "chat": ("tool_calls", None),
    "messages": ("tool_use", None),
    "responses": ("completed", "completed"),
}
EVERY_ROUTE = pytest.mark.parametrize("route", ENDS)
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def saying(text: str, **fields: Any) -> Any:
    """A model that says the text and then goes on and on."""

    def script(history: bytes, _: int) -> int:
        said = len(history.rpartition(b"ANSWER:")[2])
        return text.encode()[said] if said < len(text) else ord("z")

    return scripted_config("m"), scripted_load(script=script, template=TEMPLATE, **fields)


@EVERY_ROUTE
@STREAM_OR_NOT
@pytest.mark.parametrize("said", [CALL + " and STOP", CALL + "\n" + CALL, BROKEN])
async def test_the_call_is_the_end_whatever_the_model_says_behind_it(
    route: str, stream: bool, said: str
) -> None:
    # A step takes so long that there are many left when the server has heard of the call.
    async with running(saying(said, before_decode=paced(0.001))) as server:
        *how, tokens = await ending(server, route, stream=stream)
        assert tuple(how) == ENDS[route]
        # The engine was stopped, and what it said until then was counted.
        assert len(CALL) - 20 < tokens < LIMIT
        status = await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 0)
        (seen,) = [r for r in status["recent_requests"] if r["route"].startswith("/v1/")]
        assert seen["outcome"] == "completed"
        assert seen["completion_tokens"] == tokens


@STREAM_OR_NOT
async def test_a_limit_or_a_stop_string_in_the_call_itself_still_cuts_it(stream: bool) -> None:
    said = CALL.replace("x", "xSTOPx")
    async with running(saying(said)) as server:
        status, item, _ = await ending(server, "responses", stream=stream)
        assert (status, item) == ("completed", "incomplete")
        cut = await ending(server, "responses", stream=stream, max_output_tokens=45)
        assert cut == ("incomplete", "incomplete", 45)


@STREAM_OR_NOT
async def test_log_probabilities_are_the_texts_own_however_the_call_is_told(stream: bool) -> None:
    async with running(saying("pre " + CALL)) as server:
        path, body = asked("responses", stream=stream, temperature=0, top_logprobs=1)
        for _ in range(3):
            response = await request(server.port, "POST", path, body)
            final = (
                json.loads(list(events(response.body))[-1][1])["response"]
                if stream
                else response.json()
            )
            (part,) = final["output"][0]["content"]
            assert part["text"] == "pre"
            assert "".join(entry["token"] for entry in part["logprobs"]) == "pre"
