"""Who is measured: servers behind a URL, and the bare step loop. All have one interface."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from time import process_time
from typing import Any, Protocol
from urllib.parse import urlsplit

import attrs
import trio

from .figures import Request, Round
from .process import ROOT, Gone, Running, started
from .stream import BadAnswer, Client
from .workload import Workload

_POLL = 0.1
# This checkout's code before an installed one, and whatever else was given.
_PATHS = (str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", ""))
_OURS = {"PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}


class Contestant(Protocol):
    """One of those that take turns. ``running``: ``None`` for processes that are not ours."""

    name: str

    @property
    def running(self) -> Running | None: ...

    async def prepare(self, workload: Workload, prompts: list[list[str]]) -> None:
        """What need not be measured of the next round."""
        ...

    async def run(self) -> Round:
        """The round that was prepared."""
        ...


@attrs.frozen
class Options:
    """How servers are asked."""

    api: str = "chat"
    """Or ``completions``: the prompt as it is, without a template."""
    model: str | None = None
    """``None``: the first that the server lists."""
    start_timeout: float = 300.0


class Server:
    """A server behind a URL."""

    def __init__(self, name: str, url: str, running: Running | None, options: Options) -> None:
        self.name = name
        self.running = running
        self._url = urlsplit(url)
        self._options = options
        self._model = options.model or ""
        self._requests: list[list[bytes]] = []

    async def wait_until_ready(self) -> None:
        """Until /health answers 200 (only a server that was started here must have it)."""
        with trio.move_on_after(self._options.start_timeout) as scope:
            while self.running is not None:
                self.running.check()
                with contextlib.suppress(OSError, BadAnswer, trio.BrokenResourceError):
                    async with Client(self._url) as client:
                        if (await client.get_json("/health"))[0] == 200:
                            break
                await trio.sleep(_POLL)
        if scope.cancelled_caught:
            assert self.running is not None
            raise Gone(f"{self.name} was not ready in time\n{self.running.log()}")
        if not self._model:
            self._model = await self._first_model()

    async def _first_model(self) -> str:
        try:
            async with Client(self._url) as client:
                _, page = await client.get_json("/v1/models")
            return str(page["data"][0]["id"])
        except (OSError, BadAnswer, TypeError, LookupError, trio.BrokenResourceError) as error:
            raise Gone(f"{self.name} lists no model ({error!r}): give --model-name") from None

    async def prepare(self, workload: Workload, prompts: list[list[str]]) -> None:
        client = Client(self._url)
        chats = self._options.api == "chat"
        path = "/v1/chat/completions" if chats else "/v1/completions"
        self._requests = [
            [client.request_bytes("POST", path, self._body(workload, prompt)) for prompt in stream]
            for stream in prompts
        ]

    def _body(self, workload: Workload, prompt: str) -> bytes:
        body = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": workload.tokens,
            "temperature": workload.temperature,
        }
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if self._options.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return json.dumps(body).encode()

    async def run(self) -> Round:
        answered: list[Request] = []

        async def one_stream(client: Client, requests: list[bytes]) -> None:
            for request in requests:
                answered.append(await client.stream(request))

        cpu = self.running.cpu_seconds() if self.running is not None else 0.0
        own = process_time()
        try:
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(Client(self._url)) for _ in self._requests
                ]
                for client in clients:
                    await client.connect()
                async with trio.open_nursery() as nursery:
                    for client, requests in zip(clients, self._requests, strict=True):
                        nursery.start_soon(one_stream, client, requests)
        except* (OSError, BadAnswer, trio.BrokenResourceError) as group:
            if self.running is not None:
                self.running.check()
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise Gone(f"{self.name}: {error}") from None
        own = process_time() - own
        await trio.sleep(0.1)  # what a server does after an answer is of the answer's cost
        used = self.running.cpu_seconds() - cpu if self.running is not None else None
        return Round(answered, used, own)


class Bare:
    """The bare step loop, in a process that is told by lines of JSON what to do."""

    def __init__(self, name: str, running: Running, options: Options) -> None:
        self.name = name
        self.running: Running = running
        self._api = options.api

    async def prepare(self, workload: Workload, prompts: list[list[str]]) -> None:
        await self._say(
            {
                "prompts": prompts,
                "api": self._api,
                "tokens": workload.tokens,
                "temperature": workload.temperature,
                "ignore_eos": workload.ignore_eos,
            }
        )

    async def run(self) -> Round:
        cpu = self.running.cpu_seconds()
        answer = await self._say({})
        return Round([Request(**fields) for fields in answer], self.running.cpu_seconds() - cpu)

    async def _say(self, message: dict[str, object]) -> list[dict[str, Any]]:
        pipe = self.running.process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except OSError:
            self._complain()
        return await self.hear()

    async def hear(self) -> list[dict[str, Any]]:
        """Its next line."""
        pipe = self.running.process.stdout
        assert pipe is not None
        line = await trio.to_thread.run_sync(pipe.readline, abandon_on_cancel=True)
        if not line:
            self._complain()
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def _complain(self) -> None:
        self.running.process.wait()
        self.running.check()


@contextlib.asynccontextmanager
async def behind_url(name: str, url: str, options: Options) -> AsyncIterator[Contestant]:
    """A server that runs already."""
    server = Server(name, url, None, options)
    await server.wait_until_ready()
    yield server


@contextlib.asynccontextmanager
async def by_command(
    name: str, command: Sequence[str], options: Options, *, ours: bool = False
) -> AsyncIterator[Contestant]:
    """A server that is started. ``{port}`` in its command becomes a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    async with started(name, words, environment=_OURS if ours else None) as running:
        server = Server(name, f"http://127.0.0.1:{port}", running, options)
        await server.wait_until_ready()
        yield server


@contextlib.asynccontextmanager
async def bare_loop(
    name: str, server_options: Sequence[str], options: Options
) -> AsyncIterator[Contestant]:
    """The bare loop on a model that is loaded as the server would with these options."""
    command = [sys.executable, "-m", "bench_lib.bare", *server_options]
    async with started(name, command, environment=_OURS, talks=True) as running:
        bare = Bare(name, running, options)
        with trio.move_on_after(options.start_timeout) as scope:
            await bare.hear()
        if scope.cancelled_caught:
            raise Gone(f"{name} was not ready in time\n{running.log()}")
        yield bare
