"""Clients that are wrong in themselves and must be told so."""

from __future__ import annotations

import trio

from . import malformed
from .asking import (
    ask_control,
)
from .judge import PATHS, Violation, check_answer
from .town import CHAT, Client
from .wire import Answer, Malformed, Response, chunked, connect, request_bytes


async def over_long(client: Client) -> str:
    """A prompt that fits no model, whether or not anything is busy."""
    largest = max(model.max_ctx for model in client.setup.models)
    content = client.words(int(largest * client.chance.choice((1.1, 1.5, 3))))
    if client.chance.random() < 0.3:
        content = "x" * (largest * 65)  # so long that it is not even tokenized
    question = client.asking(content, 8)
    async with connect(client.port) as wire:
        stream = client.chance.random() < 0.5
        response = await wire.request("POST", question.path, question.body(stream=stream))
        answer = await response.rest()
    label = check_answer(answer, {400}, api=question.api)
    error = answer.json()["error"]
    right = "room" in error["message"]
    if question.api != "messages":
        param = {"chat": "messages", "responses": "input", "completions": "prompt"}[question.api]
        right = error["code"] == "context_length_exceeded" and error["param"] == param
    if not right:
        raise Violation(f"{label} for a prompt that is too long: {answer.body[:200]!r}")
    return label


async def huge_body(client: Client) -> str:
    """Larger than the limit: 413 if it says so, else 400 once it is too long for any room."""
    size = client.setup.max_body_bytes + 1 + client.chance.randrange(2**20)
    announced = client.chance.random() < 0.5
    async with connect(client.port) as wire:
        if announced:
            head = request_bytes("POST", CHAT, b"", {"Content-Length": str(size)})
            data = head + b" " * size
        else:
            head = request_bytes("POST", CHAT, b"", {"Transfer-Encoding": "chunked"})
            data = head + chunked([b" " * 65536] * (size // 65536 + 1))
        answers: list[Answer | Malformed] = []

        async def read() -> None:
            try:
                answers.append(await Response(wire, "POST").rest())
            except Malformed as error:
                answers.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wire.send(data)
        (answer,) = answers
        if isinstance(answer, Malformed):
            raise answer
        label = check_answer(answer, {413 if announced else 400})
        _check_closing(answer)
    return label


async def half_body(client: Client) -> str:
    """Stops in the middle of its body and stays: 408 when the stall timeout is over."""
    question = client.long_question()
    body = question.body()
    whole = request_bytes("POST", question.path, body)
    async with connect(client.port) as wire:
        begin = trio.current_time()  # before the server can know: to be late here only lengthens
        await wire.send(whole[: -client.chance.randint(1, len(body))])
        answer = await Response(wire, "POST").rest()
        label = check_answer(answer, {408}, api=question.api)
        if trio.current_time() - begin < 0.8 * client.setup.stall_timeout:
            raise Violation(f"a 408 after {trio.current_time() - begin:.2f} s already")
        _check_closing(answer)
        await wire.until_closed()
    return label


async def malformed_body(client: Client) -> str:
    api, body = client.chance.choice(malformed.BODIES)
    async with connect(client.port) as wire:
        answer = await (await wire.request("POST", PATHS[api], body)).rest()
        label = check_answer(answer, {400}, api=api)
        # The body was read to its end, so the connection lives on.
        await ask_control(client, wire)
    return label


async def malformed_http(client: Client) -> str:
    data, status = client.chance.choice(malformed.HTTP)
    async with connect(client.port) as wire:
        await wire.send(data)
        answer = await Response(wire, "GET").rest()
        label = check_answer(answer, {status})
        _check_closing(answer)
        if rest := await wire.until_closed():
            raise Violation(f"more than one answer to {data[:60]!r}: {rest[:200]!r}")
    return label


def _check_closing(answer: Answer) -> None:
    if answer.headers.get("connection", "").lower() != "close":
        raise Violation(f"a {answer.status} without Connection: close")
