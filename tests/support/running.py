"""Running servers for tests: inside this process on scripted engines, or as real processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from dflash_trio.config import ListenerConfig, ModelConfig, ServerConfig
from dflash_trio.engine.worker import Load
from dflash_trio.net.listener import bind_listeners
from dflash_trio.server import Server
from dflash_trio.traces import Traces
from tests.support.http_client import PATIENCE, Answer, Exchange, connect, request

CHAT = "/v1/chat/completions"

LONG_WINDED: dict[str, Any] = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
"""Of a chat stream: more than a kilobyte a token, to the end of the context."""

TOO_SHORT = "the answer that should have held a slot was too short"

ENDLESS: dict[str, Any] = {"endless": True, "step_seconds": 0.005, "max_ctx": 60_000}
"""Of a scripted process's model: an answer of five minutes, more than any test has."""

DIGITS = "0123456789" * 5000
ENDLESS_DIGITS: dict[str, Any] = {**ENDLESS, "endless": False, "answer": DIGITS}
"""The same, with a text that one can tell from others."""


async def poll_status(port: int, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status page for which ``what`` is true."""
    with trio.fail_after(PATIENCE):
        # What is waited for is in another process, or behind a socket: nobody sets an event.
        while True:
            status = dict((await request(port, "GET", "/status/json")).json())
            if what(status):
                return status
            await trio.sleep(0.005)


async def poll_health(port: int, alive: Callable[[], bool] = lambda: True) -> None:
    """Wait until every model is loaded."""
    with trio.fail_after(PATIENCE):
        while (await request(port, "GET", "/health")).status != 200:
            assert alive(), "the server has ended"
            await trio.sleep(0.01)


class Asking:
    """What tests do with a server on a port of this machine."""

    port: int

    async def chat(self, content: str = "hi", **fields: Any) -> Answer:
        """A whole chat completion."""
        return await request(self.port, "POST", CHAT, chat_body(content, **fields))

    @contextlib.asynccontextmanager
    async def chatting(
        self, content: str = "hi", *, receive_buffer: int | None = None, **fields: Any
    ) -> AsyncIterator[Exchange]:
        """A chat request that has been sent; its connection closes with the block."""
        async with connect(self.port, receive_buffer=receive_buffer) as exchange:
            await exchange.send("POST", CHAT, json.dumps(chat_body(content, **fields)).encode())
            yield exchange

    @contextlib.asynccontextmanager
    async def streaming(
        self, content: str = "hold", *, receive_buffer: int | None = None, **fields: Any
    ) -> AsyncIterator[Exchange]:
        """A stream that has begun. How long it lasts is the engine's affair: hold that, or have it
        say more than a test can wait for (``ENDLESS``, ``endless_load``)."""
        async with self.chatting(
            content, receive_buffer=receive_buffer, stream=True, **fields
        ) as exchange:
            await exchange.read_headers()
            assert exchange.status == 200
            yield exchange

    @contextlib.asynccontextmanager
    async def held_slot(self, content: str = "hold", **fields: Any) -> AsyncIterator[Exchange]:
        """A slot that certainly is taken until the end of the block, however fast the engine is.

        What keeps it is a stream that nobody reads: a slot is free once the client's side has taken
        all of its answer, and that side takes some kilobytes of more than a hundred. It needs room
        for a hundred tokens, which is looked at in the end, and a server that cuts clients who read
        nothing late. It decodes for as long as those take; for an answer that certainly is being
        made there are ``streaming`` and an engine without end.
        """
        fields = {**LONG_WINDED, "max_tokens": 100, **fields}
        async with self.streaming(content, receive_buffer=4096, **fields) as exchange:
            yield exchange
            if not (exchange.ended or exchange.cut):
                reserved = [m["slots"]["reserved"] for m in (await self.status())["models"]]
                assert any(reserved), TOO_SHORT

    async def status(self) -> dict[str, Any]:
        return await poll_status(self.port, lambda _: True)

    async def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which ``what(status)`` is true."""
        return await poll_status(self.port, what)

    async def until_idle(self) -> dict[str, Any]:
        """The status, once nothing is reserved, waiting or committed any more."""
        return await poll_status(self.port, is_idle)


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@attrs.define
class RunningServer(Asking):
    """A server inside this process."""

    port: int
    server: Server


def is_idle(status: dict[str, Any]) -> bool:
    """Whether a status page says that nothing is going on."""
    return status["routing"]["waiting"] == 0 and all(
        model["slots"]["reserved"] == 0
        and model["kv_pool"]["committed"] == 0
        and model["kv_pool"]["used"] == 0
        and not any(model["in_flight"].values())
        for model in status["models"]
    )


@contextlib.asynccontextmanager
async def running(
    *loads: tuple[ModelConfig, Load],
    wait_ready: bool = True,
    traces: Traces | None = None,
    **listener_fields: Any,
) -> AsyncIterator[RunningServer]:
    """Serve scripted models on a free port of this machine until the block ends."""
    listener = ListenerConfig(host="127.0.0.1", port=0, **listener_fields)
    bound = bind_listeners(listener.host, 0)
    config = ServerConfig(
        models=tuple(model for model, _ in loads),
        listener=listener,
        load_balancing=len(loads) > 1,
    )
    server = Server(config, bound, list(loads), traces=traces)
    assert bound.port is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        if wait_ready:
            await poll_health(bound.port)
        yield RunningServer(bound.port, server)
        nursery.cancel_scope.cancel()


@attrs.define
class ServerProcess(Asking):
    """A real ``dflash-server`` process and what it said."""

    process: subprocess.Popen[bytes]
    log_path: Path
    port: int
    last_log: str = ""
    """What it had said when its block ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.last_log or self.log_path.read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_code(self, patience: float = PATIENCE) -> int:
        """Wait for the end; fails the test when it does not come."""
        with trio.fail_after(patience):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    async def until_ready(self) -> None:
        await poll_health(self.port, lambda: self.process.poll() is None)

    @contextlib.contextmanager
    def busy_slot(self, **headers: str) -> Iterator[None]:
        """As ``held_slot``, for those who do not run on trio: somebody else's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.sock = socket.socket()
        connection.sock.settimeout(PATIENCE)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sock.connect(("127.0.0.1", self.port))
        body = json.dumps(chat_body("hold", stream=True, **LONG_WINDED))
        connection.request("POST", CHAT, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        try:
            assert response.status == 200
            yield
            status = trio.run(partial(request, self.port, "GET", "/status/json", **headers))
            reserved = [model["slots"]["reserved"] for model in status.json()["models"]]
            assert any(reserved), TOO_SHORT
        finally:
            response.close()
            connection.close()


@contextlib.contextmanager
def server_process(
    arguments: Sequence[str], *, module: str = "dflash_trio", env: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """``python -m dflash_trio ARGUMENTS --port 0``, killed at the end of the block if need be."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder, "log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-X", "dev", "-W", "default", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        server = None
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            match = re.search(r"https?://\S+:(\d+)|unix:", line)
            assert match, f"no address in {line!r}: {log_path.read_text()}"
            server = ServerProcess(process, log_path, int(match[1] or 0))
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            if server is not None:
                server.last_log = server.log


def sse_events(text: str) -> list[Any]:
    """The data of each server-sent event; ``[DONE]`` as the string."""
    events: list[Any] = []
    for block in text.split("\n\n"):
        data = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        if data:
            assert len(data) == 1, f"an event of several lines: {block!r}"
            events.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return events


def streamed_text(text: str) -> str:
    """The joined deltas of a chat stream."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in sse_events(text)
        if isinstance(event, dict)
        for choice in event.get("choices", ())
    )


def scripted_process(
    *models: dict[str, Any],
    env: dict[str, str] | None = None,
    bounds: dict[str, float] | None = None,
    **listener: Any,
) -> contextlib.AbstractContextManager[ServerProcess]:
    """A real process on scripted engines; see ``scripted_server`` for the fields."""
    specification = json.dumps({"models": models, "listener": listener, "bounds": bounds or {}})
    return server_process([specification], module="tests.support.scripted_server", env=env)
