"""What the kinds of clients have in common: an answer read to its end, a control route asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from .judge import Question, Violation, check_answer, check_json, check_refusal
from .setup import ModelSetup
from .streams import STREAMS, AnswerStream, check_whole
from .town import CHAT, Client
from .wire import Answer, Response, Wire, connect


async def read_stream(
    client: Client, response: Response, question: Question, *, with_usage: bool, pause: float = 0
) -> str:
    """A stream to its end, or the 503 instead of it. ``pause``: seconds between two reads."""
    if await response.head() != 200:
        return check_refusal(await response.rest(), question.api)
    stream = begin_stream(response, question, with_usage=with_usage)
    while data := await response.part():
        stream.feed(data)
        if pause:
            await trio.sleep(pause)
    model = stream.end(complete=response.ended, goldens=client.town.goldens)
    return served_by(client, model, response.headers)


def begin_stream(response: Response, question: Question, *, with_usage: bool) -> AnswerStream:
    headers = response.headers
    if headers.get("content-type") != "text/event-stream; charset=utf-8":
        raise Violation(f"a stream with content-type {headers.get('content-type')!r}")
    if not headers.get("x-request-id"):
        raise Violation("a stream without x-request-id")
    return STREAMS[question.api](question, headers.get("x-dflash-model", ""), with_usage)


def served_by(client: Client, model: str, headers: dict[str, str]) -> str:
    for known in client.setup.models:
        if known.name == model:
            if headers.get("x-dflash-model") != known.header:
                raise Violation(f"x-dflash-model {headers.get('x-dflash-model')!r} for {model}")
            return f"finished by {model[:1]}"
    raise Violation(f"an answer of an unknown model {model!r}")


def check_asked(client: Client, answer: Answer, question: Question, request_id: str | None) -> str:
    """A whole answer, or the 503 instead of it."""
    check_answer(answer, {200, 503}, request_id=request_id, api=question.api)
    if answer.status == 503:
        return check_refusal(answer, question.api)
    model = check_whole(answer, question, client.town.goldens)
    return served_by(client, model, answer.headers)


def stream_body(question: Question, with_usage: bool = False, **fields: Any) -> bytes:
    # The two newer APIs tell the usage in any case.
    if with_usage and question.api in ("chat", "completions"):
        fields["stream_options"] = {"include_usage": True}
    return question.body(stream=True, **fields)


async def control(client: Client) -> str:
    async with connect(client.port) as wire:
        return await ask_control(client, wire)


async def ask_control(client: Client, wire: Wire) -> str:
    """One control request, right or wrong."""
    method, path, status, headers = client.chance.choice(_control_requests(client.setup.models))
    answer = await (await wire.request(method, path, None, headers)).rest()
    check_answer(answer, {status}, method=method)
    if status == 200 and method == "GET":
        check_json(answer)
    return f"{method} {status}"


def _control_requests(
    models: Sequence[ModelSetup],
) -> list[tuple[str, str, int, dict[str, str]]]:
    gets = ["/health", "/v1/health", "/status/json", "/v1/models", "/models"]
    gets += [f"/v1/models/{model.header}" for model in models]
    requests: list[tuple[str, str, int, dict[str, str]]] = []
    requests += [("GET", path, 200, {}) for path in gets]
    requests += [("HEAD", path, 200, {}) for path in gets]
    requests += [("OPTIONS", path, 200, {}) for path in (CHAT, "/health")]
    requests += [("GET", path, 404, {}) for path in ("/nowhere", "/v1/models/nobody", "/%00")]
    requests += [("HEAD", "/nowhere", 404, {}), ("GET", CHAT, 405, {}), ("HEAD", CHAT, 405, {})]
    requests += [("POST", "/health", 405, {}), ("DELETE", "/v1/models", 405, {})]
    requests += [("GET", "/v1/models", 403, {"Host": "evil.example"})]
    requests += [("GET", "/v1/models", 403, {"Origin": "https://evil.example"})]
    return requests
