"""The golden run: what the server answers, and how fast, when nothing disturbs it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import trio
from attrs import field, frozen

from .client import End, fetch, json_of
from .dialects import DIALECTS, Answer
from .options import CheckOptions
from .server_under_test import ServerUnderTest, serve

NOT_SERVED = (404, 405, 501)
CHARACTERS_PER_TOKEN = 4

STORY = "Tell a long story about a river, and about the people in the towns along its way."
_SENTENCE = (
    "the boat went down past an old mill and two men on the bank saw it go while rain fell over "
    "every field in that wide land until one of them said that he would rather walk home"
)
WORDS = _SENTENCE.split()


class Kind(enum.Enum):
    """What is asked for. Each kind has one prompt, one length and one golden answer."""

    ANSWER = "answer"
    LONG_PROMPT = "long prompt"
    LONG_ANSWER = "long answer"


@frozen
class Golden:
    """An undisturbed answer. Times in seconds from the request."""

    answer: Answer
    wire_bytes: int
    first_byte: float
    first_text: float
    """Later than the first byte where a server sends headers, or a first event, beforehand."""
    seconds: float

    @property
    def making(self) -> float:
        """Seconds from its first text to its end."""
        return self.seconds - self.first_text


@frozen
class Reference:
    """What the scenarios are measured against."""

    ready_seconds: float = 0.0
    """From the process's start until its ready path answered 200."""
    answers_while_loading: bool = False
    """Whether its port was open before it was ready."""
    model: str = "default"
    slots: int = 1
    tells_status: bool = False
    """Whether the server has dflash's ``/status/json``, which shows phases exactly."""
    goldens: Mapping[tuple[str, Kind], Golden] = field(factory=dict)
    missing: Mapping[tuple[str, Kind], str] = field(factory=dict)
    """Why there is no golden answer."""
    unserved: Mapping[str, str] = field(factory=dict)
    """APIs that this server does not have, with its answer."""


def prompt_and_tokens(options: CheckOptions, api: str, kind: Kind) -> tuple[str, int]:
    """A kind's prompt and the number of tokens it asks for."""
    if kind is Kind.LONG_PROMPT:
        words, length, number = [], 0, 0
        while length < options.prefill_tokens * CHARACTERS_PER_TOKEN:
            # Never twice the same sentence, so that no cache of a prefix helps.
            words.append(WORDS[(number * 7 + number // 36) % len(WORDS)])
            length += len(words[-1]) + 1
            number += 1
        # Nor that of the same prompt on another API, before.
        return f"On {api}, go on with this: {' '.join(words)}", max(8, options.answer_tokens // 4)
    if kind is Kind.LONG_ANSWER:
        return f"{STORY} Leave nothing out.", options.long_answer_tokens
    return STORY, options.answer_tokens


def generating_request(
    options: CheckOptions, api: str, model: str, kind: Kind, *, stream: bool
) -> tuple[str, bytes]:
    """Path and body of a request."""
    dialect = DIALECTS[api]
    prompt, tokens = prompt_and_tokens(options, api, kind)
    body = dialect.request(model, prompt, tokens, stream=stream, extra=options.extra)
    return dialect.path, body


async def status_of(server: ServerUnderTest, options: CheckOptions) -> dict[str, Any] | None:
    """dflash's status page, or ``None`` from a server without one."""
    body = json_of(await fetch(server.address, "/status/json", dict(options.headers)))
    return body if isinstance(body, dict) and "models" in body and "routing" in body else None


async def take_reference(options: CheckOptions, wanted: Iterable[tuple[str, Kind]]) -> Reference:
    """Run a server undisturbed and note its answers. Raises ServerFailed if it does not start."""
    goldens: dict[tuple[str, Kind], Golden] = {}
    missing: dict[tuple[str, Kind], str] = {}
    unserved: dict[str, str] = {}
    async with serve(options, "reference") as server:
        ready_seconds = await server.until_ready(options)
        answers_while_loading = server.answered_while_loading
        status = await status_of(server, options)
        model = options.model or await _first_model(server, options)
        for api, kind in wanted:
            if api in unserved:
                continue
            result = await _golden(server, options, api, model, kind)
            if isinstance(result, Golden):
                goldens[api, kind] = result
            elif result.startswith("not served"):
                unserved[api] = result
            else:
                missing[api, kind] = result
    slots = options.slots
    if slots is None:
        slots = status["models"][0]["slots"]["total"] if status else 1
    return Reference(
        ready_seconds=ready_seconds,
        answers_while_loading=answers_while_loading,
        model=model,
        slots=slots,
        tells_status=status is not None,
        goldens=goldens,
        missing=missing,
        unserved=unserved,
    )


async def _first_model(server: ServerUnderTest, options: CheckOptions) -> str:
    body = json_of(await fetch(server.address, "/v1/models", dict(options.headers)))
    try:
        return str(body["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        return "default"


async def _golden(
    server: ServerUnderTest, options: CheckOptions, api: str, model: str, kind: Kind
) -> Golden | str:
    """One golden answer, or why there is none."""
    path, body = generating_request(options, api, model, kind, stream=True)
    exchange = await server.address.connect()
    begin = trio.current_time()
    first_text_at = None
    try:
        with trio.move_on_after(options.timeout):
            await exchange.send("POST", path, body, dict(options.headers))
            while await exchange.receive():
                if first_text_at is None and DIALECTS[api].read(exchange.body, stream=True).text:
                    first_text_at = trio.current_time()
    finally:
        exchange.close()
    seen = exchange.seen()
    if seen.status in NOT_SERVED:
        return f"not served: HTTP {seen.status} for {path}"
    if seen.status != 200:
        return f"its reference run got HTTP {seen.status}: {seen.body[:120]!r}"
    answer = DIALECTS[api].read(seen.body, stream=True)
    if seen.end is not End.COMPLETE or not answer.terminal or answer.problem:
        reason = answer.problem or f"{seen.end.value}, without its terminal event"
        return f"its reference run is no whole answer: {reason}"
    if not answer.text or seen.first_byte_at is None or seen.ended_at is None:
        return "its reference run is empty"
    if first_text_at is None:  # it came with the end
        first_text_at = seen.ended_at
    return Golden(
        answer,
        seen.wire_bytes,
        first_byte=seen.first_byte_at - begin,
        first_text=first_text_at - begin,
        seconds=seen.ended_at - begin,
    )
