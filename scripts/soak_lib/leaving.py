"""Clients that leave before the end, each at another place, and those that stop reading."""

from __future__ import annotations

import sys

import trio

from .asking import (
    begin_stream,
    check_asked,
    read_stream,
    stream_body,
)
from .judge import Question, Violation, check_answer, check_refusal
from .town import GREETINGS, TINY_WINDOW, Client
from .wire import Response, connect, request_bytes

TOO_MANY_PAGES = 400
"""Status pages, of some kilobytes each: more than the server's send buffer in any case."""


async def leave_before_headers(client: Client) -> str:
    """At once, in the queue, in the prefill or shortly before the first token."""
    question = client.chance.choice((client.question(), client.long_question(24)))
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, stream_body(question))
        with trio.move_on_after(client.chance.expovariate(3)):
            if await response.head() != 200:
                return check_refusal(await response.rest(), question.api)
        wire.leave(client.leaving())
    return "left after the headers" if response.status else "left before them"


async def leave_in_prefill(client: Client) -> str:
    question = client.long_question()
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, question.body())
        with trio.move_on_after(client.chance.uniform(0, client.chance.choice((0.03, 0.3)))):
            await response.head()
        if response.status:
            check_asked(client, await response.rest(), question, None)
            return "answered before"
        wire.leave(client.leaving())
    return "left"


async def leave_in_stream(client: Client) -> str:
    """At the first delta or some later one."""
    question = client.asking(client.chance.choice(GREETINGS), client.chance.choice((32, 200)))
    after = client.chance.choice((1, 1, 2, 5, 16, 30))
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, stream_body(question))
        if await response.head() != 200:
            return check_refusal(await response.rest(), question.api)
        stream = begin_stream(response, question, with_usage=False)
        while stream.deltas < after and (data := await response.part()):
            stream.feed(data)
        if response.cut:
            raise Violation(f"a stream that was cut after {stream.deltas} deltas")
        wire.leave(client.leaving())
    return "left"


async def leave_before_done(client: Client) -> str:
    """Between the finish chunk and [DONE]: a tiny window, and no byte read beyond the chunk."""
    question = client.asking(client.chance.choice(GREETINGS), client.chance.choice((1, 24)))
    async with connect(client.port, window=TINY_WINDOW) as wire:
        response = await wire.request("POST", question.path, stream_body(question, True))
        if await response.head() != 200:
            return check_refusal(await response.rest(), question.api)
        stream = begin_stream(response, question, with_usage=True)
        while stream.finish_reason is None:
            data = await response.part()
            if not data:
                raise Violation(f"a stream that ended after {stream.deltas} deltas")
            stream.feed(data)
        wire.leave(client.leaving())
    return "left after [DONE]" if stream.done else "left"


async def client_timeout(client: Client) -> str:
    """Wants a whole answer and hangs up when it takes too long."""
    question = client.asking(client.chance.choice(GREETINGS), 48)
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, question.body())
        answer = None
        with trio.move_on_after(client.chance.uniform(0.02, 1.5)):
            answer = await response.rest()
        if answer is not None:
            return check_asked(client, answer, question, None)
        wire.leave("FIN")
    return "timed out"


async def half_close(client: Client) -> str:
    """Ends its sending side after the request, which counts as leaving."""
    question = client.question()
    async with connect(client.port) as wire:
        response = await wire.request("POST", question.path, stream_body(question))
        wire.half_close()
        answer = await response.rest()
    if not answer.status:
        return "no answer"
    if not answer.complete:
        # Whoever leaves is not written to any more, in the middle of whatever it was.
        return "cut"
    return "answered" if answer.status == 200 else check_refusal(answer, question.api)


async def say_nothing(client: Client) -> str:
    """Connects, sends nothing or half a request, and leaves."""
    question = client.question()
    whole = request_bytes("POST", question.path, question.body())
    async with connect(client.port) as wire:
        await wire.send(whole[: client.chance.choice((0, 0, 5, 60, len(whole) - 20))])
        await trio.sleep(client.chance.choice((0, 0.01, 0.3, 1)))
        wire.leave(client.leaving())
    return "left"


async def zero_window(client: Client) -> str:
    """Reads the headers of a stream and then nothing: cut when the stall timeout is over.

    How much fits into the buffers between differs from kernel to kernel. So some of these clients
    ask for many status pages before the stream, none of which they read either.
    """
    limiter = client.town.fat_streams
    try:
        limiter.acquire_on_behalf_of_nowait(client)
    except trio.WouldBlock:
        return await zero_window_that_leaves(client)
    try:
        pages = client.chance.choice((0, 0, 20, TOO_MANY_PAGES))
        question = Question("hi", 150)
        async with connect(client.port, window=TINY_WINDOW) as wire:
            await wire.send(request_bytes("GET", "/status/json") * pages)
            response = await wire.request("POST", question.path, stream_body(question, True))
            if not pages and await response.head() != 200:
                return check_refusal(await response.rest(), question.api)
            # Nothing more is read, so what comes of it shows only in the connection's state.
            with trio.move_on_after(client.town.patience / 2):
                while True:
                    if wire.is_gone():
                        return "cut"
                    await trio.sleep(0.1)
            if pages == TOO_MANY_PAGES and sys.platform == "linux":
                raise Violation("two megabytes that nobody reads, and the connection is not cut")
            for _ in range(pages):
                check_answer(await Response(wire, "GET").rest(), {200})
            response = response if not pages else Response(wire, "POST")
            how = await read_stream(client, response, question, with_usage=True)
            return f"{how}: it fitted into the kernel's buffers"
    finally:
        limiter.release_on_behalf_of(client)


async def zero_window_that_leaves(client: Client) -> str:
    question = client.asking(client.chance.choice(GREETINGS), 200)
    async with connect(client.port, window=TINY_WINDOW) as wire:
        await wire.request("POST", question.path, stream_body(question))
        await trio.sleep(client.chance.uniform(0, 1.5))
        wire.leave(client.leaving())
    return "left"
