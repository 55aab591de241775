"""Chats and completions as OpenAI's own client sees them, checking strictly what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import openai
import pytest
import trio

from dflash_trio.engine.scripted_runner import EOG, Script
from tests.support.running import running
from tests.support.scripted import PLAIN_TEMPLATE, answer, scripted_config, scripted_load

T = TypeVar("T")

ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Its comment is all that makes it a template of a model that thinks and calls tools.
TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(">", "SAY:") + "{# <think> </think> <tool_call> #}"
CALLING = (
    "<think>\nHm, é.\n</think>\n\nLet me see."
    '<tool_call>\n{"name": "f", "arguments": {"q": "歪"}}\n</tool_call>'
)


def saying(text: str, after: str = "SAY:") -> Script:
    """As ``answer``, after another mark than ``>``."""

    def script(history: bytes, _: int) -> int | None:
        said = history.rpartition(after.encode())[2]
        wanted = text.encode()
        return wanted[len(said)] if len(said) < len(wanted) else EOG

    return script


async def with_sdk(port: int, use: Callable[[openai.OpenAI], T], *, strict: bool = True) -> T:
    """Run something with the official client on a thread, which checks what it is told."""

    def work() -> T:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=strict,
        ) as client:
            return use(client)

    return await trio.to_thread.run_sync(work)


def one_model(text: str, *, slots: int = 1) -> Any:
    load = scripted_load(script=answer(text), slots=slots)
    return running((scripted_config("m", max_concurrency=slots), load))


def tool_model() -> Any:
    load = scripted_load(script=saying(CALLING), template=TOOL_TEMPLATE)
    return running((scripted_config("m"), load))


async def test_thinking_and_calls_are_read_whole_and_streamed_alike_and_can_be_sent_back() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, list[Any], Any]:
        asked: Any = {"model": "m", "messages": HI, "tools": [TOOL], "max_tokens": 1500}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        message = whole.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
        asked["messages"] = [*HI, message.model_dump(exclude_none=True), result]
        return whole, chunks, client.chat.completions.create(**asked)

    async with tool_model() as server:
        whole, chunks, again = await with_sdk(server.port, use)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "Let me see."
    assert choice.message.reasoning_content.strip() == "Hm, é."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "f",
        '{"q": "歪"}',
    )
    assert call.id.startswith("call_")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == choice.message.content
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == choice.message.reasoning_content
    parts = [part for d in deltas for part in d.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert parts[0].function.name == "f"
    assert [part.id for part in parts[1:]] == [None] * (len(parts) - 1)
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens


async def test_several_answers_come_with_an_index_each() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, list[Any]]:
        asked: Any = {"model": "m", "messages": HI, "n": 3}
        return (
            client.chat.completions.create(**asked),
            list(client.chat.completions.create(**asked, stream=True)),
        )

    async with one_model("abc", slots=3) as server:
        whole, chunks = await with_sdk(server.port, use)
        await server.until_idle()
    assert [(c.index, c.message.content) for c in whole.choices] == [(i, "abc") for i in range(3)]
    # BOS, two bytes, a line end and ">", once; three bytes and an end for each.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    texts = ["", "", ""]
    reasons = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index].append(choice.finish_reason)
    assert texts == ["abc"] * 3
    assert all(each[-1] == "stop" and set(each[:-1]) == {None} for each in reasons)


@pytest.mark.parametrize("top", [0, 2])
async def test_log_probabilities_cover_the_text_whole_and_streamed(top: int) -> None:
    def use(client: openai.OpenAI) -> tuple[Any, list[Any]]:
        asked: Any = {"model": "m", "messages": HI, "logprobs": True, "top_logprobs": top}
        return (
            client.chat.completions.create(**asked, temperature=0),
            list(client.chat.completions.create(**asked, temperature=0, stream=True)),
        )

    async with one_model("aé") as server:
        whole, chunks = await with_sdk(server.port, use)
    entries = whole.choices[0].logprobs.content
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries
    assert bytes(b for entry in entries for b in entry.bytes).decode().startswith("aé")
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == top for entry in entries)


async def test_a_form_is_followed_whatever_the_model_would_say() -> None:
    def use(client: openai.OpenAI) -> Any:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": ["STOPPED 歪"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        named = {"name": "x", "schema": schema}
        return client.chat.completions.create(
            model="m",
            messages=HI,
            response_format={"type": "json_schema", "json_schema": named},  # type: ignore[arg-type]
        )

    async with running((scripted_config("m"), scripted_load())) as server:
        whole = await with_sdk(server.port, use)
    assert whole.choices[0].message.content == '{"a": "STOPPED 歪"}'


async def test_a_completion_continues_a_text_whole_and_streamed_alike() -> None:
    asked: Any = {"model": "m", "prompt": "Say>", "max_tokens": 100}

    def stream(client: openai.OpenAI) -> list[Any]:
        options: Any = {"include_usage": True}
        return list(client.completions.create(**asked, stream=True, stream_options=options))

    async with one_model(ODD_TEXT) as server:
        whole = await with_sdk(server.port, lambda client: client.completions.create(**asked))
        # OpenAI streams a null finish_reason until the end, which its client's type does not know.
        *chunks, last = await with_sdk(server.port, stream, strict=False)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason, whole.model) == (ODD_TEXT, "stop", "m")
    # BOS and the text: no template is in between.
    assert whole.usage.prompt_tokens == len("BSay>")
    assert "".join(chunk.choices[0].text for chunk in chunks) == ODD_TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert last.choices == []
    assert last.usage == whole.usage


async def test_a_completion_takes_token_ids_and_stops_and_limits() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, Any, Any]:
        create = client.completions.create
        ids = list(b"Say>")
        return (
            create(model="m", prompt=ids, max_tokens=2),
            create(model="m", prompt=[ids], stop=["d"]),
            create(model="m", prompt="Say>", echo=True),
        )

    async with one_model("abcdef") as server:
        cut, stopped, echoed = await with_sdk(server.port, use)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("ab", "length")
    assert cut.usage.completion_tokens == 2
    # The ids are all of it: nothing is put in front of them.
    assert cut.usage.prompt_tokens == 4
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("abc", "stop")
    assert echoed.choices[0].text == "Say>abcdef"


async def test_a_completions_log_probabilities_are_lists_of_its_tokens() -> None:
    def use(client: openai.OpenAI) -> Any:
        return client.completions.create(model="m", prompt=">", logprobs=1, temperature=0)

    async with one_model("aé") as server:
        whole = await with_sdk(server.port, use)
    logprobs = whole.choices[0].logprobs
    assert logprobs.tokens[0] == "a"
    assert logprobs.text_offset[:3] == [0, 1, 1]
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert set(logprobs.top_logprobs[0]) == {"a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [999_999]}, "prompt[0]"),
        ({"prompt": "x", "n": 5}, "n"),
    ],
)
async def test_a_completion_that_cannot_be_made_is_refused_and_names_why(
    fields: dict[str, Any], param: str
) -> None:
    def use(client: openai.OpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="m", **fields)
        return error.value

    async with one_model("x") as server:
        assert (await with_sdk(server.port, use)).param == param
        await server.until_idle()
