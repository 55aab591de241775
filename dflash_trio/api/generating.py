"""Routes that generate: the order of things within one request, whatever API it came by.

A dialect is a parser and an encoder. The parser makes a :class:`GenerationCall` of a body; the
call makes the encoder once it is known which model answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol
from urllib.parse import quote

import trio
from attrs import frozen
from quart import Response, request

from .. import __version__
from ..engine.client import Generation
from ..generation.errors import Draining
from ..generation.events import SERVER_SHUTDOWN, Event, Failed, Finished, TextDelta
from ..generation.request import GenerationRequest, PreparedPrompt
from ..net import DIRECT_OUTPUT
from ..routing.reservation import Reservation
from . import sse
from .answer import AnswerReader, WholeAnswer, failure_of
from .connection import request_scope
from .json_text import dump_in_parts
from .off_loop import parse_body
from .request_id import current_request_id
from .request_record import RequestRecord, request_record
from .stream_body import (
    LARGE_ANSWER,
    AnswerEncoder,
    Load,
    StreamBody,
    log_early_ends,
    next_events,
)

log = logging.getLogger("dflash_trio.api")

FIRST_BYTE_PATIENCE = 10.0
"""Seconds after the reservation before a stream's headers go out without a token."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds without a token before a stream gets a sign of life."""
FINGERPRINT = f"dflash-trio-{__version__}"


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
            if reader.suffices:
                generation.suffice()
            log_early_ends(generation, read)
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
        output = request.scope["state"].get(DIRECT_OUTPUT)
        body = StreamBody(
            generation, reader, encoder, load, record, output, self._keep_alive_interval
        )
        return Response(body.chunks(first), 200, {**sse.HEADERS, **headers})


def _check_before_headers(events: Sequence[Event], *, anything_generated: bool) -> None:
    """Raise the error that an ending means while no header was sent."""
    for event in events:
        match event:
            case Failed():
                raise failure_of(event)
            case Finished(detail=detail) if detail == SERVER_SHUTDOWN and not anything_generated:
                raise Draining


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
