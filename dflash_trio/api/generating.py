"""Routes that generate: the order of things within one request, whatever API it came by.

A dialect is a parser and an encoder. The parser makes a :class:`GenerationCall` of a body; the
call makes the encoder once it is known which model answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import trio
from attrs import define, frozen
from quart import Response, request

from .. import __version__
from ..engine.client import Generation
from ..generation.errors import Draining, GenerationError, InvalidRequest
from ..generation.events import SERVER_SHUTDOWN, Event, Failed, Finished, TextDelta
from ..generation.request import GenerationRequest, PreparedPrompt
from ..routing.reservation import Reservation
from . import sse
from .answer import AnswerEvent, AnswerFailed, AnswerReader, ChoiceEnded, WholeAnswer, failure_of
from .connection import request_scope
from .json_text import dump_in_parts
from .off_loop import parse_body
from .request_id import current_request_id
from .request_record import RequestRecord, request_record

log = logging.getLogger("dflash_trio.api")

FIRST_BYTE_PATIENCE = 10.0
"""Seconds after the reservation before a stream's headers go out without a token."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds without a token before a stream gets a sign of life."""
MOST_AT_ONCE = 1024
"""Tokens of one write, alternatives of log probabilities included: some hundred kilobytes."""
FINGERPRINT = f"dflash-trio-{__version__}"
LARGE_ANSWER = 2048
"""Tokens of an answer, alternatives of log probabilities included, from which it is rendered on a
thread. Below, rendering takes about a millisecond."""
BODY_BYTES_PER_TOKEN = 8
"""Of a request, that count as one such token: dialects give parts of it back, or keep it."""


@frozen
class AnswerContext:
    """What an encoder may want to know when its request has got a model."""

    model: str
    """The one that answers."""
    prepared: PreparedPrompt
    cancel: Callable[[], None]
    """Ends the generation as if its client had gone; idempotent."""
    request_id: str
    at_close: Callable[[Callable[[], None]], None] = lambda _: None
    """Has something called when the request is over, however that comes about."""


class AnswerEncoder(Protocol):
    """One answer in a dialect's words. Made for one request, used for a stream or a whole."""

    call_prefix: str
    """How ids of tool calls begin."""

    def opening(self) -> bytes:
        """What comes before any of the answer."""
        ...

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        """A wake-up's events as one write; may be empty."""
        ...

    def closing(self) -> bytes:
        """After every answer has ended: the last thing of a stream."""
        ...

    def failure(self, error: GenerationError) -> bytes:
        """An in-stream error: the last thing a client hears, with no faked normal end."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life while there is nothing to say."""
        ...

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        """The non-streaming answer's body. May run on a thread."""
        ...


class GenerationCall(Protocol):
    """A parsed body: what to generate, and how the client wants to be told."""

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def stream(self) -> bool: ...

    @property
    def model(self) -> str | None:
        """What the body calls the model; it selects nothing."""
        ...

    def new_encoder(self, context: AnswerContext) -> AnswerEncoder: ...


class GenerationRoutes:
    """The views. ``read``: the current request's body, checked for its size.

    Times are seconds.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[bytes]],
        *,
        first_byte_patience: float = FIRST_BYTE_PATIENCE,
        keep_alive_interval: float = KEEP_ALIVE_INTERVAL,
    ) -> None:
        self._read = read
        self._first_byte_patience = first_byte_patience
        self._keep_alive_interval = keep_alive_interval

    def view(self, parse: Callable[[bytes], GenerationCall]) -> Callable[[], Awaitable[Response]]:
        """A route of one dialect."""

        async def generate() -> Response:
            raw = await self._read()
            call = await parse_body(parse, raw)
            del raw
            return await self.answer(call)

        return generate

    async def answer(self, call: GenerationCall) -> Response:
        """Reserve, generate, answer. Raises GenerationError for what is known before headers."""
        scope, record = request_scope(request), request_record(request)
        record.asked(call.request, call.model, stream=call.stream)
        reservation = await scope.reserve(call.request)
        patience = trio.current_time() + self._first_byte_patience
        generation = scope.submit()
        name = reservation.model.name
        encoder = call.new_encoder(
            AnswerContext(
                name,
                reservation.prepared,
                generation.cancel,
                current_request_id(),
                scope.at_close,
            )
        )
        reader = AnswerReader(reservation.prepared, encoder.call_prefix)
        headers = {"x-dflash-model": header_text(name), **_route_headers(reservation)}
        load = Load(reservation.prepared, call.request.body_bytes)
        if call.stream:
            return await self._stream(generation, reader, encoder, headers, patience, load, record)
        return await self._whole(generation, reader, encoder, headers, load)

    async def _whole(
        self,
        generation: Generation,
        reader: AnswerReader,
        encoder: AnswerEncoder,
        headers: dict[str, str],
        load: Load,
    ) -> Response:
        answer = WholeAnswer(generation.prepared.n)
        generated = False
        while not reader.done:
            events = await next_events(generation)
            generated = generated or any(isinstance(event, TextDelta) for event in events)
            _check_before_headers(events, anything_generated=generated)
            read = reader.read(events)
            _log_early_ends(generation, read)
            answer.add(read)

        if load.of_tokens(answer.usage.completion_tokens) < LARGE_ANSWER:
            body = json.dumps(encoder.whole(answer), ensure_ascii=False)
        else:
            body = await trio.to_thread.run_sync(lambda: dump_in_parts(encoder.whole(answer)))
        return Response(body, 200, headers, content_type="application/json")

    async def _stream(
        self,
        generation: Generation,
        reader: AnswerReader,
        encoder: AnswerEncoder,
        headers: dict[str, str],
        patience: float,
        load: Load,
        record: RequestRecord,
    ) -> Response:
        # No header before the first token, so that what fails until then is a status code; but
        # no client is left without a sign of life for longer than its patience either.
        first: list[Event] = []
        with trio.move_on_at(patience):
            first = await next_events(generation)
        generated = any(isinstance(event, TextDelta) for event in first)
        _check_before_headers(first, anything_generated=generated)
        body = self._stream_body(generation, reader, encoder, first, load, record)
        return Response(body, 200, {**sse.HEADERS, **headers})

    async def _stream_body(
        self,
        generation: Generation,
        reader: AnswerReader,
        encoder: AnswerEncoder,
        events: list[Event],
        load: Load,
        record: RequestRecord,
    ) -> AsyncIterator[bytes]:
        # No nursery and no cancel scope may span a yield here: only the waits are timed.
        chunk = await load.run(encoder.opening, load.of_body)
        while True:
            encode = partial(_encode, generation, reader, encoder, events)
            chunk += await load.run(encode, load.of_events(events))
            if reader.done:
                record.all_said()
            if chunk:
                yield chunk
            if reader.done:
                return
            events, chunk = [], b""
            with trio.move_on_after(self._keep_alive_interval) as waited:
                events = await next_events(generation)
            if waited.cancelled_caught and not events:
                chunk = await load.run(encoder.keep_alive, load.of_all)


@define
class Load:
    """How much there is to encode of one answer, so that what takes long is done on a thread.

    Counted in tokens; each alternative of a log probability is one.
    """

    prepared: PreparedPrompt
    body_bytes: int
    _tokens: int = 0
    """Of the answer so far."""
    _channel: str = ""

    @property
    def of_body(self) -> int:
        return self.body_bytes // BODY_BYTES_PER_TOKEN

    @property
    def of_all(self) -> int:
        """Of what a dialect may have to repeat: the request, and the answer so far."""
        return self.of_tokens(self._tokens)

    def of_tokens(self, tokens: int) -> int:
        alternatives = 1 + (self.prepared.logprobs or 0)
        return self.of_body + tokens * alternatives

    def of_events(self, events: Sequence[Event]) -> int:
        """Of one wake-up's. Where a part of the answer ends, a dialect may repeat all of it."""
        tokens, part_ends = 0, False
        for event in events:
            if isinstance(event, TextDelta):
                tokens += max(1, len(event.logprobs))
                part_ends = part_ends or event.channel != self._channel
                self._channel = event.channel
            else:
                part_ends = True
        self._tokens += tokens
        return self.of_all if part_ends else tokens * (1 + (self.prepared.logprobs or 0))

    async def run(self, encode: Callable[[], bytes], load: int) -> bytes:
        if load < LARGE_ANSWER:
            return encode()
        return await trio.to_thread.run_sync(encode)


def _encode(
    generation: Generation, reader: AnswerReader, encoder: AnswerEncoder, events: Sequence[Event]
) -> bytes:
    """A wake-up's events as one write, with the end of the stream if they bring it."""
    try:
        read = reader.read(events)
    except AnswerFailed as failed:
        level = logging.INFO if isinstance(failed.error, InvalidRequest) else logging.ERROR
        log.log(level, "generation %d failed: %s", generation.id, failed)
        encoded = encoder.encode(failed.read) if failed.read else b""
        return encoded + encoder.failure(failed.error)
    _log_early_ends(generation, read)
    encoded = encoder.encode(read) if read else b""
    return encoded + encoder.closing() if reader.done else encoded


async def next_events(generation: Generation) -> list[Event]:
    """Wait for something to happen, then take everything that has, as far as one write should
    hold."""
    events = [await generation.events.receive()]
    most = MOST_AT_ONCE // (1 + (generation.prepared.logprobs or 0))
    while True:
        if len(events) > most:
            return events
        try:
            events.append(generation.events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return events


def _check_before_headers(events: Sequence[Event], *, anything_generated: bool) -> None:
    """Raise the error that an ending means while no header was sent."""
    for event in events:
        match event:
            case Failed():
                raise failure_of(event)
            case Finished(detail=detail) if detail == SERVER_SHUTDOWN and not anything_generated:
                raise Draining


def _log_early_ends(generation: Generation, events: Sequence[AnswerEvent]) -> None:
    for event in events:
        if isinstance(event, ChoiceEnded) and event.detail is not None:
            log.info(
                "generation %d ended early after %d tokens: %s",
                generation.id,
                event.usage.completion_tokens,
                event.detail,
            )


def _route_headers(reservation: Reservation) -> dict[str, str]:
    """Why this model: the way to it in one word, and what made it so."""
    headers = {"x-dflash-route": "primary"}
    if reservation.fallback is not None:
        headers = {"x-dflash-route": "fallback", "x-dflash-fallback": reservation.fallback}
    if (waited := round(reservation.waited, 3)) > 0:
        headers["x-dflash-route"] = "waited"
        headers["x-dflash-waited"] = f"{waited:.3f}"
    return headers


def header_text(text: str) -> str:
    """Any name as a header value: percent-encoded where a header cannot carry it."""
    if text.isascii() and text.isprintable():
        return text
    return quote(text, safe=" /:+@")
