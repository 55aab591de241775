"""A response's parts that are written past its application's task are HTTP all the same."""

from __future__ import annotations

from typing import Any

import h11
import trio
import trio.testing

from dflash_trio.net import DIRECT_OUTPUT, DirectOutput
from tests.net.net_helpers import TinyApp, running_server
from tests.support.http_client import PATIENCE

LONG_PART_BYTES = 24 * 1024 * 1024
"""More than the kernel takes of it for a client that does not read yet."""


class DirectApp(TinyApp):
    """Writes to ``output`` between its own sends; ``ready`` has what it was told when."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[bool] = []
        self.output: DirectOutput
        self.left_over = False

    def note(self, scope: Any) -> None:
        self.output = scope["state"][DIRECT_OUTPUT]
        self.ready.append(self.output.ready())

    async def on_direct(self, scope: Any, receive: Any, send: Any) -> None:
        self.note(scope)
        headers = [(b"content-length", b"3")] if scope["query_string"] == b"length" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.note(scope)
        if self.ready[-1]:
            assert self.output.write(b"two")
            await send({"type": "http.response.body", "body": b"three", "more_body": True})
            assert self.output.write(b"four")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.note(scope)

    async def on_threads(self, scope: Any, receive: Any, send: Any) -> None:
        """A thread writes, and goes on to while a send of the application's is under way."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        output: DirectOutput = scope["state"][DIRECT_OUTPUT]
        big = b"x" * LONG_PART_BYTES

        def write() -> bool:
            return output.write(b"thread")

        assert await trio.to_thread.run_sync(write)
        async with trio.open_nursery() as nursery:
            part = {"type": "http.response.body", "body": big, "more_body": True}
            nursery.start_soon(send, part)
            await trio.testing.wait_all_tasks_blocked()
            self.ready.append(output.ready())
            self.left_over = not await trio.to_thread.run_sync(write)
            self.reached.set()
        await output.flush()
        assert await trio.to_thread.run_sync(write)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async def on_flood(self, scope: Any, receive: Any, send: Any) -> None:
        """Fills the kernel, and leaves a rest that the application's own end has to follow."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        output: DirectOutput = scope["state"][DIRECT_OUTPUT]
        while output.write(b"x" * 1000):
            self.sent_chunks += 1
        self.sent_chunks += 1
        assert not output.ready()
        self.reached.set()
        if scope["query_string"] == b"flush":
            await output.flush()
            assert output.ready()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


def body_of(data: bytes) -> bytes:
    """What h11 makes of a response to GET."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += bytes(event.data)
    return body


async def ask(app: DirectApp, head: bytes) -> bytes:
    async with running_server(app=app) as server, await server.connect() as client:
        await client.send(head + b"Host: a\r\nConnection: close\r\n\r\n")
        return await client.until_closed()


async def test_direct_parts_are_chunks_between_the_applications_own() -> None:
    app = DirectApp()
    assert body_of(await ask(app, b"GET /direct HTTP/1.1\r\n")) == b"onetwothreefour"
    assert app.ready == [False, True, False]


async def test_what_is_not_sent_in_chunks_is_not_for_direct_parts() -> None:
    for head in (
        b"GET /direct?length HTTP/1.1\r\n",
        b"GET /direct HTTP/1.0\r\n",
        b"HEAD /direct HTTP/1.1\r\n",
    ):
        app = DirectApp()
        await ask(app, head)
        assert app.ready == [False, False, False], head


async def test_another_requests_response_is_not_written_into() -> None:
    app = DirectApp()
    async with running_server(app=app) as server, await server.connect() as client:
        await client.send(b"GET /direct HTTP/1.1\r\nHost: a\r\n\r\n")
        with trio.fail_after(PATIENCE):
            while not client.buffer.endswith(b"0\r\n\r\n"):
                client.buffer += await client.stream.receive_some(1000)
        first = app.output
        await client.send(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await app.reached.wait()
        assert not first.ready()


async def test_what_the_kernel_does_not_take_goes_out_before_what_follows() -> None:
    for query in (b"", b"?flush"):
        app = DirectApp()
        head = b"GET /flood%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % query
        async with (
            running_server(app=app) as server,
            await server.connect(receive_buffer=4096) as client,
        ):
            await client.send(head)
            with trio.fail_after(PATIENCE):
                await app.reached.wait()
            body = body_of(await client.until_closed())
        assert body == b"x" * 1000 * app.sent_chunks + b"end"


async def test_what_a_thread_writes_never_gets_into_the_middle_of_a_send() -> None:
    app = DirectApp()
    async with running_server(app=app) as server, await server.connect() as client:
        await client.send(b"GET /threads HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        with trio.fail_after(PATIENCE):
            await app.reached.wait()
        body = body_of(await client.until_closed())
    assert app.ready == [False]
    assert app.left_over
    assert body == b"thread" + b"x" * LONG_PART_BYTES + b"threadthreadend"


async def test_a_rest_for_a_client_that_has_gone_is_dropped_in_silence() -> None:
    app = DirectApp()
    async with running_server(app=app) as server:
        async with await server.connect(receive_buffer=4096) as client:
            await client.send(b"GET /flood?flush HTTP/1.1\r\nHost: a\r\n\r\n")
            with trio.fail_after(PATIENCE):
                await app.reached.wait()
        await server.until_open(0)
        await server.check_alive()
