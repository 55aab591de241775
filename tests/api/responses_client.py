"""Asking a running server for responses: by hand, and with the official client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import openai
import trio

from tests.support.http_client import Answer, Exchange, request
from tests.support.running import RunningServer
from tests.support.scripted import Gate, answer, scripted_config, scripted_load

PATH = "/v1/responses"
T = TypeVar("T")


def sdk(server: RunningServer, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    )


async def with_sdk(
    server: RunningServer, use: Callable[[openai.OpenAI], T], api_key: str = "none"
) -> T:
    """What ``use`` makes of a client, on a thread: this client blocks."""

    def run() -> T:
        with sdk(server, api_key) as client:
            return use(client)

    return await trio.to_thread.run_sync(run)


async def ask(server: RunningServer, given_input: Any = "hi", **fields: Any) -> Answer:
    return await request(server.port, "POST", PATH, {"input": given_input, **fields})


def saying(text: str, **load: Any) -> Any:
    return (scripted_config("m"), scripted_load(script=answer(text), **load))


class HoldsBack:
    """Lets an engine make some steps and holds it there until the gate is opened."""

    def __init__(self, steps: int = 5) -> None:
        self.gate = Gate()
        self._left = steps

    def __call__(self, batch: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.gate.close()
        self.gate(batch)


async def read_until(exchange: Exchange, what: str) -> str:
    """A stream's text up to and with the first piece in which there is ``what``."""
    text = ""
    while what not in text:
        part = await exchange.read_some()
        assert part, f"no {what} in {text!r}"
        text += part.decode()
    return text
