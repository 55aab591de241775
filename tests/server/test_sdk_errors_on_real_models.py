"""What the official clients raise when a real server refuses, and where its context ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import trio

from tests.support.http_client import PATIENCE, request
from tests.support.models import GEMMA, SMOLLM2
from tests.support.real_models import anthropic_client, openai_client
from tests.support.running import ServerProcess, is_idle, server_process

pytestmark = pytest.mark.real

KEY = "sk-sesame"
CTX = 1024
WORDS = "word " * 2000
EDGE = 64
"""A context so short that its end is quickly reached."""


@pytest.fixture(scope="module")
def keyed(smollm2: Path) -> Iterator[ServerProcess]:
    """One slot, nobody waits, and a key is wanted."""
    arguments = [str(smollm2), "--model-name=m", "--port=0", f"--max-ctx={CTX}", "--threads=1"]
    arguments += ["--prefix-cache-slots=0"]
    arguments += [f"--api-key={KEY}", "--routing-queue-limit=0"]
    with server_process(arguments) as process:
        trio.run(process.until_ready)
        yield process
    assert "Traceback" not in process.log
    assert KEY not in process.log


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def short_model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def short(models: dict[str, Path], short_model: str) -> Iterator[ServerProcess]:
    """A model with a short context, and steps that are shorter still."""
    arguments = [str(models[short_model]), "--model-name=m", "--port=0", "--threads=1"]
    arguments += ["--prefix-cache-slots=0"]
    with server_process([*arguments, f"--max-ctx={EDGE}", "--chunk=16"]) as process:
        trio.run(process.until_ready)
        yield process
        trio.run(process.until_idle)
    assert "Traceback" not in process.log


Ask = Callable[[openai.OpenAI, anthropic.Anthropic, str, dict[str, Any]], Any]


def ask_chat(client: openai.OpenAI, _: Any, text: str, more: dict[str, Any]) -> Any:
    turns: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=turns, **more)


def ask_completion(client: openai.OpenAI, _: Any, text: str, more: dict[str, Any]) -> Any:
    return client.completions.create(model="m", prompt=text, **more)


def ask_response(client: openai.OpenAI, _: Any, text: str, more: dict[str, Any]) -> Any:
    limit = more.pop("max_tokens", None)
    if limit is not None:
        more["max_output_tokens"] = limit
    return client.responses.create(model="m", input=text, **more)


def ask_message(_: Any, client: anthropic.Anthropic, text: str, more: dict[str, Any]) -> Any:
    turns: Any = [{"role": "user", "content": text}]
    more.setdefault("max_tokens", 1000)
    return client.messages.create(model="m", messages=turns, **more)


ROUTES: dict[str, Ask] = {
    "chat": ask_chat,
    "completions": ask_completion,
    "responses": ask_response,
    "messages": ask_message,
}


@contextlib.contextmanager
def both_clients(
    server: ServerProcess, key: str = "none", *, strict: bool = True
) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    with (
        openai_client(server, key, strict=strict) as one,
        anthropic_client(server, key) as other,
    ):
        yield one, other


async def until_all_is_free(server: ServerProcess) -> None:
    """As ``until_idle``, of the server with a key."""
    with trio.fail_after(PATIENCE):
        while True:
            status = await request(server.port, "GET", "/status/json", **{"x-api-key": KEY})
            if is_idle(status.json()):
                return
            # It is told over there when its client has left: nobody here sets an event.
            await trio.sleep(0.005)


@contextlib.contextmanager
def raises(route: str, name: str) -> Iterator[Any]:
    """The client's own error of this name is raised, and has an id to ask after."""
    with pytest.raises(getattr(anthropic if route == "messages" else openai, name)) as raised:
        yield raised
    assert raised.value.request_id
    if route == "messages":
        assert raised.value.body["request_id"] == raised.value.request_id


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_an_authentication_error(
    keyed: ServerProcess, route: str, stream: bool
) -> None:
    with both_clients(keyed, "wrong") as clients, raises(route, "AuthenticationError") as raised:
        ROUTES[route](*clients, "hi", {"stream": stream})
    error = raised.value.body["error"] if route == "messages" else raised.value.body
    kinds = {"messages": "authentication_error"}
    assert error["type"] == kinds.get(route, "invalid_request_error")
    assert KEY not in str(raised.value.body)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_bad_request_with_both_numbers(
    keyed: ServerProcess, route: str, stream: bool
) -> None:
    with both_clients(keyed, KEY) as clients, raises(route, "BadRequestError") as raised:
        ROUTES[route](*clients, WORDS, {"stream": stream})
    assert f"room {CTX}" in str(raised.value)
    assert "2" in str(raised.value).partition(" prompt tokens")[0]
    if route != "messages":
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("route", ROUTES)
def test_a_limit_below_one_is_a_bad_request_that_names_the_field(
    keyed: ServerProcess, route: str
) -> None:
    with both_clients(keyed, KEY) as clients, raises(route, "BadRequestError") as raised:
        ROUTES[route](*clients, "hi", {"max_tokens": 0})
    assert ("max_output_tokens" if route == "responses" else "max_tokens") in str(raised.value)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_is_a_503_that_says_when_to_come_back(
    keyed: ServerProcess, route: str, stream: bool
) -> None:
    with both_clients(keyed, KEY) as (client, other):
        # Anthropic's ServiceUnavailableError is an InternalServerError too.
        with (
            keyed.busy_slot(**{"x-api-key": KEY}),
            raises(route, "InternalServerError") as raised,
        ):
            ROUTES[route](client, other, "hi", {"stream": stream})
        trio.run(until_all_is_free, keyed)
    assert raised.value.status_code == 503
    assert int(raised.value.response.headers["retry-after"]) >= 1
    if route == "messages":
        assert raised.value.body["error"]["type"] == "overloaded_error"
    else:
        assert (raised.value.code, raised.value.type) == ("queue_full", "server_error")


@pytest.mark.parametrize("route", ["chat", "messages"])
def test_a_route_or_model_that_is_not_there_is_a_not_found_error(
    keyed: ServerProcess, route: str
) -> None:
    with both_clients(keyed, KEY) as (client, other):
        if route == "messages":
            with raises(route, "NotFoundError") as raised:
                other.messages.batches.list()
            assert raised.value.body["error"]["type"] == "not_found_error"
            return
        for path in ("/nothing", "/models/nobody", "/responses/resp_nobody"):
            with raises(route, "NotFoundError") as raised:
                client.get(path, cast_to=object)
            assert raised.value.code == "not_found"


def tokens_of(answer: Any) -> tuple[int, int, str]:
    """Prompt and answer in tokens, and why it ended. ``answer``: of any route, whole."""
    end = getattr(answer, "status", None) or getattr(answer, "stop_reason", None)
    usage = answer.usage.model_dump()
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
    said = usage.get("completion_tokens") or usage.get("output_tokens")
    return prompt, said, end or answer.choices[0].finish_reason


def tokens_of_stream(route: str, events: list[Any]) -> tuple[int, int, str]:
    """The same of a stream."""
    *_, before, last = events
    if route == "responses":
        return tokens_of(last.response)
    if route == "messages":
        return before.usage.input_tokens, before.usage.output_tokens, before.delta.stop_reason
    usage = last.usage
    return usage.prompt_tokens, usage.completion_tokens, before.choices[0].finish_reason


def of_so_many_tokens(client: openai.OpenAI, route: str, wanted: int) -> str:
    """A text whose prompt has exactly so many tokens on this route."""

    def count(text: str) -> int:
        if route == "completions":
            body = {"content": text, "add_special": True}
            tokenized: Any = client.post("/tokenize", cast_to=object, body=body)
            return len(tokenized["tokens"])
        return client.responses.input_tokens.count(model="m", input=text).input_tokens

    text = "a" + " a" * (wanted - count("a"))
    assert count(text) == wanted
    return text


LENGTHS = {"responses": "incomplete", "messages": "max_tokens"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("left", "limit"), [(2, None), (2, 1), (1, 100)])
def test_a_prompt_that_leaves_room_is_answered_up_to_the_contexts_end(
    short: ServerProcess, route: str, left: int, limit: int | None
) -> None:
    # The middle one is asked for whole, the others as streams.
    stream = limit != 1
    with both_clients(short, strict=route != "completions") as (client, other):
        text = of_so_many_tokens(client, route, EDGE - left)
        more: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        if stream:
            more["stream"] = True
            if route in ("chat", "completions"):
                more["stream_options"] = {"include_usage": True}
        if route != "messages":
            # Messages have no word for it: there the model goes on by itself.
            more["extra_body"] = {"ignore_eos": True, "temperature": 0}
        else:
            more["extra_body"] = {"temperature": 0}
        answer = ROUTES[route](client, other, text, more)
        told = tokens_of_stream(route, list(answer)) if stream else tokens_of(answer)
    assert told == (EDGE - left, min(left, limit or left), LENGTHS.get(route, "length"))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("over", [0, 1])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers_and_counted(
    short: ServerProcess, route: str, over: int
) -> None:
    with both_clients(short) as (client, other):
        text = of_so_many_tokens(client, route, EDGE + over)
        for more in ({}, {"stream": True}, {"max_tokens": 1}):
            with raises(route, "BadRequestError") as raised:
                ROUTES[route](client, other, text, dict(more))
            assert f"{EDGE + over} prompt tokens, room {EDGE}" in str(raised.value)
        if route == "messages":
            turns: Any = [{"role": "user", "content": text}]
            counted = other.messages.count_tokens(model="m", messages=turns)
            assert counted.input_tokens == EDGE + over


@pytest.mark.parametrize("size", [31, 32, 33, 34, 40])
def test_prompts_about_as_long_as_the_steps_that_read_them_are_answered(
    short: ServerProcess, size: int
) -> None:
    with both_clients(short) as (client, other):
        text = of_so_many_tokens(client, "chat", size)
        more = {"max_tokens": 2, "extra_body": {"ignore_eos": True}}
        answer = ROUTES["chat"](client, other, text, more)
    assert tokens_of(answer) == (size, 2, "length")
