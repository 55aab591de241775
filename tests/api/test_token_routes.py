"""Counting, tokenizing and rendering over real sockets, on scripted engines in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from dflash_trio.engine.scripted_runner import BOS, EOG, ScriptedRunner
from dflash_trio.routing.router import usable_cores
from tests.support.http_client import PATIENCE, Answer, connect, request
from tests.support.running import chat_body, is_idle, running
from tests.support.scripted import Gate, answer, scripted_config, scripted_load

HI = [{"role": "user", "content": "hi"}]
MESSAGES, RESPONSES = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": HI},
    RESPONSES: {"input": "hi"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/apply-template": {"messages": HI},
}
RIGHT: dict[str, dict[str, Any]] = {
    # The scripted model's tokens are bytes, and its prompt is BOS, each content on a line, ">".
    MESSAGES: {"input_tokens": 5},
    RESPONSES: {"object": "response.input_tokens", "input_tokens": 5},
    "/tokenize": {"tokens": [104, 105]},
    "/detokenize": {"content": "hi"},
    "/apply-template": {"prompt": "hi\n>"},
}


def two_models() -> list[Any]:
    """The second counts one token more for each message."""
    longer = "{% for message in messages %}{{ message.content }}!\n{% endfor %}>"
    return [
        (scripted_config("first", aliases=("one",)), scripted_load()),
        (scripted_config("second", aliases=("two",)), scripted_load(template=longer)),
    ]


def anthropic_error(response: Answer) -> dict[str, Any]:
    """The error object of an answer in Anthropic's shape."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]
    return dict(body["error"])


def error_text(path: str, response: Answer) -> str:
    """The message of an error, which must be in the shape of the path's API."""
    error = anthropic_error(response) if "messages" in path else response.error
    return str(error["message"])


@pytest.mark.parametrize("path", BODIES)
async def test_each_route_answers_with_and_without_the_prefix_and_without_any_name(
    path: str,
) -> None:
    bare = path.removeprefix("/v1")
    async with running((scripted_config("m"), scripted_load())) as server:
        for route in (bare, f"/v1{bare}", f"{bare}?beta=true"):
            for name in ({}, {"model": None}, {"model": "claude-x"}, {"model": "m"}):
                body = {**BODIES[path], **name}
                response = await request(server.port, "POST", route, body)
                assert (response.status, response.json()) == (200, RIGHT[path])


@pytest.mark.parametrize("path", BODIES)
async def test_with_several_models_a_loaded_name_or_alias_must_be_given(path: str) -> None:
    async with running(*two_models()) as server:

        async def ask(**fields: Any) -> Answer:
            return await request(server.port, "POST", path, {**BODIES[path], **fields})

        for absent in ({}, {"model": None}):
            response = await ask(**absent)
            assert response.status == 400
            assert "first, second" in error_text(path, response)
        for unknown in ("auto", "", "First", "claude-x", "歪"):
            response = await ask(model=unknown)
            assert response.status == 404
            assert unknown in error_text(path, response)
        assert (await ask(model=5)).status == 400
        for name in ("first", "one"):
            assert (await ask(model=name)).json() == RIGHT[path]
        for name in ("second", "two"):
            assert (await ask(model=name)).status == 200


async def test_the_named_model_counts_and_no_other_one_in_its_place() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("gone")

    first, (config, _) = two_models()
    second = (config, scripted_load(before_decode=fail, template="{{ messages[0].content }}"))
    async with running(second, first) as server:
        port = server.port
        named = {name: {"messages": HI, "model": name} for name in ("first", "second")}
        counts = {
            name: (await request(port, "POST", MESSAGES, body)).json()["input_tokens"]
            for name, body in named.items()
        }
        assert counts == {"first": 5, "second": 3}
        assert (await server.chat("x")).status == 500
        dead = await request(port, "POST", MESSAGES, named["second"])
        assert dead.status == 503
        assert anthropic_error(dead)["type"] == "overloaded_error"
        assert int(dead.headers["retry-after"]) >= 1
        tokenized = await request(port, "POST", "/tokenize", {"content": "x", "model": "second"})
        assert (tokenized.status, tokenized.error["code"]) == (503, "model_unhealthy")
        assert (await request(port, "POST", MESSAGES, named["first"])).status == 200


async def test_a_count_is_what_a_chat_with_the_same_turns_reports_as_its_prompt() -> None:
    turns = [
        {"role": "system", "content": "Be brief. <|end|>"},
        {"role": "user", "content": "歪😀👩\u200d👧 é"},
        {"role": "assistant", "content": "ok<|begin|>"},
        {"role": "user", "content": ""},
    ]
    prefilled = [*turns, {"role": "assistant", "content": "{"}]
    load = scripted_load(script=answer("x"))
    async with running((scripted_config(), load)) as server:
        port = server.port
        for messages in (turns, prefilled):
            chat = {"messages": messages, "max_tokens": 1}
            usage = (await request(port, "POST", "/v1/chat/completions", chat)).json()["usage"]
            counted = await request(port, "POST", MESSAGES, {"messages": messages})
            apart = {"system": messages[0]["content"], "messages": messages[1:]}
            assert counted.json() == {"input_tokens": usage["prompt_tokens"]}
            assert (await request(port, "POST", MESSAGES, apart)).json() == counted.json()
        items = {"instructions": turns[0]["content"], "input": turns[1:]}
        in_responses = await request(port, "POST", RESPONSES, items)
        same = await request(port, "POST", MESSAGES, {"messages": turns})
        assert in_responses.json()["input_tokens"] == same.json()["input_tokens"]


async def test_control_token_literals_in_a_conversation_count_as_the_text_that_they_are() -> None:
    async with running((scripted_config(), scripted_load())) as server:
        body = {"messages": [{"role": "user", "content": "<|end|>" * 50}]}
        count = (await request(server.port, "POST", MESSAGES, body)).json()["input_tokens"]
    assert count == 3 + 50 * len("<|end|>")


async def test_tokenize_makes_control_tokens_of_literals_unless_told_not_to() -> None:
    async with running((scripted_config(), scripted_load())) as server:

        async def tokens(**fields: Any) -> Any:
            return (await request(server.port, "POST", "/tokenize", fields)).json()["tokens"]

        assert await tokens(content="a<|end|>") == [97, EOG]
        assert await tokens(content="a<|end|>", parse_special=False) == list(b"a<|end|>")
        assert await tokens(content="a", add_special=True) == [BOS, 97]
        assert await tokens(content="<|begin|>a", add_special=True) == [BOS, 97]
        assert await tokens(content="") == []
        assert await tokens(content="é<|end|>", with_pieces=True) == [
            {"id": 195, "piece": [195]},
            {"id": 169, "piece": [169]},
            {"id": EOG, "piece": "<|end|>"},
        ]


async def test_detokenize_gives_back_what_was_tokenized_and_refuses_what_is_no_token() -> None:
    text = "歪😀 <|end|>\u2028 é\n"
    async with running((scripted_config("m"), scripted_load())) as server:
        port = server.port
        body = (await request(port, "POST", "/tokenize", {"content": text})).json()
        assert (await request(port, "POST", "/detokenize", body)).json() == {"content": text}
        half = await request(port, "POST", "/detokenize", {"tokens": [0xF0, 0x9F]})
        assert half.json() == {"content": "\ufffd"}
        for wrong in (258, -1, 2**31, 10**300):
            response = await request(port, "POST", "/detokenize", {"tokens": [1, wrong]})
            assert (response.status, response.error["param"]) == (400, "tokens[1]")
            assert "257" in response.error["message"]


async def test_what_apply_template_shows_is_what_is_tokenized() -> None:
    messages = [{"role": "system", "content": "a"}, *HI, {"role": "assistant", "content": "{"}]
    async with running((scripted_config(), scripted_load())) as server:
        port = server.port
        body = {"messages": messages}
        prompt = (await request(port, "POST", "/apply-template", body)).json()["prompt"]
        assert prompt == "a\nhi\n{"
        given = {"content": prompt, "add_special": True}
        tokens = (await request(port, "POST", "/tokenize", given)).json()["tokens"]
        count = (await request(port, "POST", MESSAGES, body)).json()["input_tokens"]
        assert len(tokens) == count


async def test_a_template_that_refuses_the_conversation_is_a_400_in_the_apis_shape() -> None:
    load = scripted_load(template="{{ raise_exception('no thanks') }}")
    async with running((scripted_config(), load)) as server:
        for path in (MESSAGES, RESPONSES, "/apply-template"):
            response = await request(server.port, "POST", path, BODIES[path])
            assert response.status == 400
            assert "no thanks" in error_text(path, response)


# ----------------------------------------------------------- what they wait for, and do not


async def test_they_answer_while_every_slot_is_busy_and_an_engine_stands_still() -> None:
    gate = Gate(open=False)
    async with running((scripted_config(), scripted_load(before_decode=gate))) as server:
        async with server.chatting("x"):
            await trio.to_thread.run_sync(gate.reached.wait)
            for path, body in BODIES.items():
                response = await request(server.port, "POST", path, body)
                assert response.json() == RIGHT[path]
            status = await server.status()
            assert status["routing"]["waiting"] == 0
            assert status["models"][0]["slots"]["reserved"] == 1
            gate.open()
        await server.until(is_idle)


class CountingGate:
    """Holds every thread that tokenizes "wait", until opened."""

    def __init__(self) -> None:
        self.inside = 0
        self._lock = threading.Lock()
        self._arrivals = threading.Semaphore(0)
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def hold(self, runner: ScriptedRunner) -> None:
        tokenize: Callable[..., list[int]] = runner.vocabulary.tokenize

        def held(text: str, **fields: Any) -> list[int]:
            if "wait" in text:
                with self._lock:
                    self.inside += 1
                self._arrivals.release()
                # A bound, so that a failing test cannot hang the suite.
                self._open.wait(PATIENCE)
            return tokenize(text, **fields)

        runner.vocabulary.tokenize = held  # type: ignore[method-assign]

    async def until_inside(self, count: int) -> None:
        """Wait for so many more threads to have come."""
        for _ in range(count):
            came = partial(self._arrivals.acquire, timeout=PATIENCE)
            assert await trio.to_thread.run_sync(came)


async def test_while_long_counts_run_everything_else_answers_and_only_so_many_run_at_a_time() -> (
    None
):
    gate = CountingGate()
    load = scripted_load(script=answer("1"), on_runner=gate.hold)
    limit = 2 * usable_cores()
    done: list[Answer] = []
    async with running((scripted_config("m"), load)) as server, trio.open_nursery() as nursery:

        async def count() -> None:
            body = {"messages": [{"role": "user", "content": "wait"}]}
            done.append(await request(server.port, "POST", MESSAGES, body))

        for _ in range(limit + 3):
            nursery.start_soon(count)
        await gate.until_inside(limit)
        for path in ("/health", "/v1/models", "/props", "/status/json"):
            assert (await request(server.port, "GET", path)).status == 200
        assert (await server.chat("hi")).status == 200
        assert gate.inside == limit
        assert not done
        gate.open()
    assert [response.status for response in done] == [200] * (limit + 3)


async def test_a_client_that_leaves_a_count_leaves_nothing_behind() -> None:
    gate = CountingGate()
    async with running((scripted_config(), scripted_load(on_runner=gate.hold))) as server:
        async with connect(server.port) as exchange:
            await exchange.send("POST", "/tokenize", b'{"content": "wait"}')
            await gate.until_inside(1)
        gate.open()
        assert (await request(server.port, "POST", "/tokenize", {"content": "x"})).status == 200
        await server.until(is_idle)


async def test_while_loading_they_are_a_503_in_each_apis_own_shape() -> None:
    gate = Gate(open=False)
    load = scripted_load(on_runner=lambda _: gate([]))
    async with running((scripted_config(), load), wait_ready=False) as server:
        for path, body in BODIES.items():
            response = await request(server.port, "POST", path, body)
            assert (response.status, response.headers["retry-after"]) == (503, "5")
            assert "loading" in error_text(path, response)
        gate.open()


async def test_a_shutdown_ends_a_line_of_counts_and_refuses_new_ones() -> None:
    gate = CountingGate()
    limit = 2 * usable_cores()
    done: list[Answer] = []
    async with (
        running((scripted_config(), scripted_load(on_runner=gate.hold))) as server,
        connect(server.port) as kept,
        trio.open_nursery() as nursery,
    ):
        assert (await kept.request("GET", "/health")).status == 200

        async def count() -> None:
            body = {"messages": [{"role": "user", "content": "wait"}]}
            done.append(await request(server.port, "POST", MESSAGES, body))

        for _ in range(limit + 3):
            nursery.start_soon(count)
        await gate.until_inside(limit)
        await server.server._router.drain()
        refused = await kept.request("POST", MESSAGES, b"{}")
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert anthropic_error(refused)["type"] == "overloaded_error"
        gate.open()
    assert sorted(response.status for response in done) == [200] * limit + [503] * 3
    assert gate.inside == limit


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_no_room_can_hold_is_refused_by_its_bytes_untokenized(path: str) -> None:
    gate = CountingGate()
    load = scripted_load(max_ctx=64, on_runner=gate.hold)
    async with running((scripted_config("m"), load)) as server:
        body = {**BODIES[path], "padding": "wait" * 64 * 16}
        response = await request(server.port, "POST", path, body)
        assert response.status == 400
        message = error_text(path, response)
        if path != MESSAGES:
            assert response.error["code"] == "context_length_exceeded"
        for part in ("m: room 64", f"{64 * 64} bytes"):
            assert part in message
    assert gate.inside == 0


# --------------------------------------------------------------------- the shape of errors


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", MESSAGES, b"{", 400, "invalid_request_error"),
        ("POST", MESSAGES, b"", 400, "invalid_request_error"),
        ("POST", MESSAGES, b"[]", 400, "invalid_request_error"),
        ("POST", MESSAGES, b"{}", 400, "invalid_request_error"),
        ("POST", MESSAGES, b'{"a":1,"a":2}', 400, "invalid_request_error"),
        ("POST", MESSAGES, b"x" * 20_000, 413, "request_too_large"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("POST", "/messages/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messagesx", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages/nope", b"{}", 404, "not_found_error"),
        ("GET", "/messages/batches", None, 404, "not_found_error"),
    ],
)
async def test_whatever_is_wrong_under_messages_is_told_in_anthropics_shape(
    method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    config = (scripted_config(), scripted_load())
    async with running(config, max_body_bytes=10_000) as server:
        response = await request(server.port, method, path, body)
    assert (response.status, anthropic_error(response)["type"]) == (status, kind)


async def test_refused_callers_are_told_in_anthropics_shape_too() -> None:
    load = (scripted_config(), scripted_load())
    async with running(load, api_keys=(b"k",)) as server:
        response = await request(server.port, "POST", MESSAGES, BODIES[MESSAGES])
        assert (response.status, anthropic_error(response)["type"]) == (401, "authentication_error")
        let_in = await request(
            server.port, "POST", MESSAGES, BODIES[MESSAGES], **{"x-api-key": "k"}
        )
        assert let_in.status == 200
    async with running((scripted_config(), scripted_load())) as server:
        response = await request(
            server.port, "POST", MESSAGES, BODIES[MESSAGES], origin="https://evil.example"
        )
        assert (response.status, anthropic_error(response)["type"]) == (403, "permission_error")


async def test_both_id_headers_come_with_good_answers_of_messages_and_one_elsewhere() -> None:
    async with running((scripted_config(), scripted_load())) as server:
        ids = {"x-request-id": "mine-1"}
        good = await request(server.port, "POST", MESSAGES, BODIES[MESSAGES], **ids)
        assert good.headers["request-id"] == good.headers["x-request-id"] == "mine-1"
        other = await request(server.port, "POST", RESPONSES, BODIES[RESPONSES], **ids)
        assert "request-id" not in other.headers
        wrong = await request(server.port, "POST", MESSAGES, b"{}", **ids)
        assert wrong.json()["request_id"] == "mine-1"


async def test_an_openai_error_names_its_field_and_an_unknown_model_is_model_not_found() -> None:
    async with running(*two_models()) as server:
        wrong = await request(server.port, "POST", RESPONSES, {"input": [5], "model": "one"})
        assert (wrong.status, wrong.error["param"]) == (400, "input[0]")
        unknown = await request(server.port, "POST", RESPONSES, {"input": "x", "model": "m"})
        assert unknown.error["code"] == "model_not_found"
        chat = await request(server.port, "POST", "/v1/chat/completions", chat_body("x", model="m"))
        assert chat.status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_is_unhealthy_with_its_tokenizer_still_there_counts_nothing(
    path: str,
) -> None:
    async with running((scripted_config("stalled one"), scripted_load())) as server:
        server.server._clients[0].mark_unhealthy("its engine has stalled", may_recover=True)
        response = await request(server.port, "POST", path, BODIES[path])
        assert (response.status, response.headers["retry-after"]) == (503, "30")
        assert "stalled one" in error_text(path, response)
