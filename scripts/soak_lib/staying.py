"""Clients that stay to the end and must get everything, or a 503 for a full queue."""

from __future__ import annotations

import trio

from .asking import (
    ask_control,
    check_asked,
    read_stream,
    stream_body,
)
from .judge import (
    QUEUE_FULL,
    Violation,
    check_answer,
)
from .town import GREETINGS, TINY_WINDOW, Client
from .wire import Malformed, Response, connect, request_bytes


async def stream_to_the_end(client: Client) -> str:
    question, usage = client.question(), client.chance.random() < 0.8
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, stream_body(question, usage))
        return await read_stream(client, response, question, with_usage=usage)


async def whole_to_the_end(client: Client) -> str:
    question, request_id = client.question(), f"soak-{client.number}"
    async with connect(client.port) as wire:
        headers = {"X-Request-Id": request_id}
        response = await wire.request("POST", question.path, question.body(model="any"), headers)
        return check_asked(client, await response.rest(), question, request_id)


async def long_prompt(client: Client) -> str:
    question = client.long_question()
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, question.body())
        return check_asked(client, await response.rest(), question, None)


async def fits_only_the_larger(client: Client) -> str:
    sizes = sorted(client.setup.models, key=lambda model: model.max_ctx)
    if len(sizes) < 2:
        return "one model only"
    smaller, larger = sizes[0].max_ctx, sizes[-1].max_ctx
    question = client.asking(client.words(smaller + (larger - smaller) // 3), 4)
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, stream_body(question, True))
        how = await read_stream(client, response, question, with_usage=True)
    if how.startswith("finished") and not how.endswith(sizes[-1].name[0]):
        raise Violation(f"{how}, whose room is too small")
    return how


async def slow_reader(client: Client) -> str:
    """A small window and pauses, but never as long as the stall timeout: gets everything."""
    question = client.asking(client.chance.choice(GREETINGS), 24)
    async with connect(client.port, window=TINY_WINDOW) as wire:
        response = await wire.request("POST", question.path, stream_body(question, True))
        pause = client.chance.uniform(0.005, 0.05)
        return await read_stream(client, response, question, with_usage=True, pause=pause)


async def late_reader(client: Client) -> str:
    """Reads nothing for most of the stall timeout, and then everything."""
    question = client.asking(client.chance.choice(GREETINGS), 64)
    async with connect(client.port, window=TINY_WINDOW) as wire:
        response = await wire.request("POST", question.path, stream_body(question, True))
        await trio.sleep(client.chance.uniform(0.2, 0.6) * client.setup.stall_timeout)
        return await read_stream(client, response, question, with_usage=True)


async def keep_alive(client: Client) -> str:
    """Several requests on one connection, one after the other."""
    async with connect(client.port) as wire:
        for _ in range(client.chance.randint(2, 6)):
            if client.chance.random() < 0.5:
                await ask_control(client, wire)
                continue
            question = client.question()
            if client.chance.random() < 0.5:
                response = await wire.request("POST", question.path, question.body())
                check_asked(client, await response.rest(), question, None)
            else:
                response = await wire.request("POST", question.path, stream_body(question))
                await read_stream(client, response, question, with_usage=False)
            await trio.sleep(client.chance.uniform(0, 0.05))
    return "all answered"


async def pipelining(client: Client) -> str:
    """Several requests at once on one connection; the answers come in their order."""
    question = client.question()
    requests: list[tuple[str, str, bytes | None]] = []
    for _ in range(client.chance.randint(2, 5)):
        requests.append(
            client.chance.choice(
                [
                    ("GET", "/health", None),
                    ("GET", "/v1/models", None),
                    ("HEAD", "/v1/models", None),
                    ("GET", "/nowhere", None),
                    ("POST", question.path, question.body()),
                ]
            )
        )
    async with connect(client.port) as wire:
        await wire.send(b"".join(request_bytes(*request) for request in requests))
        for index, (method, path, body) in enumerate(requests):
            if index and client.chance.random() < 0.15:
                wire.leave(client.leaving())
                return "left in between"
            answer = await Response(wire, method).rest()
            if body is not None:
                check_asked(client, answer, question, None)
            else:
                check_answer(answer, {404 if path == "/nowhere" else 200}, method=method)
    return "all answered"


async def burst(client: Client) -> str:
    """More requests at once than slots and places to wait: each is answered or refused."""
    question = client.asking(client.chance.choice(GREETINGS), 3)
    results: list[str | Violation | Malformed | OSError] = []

    async def one() -> None:
        try:
            async with connect(client.port) as wire:
                response = await wire.request("POST", question.path, question.body())
                results.append(check_asked(client, await response.rest(), question, None))
        except (Violation, Malformed, OSError) as error:
            results.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(client.setup.slots + client.setup.queue_limit + 5):
            nursery.start_soon(one)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return "some refused" if QUEUE_FULL in results else "all served"


async def one_answer_only(client: Client) -> str:
    """HTTP/1.0, or Connection: close: the connection ends after the answer."""
    question = client.question()
    body = question.body()
    if client.chance.random() < 0.5:
        data = request_bytes("POST", question.path, body, {"Connection": "close"})
    else:
        data = request_bytes("POST", question.path, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    async with connect(client.port) as wire:
        await wire.send(data)
        how = check_asked(client, await Response(wire, "POST").rest(), question, None)
        if await wire.until_closed():
            raise Violation("something behind the only answer")
    return how


async def slow_body(client: Client) -> str:
    """Sends its body in small parts, in time."""
    question = client.long_question()
    body = question.body()
    parts = [body[at : at + len(body) // 4 + 1] for at in range(0, len(body), len(body) // 4 + 1)]
    async with connect(client.port) as wire:
        in_chunks = client.chance.random() < 0.5
        length = {"Content-Length": str(len(body))}
        headers = {"Transfer-Encoding": "chunked"} if in_chunks else length
        await wire.send(request_bytes("POST", question.path, b"", headers))
        for part in parts:
            await trio.sleep(client.chance.uniform(0, 0.2))
            await wire.send(b"%x\r\n%s\r\n" % (len(part), part) if in_chunks else part)
        if in_chunks:
            await wire.send(b"0\r\n\r\n")
        return check_asked(client, await Response(wire, "POST").rest(), question, None)


async def expect_continue(client: Client) -> str:
    """Sends the body only when asked for it, and not at all when it is refused."""
    question = client.question()
    body = question.body()
    too_large = client.chance.random() < 0.3
    size = client.setup.max_body_bytes + 1 if too_large else len(body)
    headers = {"Expect": "100-continue", "Content-Length": str(size)}
    async with connect(client.port) as wire:
        await wire.send(request_bytes("POST", question.path, b"", headers))
        response = Response(wire, "POST")
        if await response.until_continue():
            if too_large:
                raise Violation("100 Continue for a body that is too large")
            await wire.send(body)
        answer = await response.rest()
        if too_large:
            return check_answer(answer, {413}, api=question.api)
        return check_asked(client, answer, question, None)
