"""The Responses API over real sockets with the official client, on scripted engines."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
import trio
from pydantic import BaseModel

from dflash_trio.engine.scripted_runner import EOG
from tests.api.responses_checks import check_response, check_stream
from tests.api.responses_client import PATH, HoldsBack, ask, read_until, saying, with_sdk
from tests.support.http_client import Answer, connect, request
from tests.support.running import ENDLESS_DIGITS, running, scripted_process
from tests.support.scripted import scripted_config, scripted_load

ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"


# ------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("limit", [None, 3])
async def test_a_stream_and_a_whole_answer_say_the_same(limit: int | None) -> None:
    async with running(saying(ODD_TEXT if limit is None else "abcdef")) as server:
        whole = await ask(server, max_output_tokens=limit)
        streamed = await ask(server, max_output_tokens=limit, stream=True)
        await server.until_idle()
    body = check_response(whole.json())
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["x-dflash-model"] == "m"
    events = check_stream(streamed.text)
    last = check_response(events[-1]["response"])
    text = body["output"][0]["content"][0]["text"]
    assert text == (ODD_TEXT if limit is None else "abc")
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == last["output"][0]["content"][0]["text"] == text
    assert last["usage"] == body["usage"]
    wanted = ("completed", None) if limit is None else ("incomplete", "max_output_tokens")
    for response in (body, last):
        details = response["incomplete_details"]
        assert (response["status"], details and details["reason"]) == wanted
    assert events[-1]["type"] == f"response.{wanted[0]}"


async def test_the_official_client_reads_whole_answers_and_streams() -> None:
    def use(client: openai.OpenAI) -> None:
        whole = client.responses.create(
            model="m", input="hi", instructions="Be brief.", metadata={"a": "b"}
        )
        assert (whole.output_text, whole.status, whole.metadata) == (
            "hello",
            "completed",
            {"a": "b"},
        )
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.input_tokens + 6
        raw = list(client.responses.create(model="m", input="hi", stream=True))
        assert raw[-1].type == "response.completed"
        assert [event.sequence_number for event in raw] == list(range(len(raw)))
        with client.responses.stream(model="m", input="hi") as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == "hello"

    async with running(saying("hello")) as server:
        await with_sdk(server, use)


async def test_the_official_asynchronous_client_reads_streams() -> None:
    async with (
        running(saying("hello")) as server,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        async with client.responses.stream(model="m", input="hi") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == "hello"
        kept = await client.responses.retrieve(final.id)
        assert kept.output_text == "hello"


async def test_the_official_client_reads_a_limit_in_both_ways() -> None:
    def use(client: openai.OpenAI) -> None:
        whole = client.responses.create(model="m", input="hi", max_output_tokens=3)
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        raw = list(client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True))
        assert raw[-1].type == "response.incomplete"

    async with running(saying("hello")) as server:
        await with_sdk(server, use)


class Car(BaseModel):
    color: Literal["red"]


async def test_the_official_client_parses_an_answer_of_a_given_form() -> None:
    def use(client: openai.OpenAI) -> None:
        parsed = client.responses.parse(model="m", input="hi", text_format=Car)
        assert parsed.output_parsed == Car(color="red")
        with client.responses.stream(model="m", input="hi", text_format=Car) as stream:
            assert stream.get_final_response().output_parsed == Car(color="red")

    async with running(saying('{"color":"red"}')) as server:
        await with_sdk(server, use)


async def test_refusals_are_the_errors_that_the_official_client_knows() -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(model="m", input="hi", max_output_tokens=0)
        assert bad.value.param == "max_output_tokens"
        with pytest.raises(openai.BadRequestError) as long:
            client.responses.create(model="m", input="x" * 3000, stream=True)
        assert long.value.code == "context_length_exceeded"
        for missing in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
        ):
            with pytest.raises(openai.NotFoundError):
                missing("resp_unknown")

    async with running(saying("hello")) as server:
        await with_sdk(server, use)
        await server.until_idle()


async def test_a_full_queue_is_503_also_where_a_stream_was_asked_for() -> None:
    async with running(saying("x" * 500), routing_queue_limit=0) as server:
        async with server.held_slot():
            refused = await ask(server, stream=True)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b'\xef\xbb\xbf{"input":"x"}'])
async def test_malformed_bodies_are_400_in_openais_shape(body: bytes) -> None:
    async with running(saying("hello")) as server:
        refused = await request(server.port, "POST", PATH, body)
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
        assert (await ask(server)).status == 200
        await server.until_idle()


async def test_the_official_client_reads_log_probabilities() -> None:
    def use(client: openai.OpenAI) -> None:
        made = client.responses.create(
            model="m",
            input="hi",
            temperature=0,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        (message,) = made.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert [entry.token for entry in part.logprobs or ()] == list("hello")
        assert {len(entry.top_logprobs) for entry in part.logprobs or ()} == {2}

    async with running(saying("hello")) as server:
        await with_sdk(server, use)


async def test_what_is_counted_is_what_the_answers_usage_says() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    body = {
        "input": [{"role": "user", "content": "hi"}, call, output],
        "instructions": "Be brief.",
        "tools": TOOLS,
    }
    async with running(calling("hello")) as server:
        counted = await request(server.port, "POST", f"{PATH}/input_tokens", body)
        made = await request(server.port, "POST", PATH, body)
    assert counted.json()["input_tokens"] == made.json()["usage"]["input_tokens"]


async def test_a_stream_without_tokens_goes_on_showing_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_trio.server.KEEP_ALIVE_INTERVAL", 0.01)
    hold = HoldsBack()
    async with (
        running(saying("hello world", before_decode=hold)) as server,
        connect(server.port) as exchange,
    ):
        await exchange.send("POST", PATH, b'{"input": "hi", "stream": true}')
        await exchange.read_headers()
        text = await read_until(exchange, "output_text.delta")
        for _ in range(2):
            text += await read_until(exchange, "event: response.in_progress")
        hold.gate.open()
        text += (await exchange.read_rest()).text
    events = check_stream(text)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello world"


# ------------------------------------------------------------------------------- tools

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message | tojson }}\n{% endfor %}ANSWER:"
)


def calling(text: str) -> Any:
    """A model of the Hermes form that says ``text`` to whatever it is asked."""

    def script(history: bytes, _: int) -> int | None:
        said = history.rpartition(b"ANSWER:")[2]
        wanted = text.encode()
        return wanted[len(said)] if len(said) < len(wanted) else EOG

    return (scripted_config("m"), scripted_load(script=script, template=TOOL_TEMPLATE))


async def test_a_call_is_an_item_that_can_be_answered_and_carried_on() -> None:
    said = 'I look.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

    def use(client: openai.OpenAI) -> None:
        tools: Any = TOOLS
        with client.responses.stream(model="m", input="hi", tools=tools) as stream:
            final = stream.get_final_response()
        message, called = final.output
        assert message.type == "message"
        assert called.type == "function_call"
        assert (called.name, json.loads(called.arguments)) == ("f", {"x": 1})
        assert called.call_id.startswith("call_")
        output: Any = {
            "type": "function_call_output",
            "call_id": called.call_id,
            "output": "42",
        }
        following = client.responses.create(
            model="m", input=[output], previous_response_id=final.id, tools=tools
        )
        assert following.usage is not None
        assert final.usage is not None
        assert following.usage.input_tokens > final.usage.input_tokens

    async with running(calling(said)) as server:
        await with_sdk(server, use)
        whole = (await ask(server, tools=TOOLS)).json()
        events = check_stream((await ask(server, tools=TOOLS, stream=True)).text)
    streamed = events[-1]["response"]["output"]
    kinds = ["message", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert [item["type"] for item in streamed] == kinds
    assert whole["output"][1]["arguments"] == streamed[1]["arguments"]


# ---------------------------------------------------------------------------- shutting down


@pytest.mark.real
@pytest.mark.parametrize("stream", [True, False])
async def test_a_shutdown_that_finalizes_ends_a_response_as_a_limit_does(stream: bool) -> None:
    answers: list[Answer] = []
    with scripted_process({**ENDLESS_DIGITS, "slots": 2}) as server:
        await server.until_ready()

        async def wait_for_it() -> None:
            body = {"input": "hi", "stream": stream}
            answers.append(await request(server.port, "POST", PATH, body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_it)
            await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
            server.signal()
            assert await server.exit_code() == 0
    assert answers[0].complete
    response = answers[0].json() if not stream else check_stream(answers[0].text)[-1]["response"]
    assert check_response(response)["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens_details"]["ended_by"] == "server_shutdown"
