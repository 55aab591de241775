"""POST /v1/messages over real sockets, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.support.http_client import Answer, connect, request
from tests.support.running import (
    DIGITS,
    ENDLESS_DIGITS,
    RunningServer,
    ServerProcess,
    running,
    scripted_process,
    sse_events,
)
from tests.support.scripted import (
    PLAIN_TEMPLATE,
    Gate,
    answer,
    endless_load,
    scripted_config,
    scripted_load,
)

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"q": {}}}}
# Its comment is all that makes it a template of a model that thinks and calls tools.
TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(">", "SAY:") + "{# <think> </think> <tool_call> #}"


async def post(
    server: RunningServer | ServerProcess,
    content: Any = "x",
    path: str = MESSAGES,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Answer:
    messages = [{"role": "user", "content": content}]
    body = {"max_tokens": 100, "messages": messages, **fields}
    return await request(server.port, "POST", path, body, **(headers or {}))


def error_type(response: Answer, status: int) -> str:
    """The type of an error, whose shape must be Anthropic's."""
    body = response.json()
    assert response.status == status, body
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert body["type"] == "error"
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]
    return str(body["error"]["type"])


def text_of(stream: Answer) -> str:
    deltas = [event["delta"] for event in sse_events(stream.text) if "delta" in event]
    return "".join(delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("path", [MESSAGES, "/messages", f"{MESSAGES}?beta=true"])
async def test_a_stream_names_every_event_and_joins_to_the_whole_answer(path: str) -> None:
    async with running((scripted_config("m"), scripted_load(script=answer(ODD_TEXT)))) as server:
        whole = (await post(server, path=path)).json()
        beta = {"anthropic-beta": "unheard-of-2031-01-01", "anthropic-version": "2023-06-01"}
        stream = await post(server, path=path, headers=beta, stream=True)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["x-dflash-model"] == "m"
    assert stream.headers["request-id"] == stream.headers["x-request-id"]
    assert text_of(stream) == ODD_TEXT == whole["content"][0]["text"]
    events = sse_events(stream.text)
    named = [block.split("\n")[0] for block in stream.text.split("\n\n") if block]
    assert named == [f"event: {event['type']}" for event in events]
    assert [line for line in stream.text.splitlines() if line[:1] not in ("e", "d", "")] == []
    assert "[DONE]" not in stream.text
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["STOPPED", "beta"]}, "alpha", "stop_sequence", "STOPPED"),
        ({"stop_sequences": ["nowhere"]}, "alphaSTOPPEDbeta", "end_turn", None),
        ({"stop_sequences": []}, "alphaSTOPPEDbeta", "end_turn", None),
        ({"stop_sequences": None}, "alphaSTOPPEDbeta", "end_turn", None),
        ({"max_tokens": 3}, "alp", "max_tokens", None),
        ({"max_tokens": 1}, "a", "max_tokens", None),
    ],
)
async def test_each_end_is_told_with_its_reason_streamed_and_whole(
    fields: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    load = scripted_load(script=answer("alphaSTOPPEDbeta"))
    async with running((scripted_config(), load)) as server:
        whole = (await post(server, **fields)).json()
        stream = await post(server, stream=True, **fields)
    end = sse_events(stream.text)[-2]
    assert (whole["content"][0]["text"], text_of(stream)) == (text, text)
    for told in (whole, end["delta"]):
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    assert whole["usage"] == end["usage"]
    if reason == "max_tokens":
        assert whole["usage"]["output_tokens"] == fields["max_tokens"]


async def test_an_answer_that_says_nothing_is_an_empty_text() -> None:
    async with running((scripted_config(), scripted_load(script=answer("")))) as server:
        whole = (await post(server)).json()
        stream = await post(server, stream=True)
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert whole["stop_reason"] == "end_turn"
    types = [event["type"] for event in sse_events(stream.text)]
    assert types[1:3] == ["content_block_start", "content_block_stop"]


async def test_a_prefilled_turn_is_continued_with_no_second_header_in_the_prompt() -> None:
    load = scripted_load(script=answer('\n{"a": 1}'))
    messages = [{"role": "user", "content": "JSON>"}, {"role": "assistant", "content": "{"}]
    async with running((scripted_config(), load)) as server:
        whole = (await post(server, messages=messages)).json()
    assert whole["content"] == [{"type": "text", "text": '"a": 1}'}]
    assert whole["usage"]["input_tokens"] == len("BJSON>\n{")


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_empty_contents_and_unknown_fields_are_no_reason_to_fail(content: Any) -> None:
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "x"}
    system = [
        {"type": "text", "text": "a", "cache_control": cached},
        {"type": "text", "text": "b"},
    ]
    extra = {"context_management": {}, "metadata": {"user_id": "u"}, "service_tier": "auto"}
    async with running((scripted_config(), scripted_load(script=answer("1")))) as server:
        response = await post(server, content, path=f"{MESSAGES}?beta=true", system=system, **extra)
    assert response.status == 200, response.text
    usage = response.json()["usage"]
    assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0


BODIES: list[dict[str, Any]] = [
    {"messages": HI},
    {"messages": HI, "system": "Be brief. <|end|>"},
    {"messages": HI, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"messages": HI, "tools": [TOOL]},
    {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"q": "<|end|>"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "<|end|>😀"},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "tools": [TOOL],
    },
    {"messages": [*HI, {"role": "assistant", "content": "{"}]},
    {
        "messages": [*HI, {"role": "system", "content": "Be brief."}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    },
]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, TOOL_TEMPLATE])
@pytest.mark.parametrize("body", BODIES)
async def test_a_count_is_the_input_of_the_answer_to_the_same_body(
    body: dict[str, Any], template: str
) -> None:
    async with running((scripted_config(), scripted_load(template=template))) as server:
        counted = await request(server.port, "POST", COUNT, body)
        whole = await post(server, **{**body, "max_tokens": 1})
        stream = await post(server, **{**body, "max_tokens": 1}, stream=True)
    assert whole.status == 200, whole.text
    expected = counted.json()["input_tokens"]
    assert whole.json()["usage"]["input_tokens"] == expected
    assert sse_events(stream.text)[0]["message"]["usage"]["input_tokens"] == expected


SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, TOOL_TEMPLATE])
async def test_a_forced_call_is_made_whatever_the_model_would_rather_say(
    template: str, stream: bool
) -> None:
    tools = [{**TOOL, "name": name, "input_schema": SCHEMA} for name in ("f", "g")]
    alone = {"disable_parallel_tool_use": True}
    async with running((scripted_config(), scripted_load(template=template))) as server:
        for choice, names in (
            ({"type": "any"}, {"f", "g"}),
            ({"type": "tool", "name": "g"}, {"g"}),
        ):
            response = await post(
                server, tools=tools, tool_choice={**choice, **alone}, max_tokens=500, stream=stream
            )
            if stream:
                _, begun, *deltas, _, end, _ = sse_events(response.text)
                call, reason = begun["content_block"], end["delta"]["stop_reason"]
                assert call["input"] == {}
                parts = [delta["delta"]["partial_json"] for delta in deltas]
                call["input"] = json.loads("".join(parts))
            else:
                (call,) = response.json()["content"]
                reason = response.json()["stop_reason"]
            assert (call["type"], reason) == ("tool_use", "tool_use")
            assert call["name"] in names
            assert call["input"] in ({"a": "x"}, {"a": "y"})


async def test_an_output_format_is_kept_to_by_a_model_that_knows_nothing_of_it() -> None:
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with running((scripted_config(), scripted_load())) as server:
        response = await post(server, output_config=wanted)
    (block,) = response.json()["content"]
    assert json.loads(block["text"]) in ({"a": "x"}, {"a": "y"})


async def test_no_tool_is_offered_or_read_where_none_may_be_called() -> None:
    async with running((scripted_config(), scripted_load(script=answer("<tool_call")))) as server:
        bare = await post(server)
        for choice in ({"type": "none"}, None):
            tools = [TOOL] if choice else []
            response = await post(server, tools=tools, tool_choice=choice)
            assert response.json()["content"] == bare.json()["content"]
            assert response.json()["usage"] == bare.json()["usage"]


async def test_a_body_like_a_coding_agents_first_one_is_answered() -> None:
    system = ["x-anthropic-billing-header: cc_version=1; cch=5", "You are an agent.", "Be brief."]
    body = {
        "system": [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            for text in system
        ],
        "messages": [*HI, {"role": "system", "content": "The directory is /tmp."}],
        "tools": [{**TOOL, "name": f"Tool{n}", "description": "d" * 500} for n in range(24)],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "max_tokens": 32_000,
        "stream": True,
    }
    load = scripted_load(script=answer("1"), max_ctx=60_000)
    async with running((scripted_config("m"), load)) as server:
        stream = await post(server, path=f"{MESSAGES}?beta=true", **body)
    assert stream.status == 200, stream.text
    assert text_of(stream) == "1"
    assert sse_events(stream.text)[-1]["type"] == "message_stop"


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_what_is_wrong_with_a_request_is_told_in_anthropics_shape_and_holds_nothing(
    headers: dict[str, str],
) -> None:
    half = b'{"max_tokens": 4, "messages": [{"role": "user", "content": "x \\ud83d y"}]}'
    bodies: list[Any] = [b"", b"{", b"[]", b'"x"', b"null", b"\xff", half, {}]
    bodies += [{"messages": HI}, {"max_tokens": 5}, {"max_tokens": 5, "messages": "hi"}]
    bodies += [{"max_tokens": 5, "messages": [None]}, {"max_tokens": 0, "messages": HI}]
    bodies += [{"max_tokens": 5, "messages": HI, "stream": True, "stop_sequences": [""]}]
    async with running((scripted_config(), scripted_load(script=answer("1")))) as server:
        for body in bodies:
            response = await request(server.port, "POST", MESSAGES, body, **headers)
            assert error_type(response, 400) == "invalid_request_error"
            assert "Traceback" not in response.text
        get = await request(server.port, "GET", MESSAGES, **headers)
        assert error_type(get, 405) == "invalid_request_error"
        await server.until_idle()
        assert (await post(server, headers=headers)).status == 200


async def test_a_prompt_beyond_the_room_is_refused_with_both_numbers_and_none_at_its_edge() -> None:
    async with running((scripted_config(), scripted_load(max_ctx=64))) as server:
        # BOS, the content, a line end and ">".
        last = await post(server, "x" * (63 - 3))
        assert last.status == 200
        usage = last.json()["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (63, 1)
        assert last.json()["stop_reason"] == "max_tokens"
        for stream in (False, True):
            over = await post(server, "x" * (65 - 3), stream=stream)
            assert error_type(over, 400) == "invalid_request_error"
            assert "65" in over.json()["error"]["message"]
            assert "64" in over.json()["error"]["message"]
        await server.until_idle()


async def test_a_stream_without_a_token_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_trio.server.FIRST_BYTE_PATIENCE", 0.05)
    monkeypatch.setattr("dflash_trio.server.KEEP_ALIVE_INTERVAL", 0.05)
    gate = Gate(open=False)
    load = scripted_load(script=answer("late"), before_decode=gate)
    body = {"max_tokens": 9, "messages": HI, "stream": True}
    async with (
        running((scripted_config(), load)) as server,
        connect(server.port) as exchange,
    ):
        await exchange.send("POST", MESSAGES, json.dumps(body).encode())
        await exchange.read_headers()
        seen = b""
        while seen.count(b'event: ping\ndata: {"type":"ping"}\n\n') < 2:
            seen += await exchange.read_some()
        assert sse_events(seen.decode())[0]["type"] == "message_start"
        gate.open()
        rest = await exchange.read_rest()
        assert text_of(rest) == "late"
        assert sse_events(rest.text)[-1]["type"] == "message_stop"


async def test_a_client_that_leaves_gives_its_slot_back() -> None:
    body = {"max_tokens": 50_000, "messages": HI, "stream": True}
    async with running((scripted_config(), endless_load())) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", MESSAGES, json.dumps(body).encode())
            await exchange.read_headers()
            assert exchange.status == 200
        await server.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_shutdown_that_finalizes_ends_an_answer_properly_and_says_so(stream: bool) -> None:
    answers: list[Answer] = []
    with scripted_process({**ENDLESS_DIGITS, "slots": 2}) as server:
        await server.until_ready()

        async def ask() -> None:
            answers.append(await post(server, max_tokens=50_000, stream=stream))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
            server.signal()
            assert await server.exit_code() == 0
    (answered,) = answers
    assert answered.complete
    if stream:
        events = sse_events(answered.text)
        assert [event["type"] for event in events[-3:]] == [
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        reason, usage, text = events[-2]["delta"]["stop_reason"], events[-2]["usage"], ""
        text = text_of(answered)
    else:
        body = answered.json()
        reason, usage, text = body["stop_reason"], body["usage"], body["content"][0]["text"]
    assert reason == "max_tokens"
    assert usage["output_tokens_details"]["ended_by"] == "server_shutdown"
    assert DIGITS.startswith(text)
    assert usage["output_tokens"] == len(text) > 0
