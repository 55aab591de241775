"""The web application: routes, and the order of things within one generating request."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import trio
from quart import Request, Response, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from .. import __version__
from ..engine.client import Generation
from ..generation.errors import GenerationError
from ..generation.events import Event, Failed, Finished, TextDelta
from ..generation.status import ServerStatus
from ..net.error_response import client_request_id, new_request_id
from ..routing.router import Router
from . import introspection, sse
from .access import AccessPolicy, is_open_path
from .chat_completions import ChatEncoder, error_before_headers
from .chat_request import parse_chat_call
from .connection import RequestConnection, request_scope
from .error_responses import (
    INTERNAL_ERROR,
    ErrorAnswer,
    answer_for,
    http_answer,
    speaks_anthropic,
)
from .off_loop import parse_body
from .request_body import read_body
from .token_routes import TokenRoutes

log = logging.getLogger("dflash_trio.api")

FIRST_BYTE_PATIENCE = 10.0
"""Seconds after the reservation before a stream's headers go out without a token."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds without a token before a stream gets a sign of life."""
FINGERPRINT = f"dflash-trio-{__version__}"


class DflashApp(QuartTrio):
    """The server's routes on top of a router.

    ``status``: takes a snapshot of everything, without waiting. Sizes in bytes, times in seconds.
    """

    asgi_http_class = RequestConnection

    def __init__(
        self,
        router: Router,
        status: Callable[[], ServerStatus],
        *,
        access: AccessPolicy,
        max_body_bytes: int,
        stall_timeout: float,
        first_byte_patience: float = FIRST_BYTE_PATIENCE,
        keep_alive_interval: float = KEEP_ALIVE_INTERVAL,
    ) -> None:
        super().__init__("dflash_trio", static_folder=None)
        self.router = router
        self.server_status = status
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._stall_timeout = stall_timeout
        self._first_byte_patience = first_byte_patience
        self._keep_alive_interval = keep_alive_interval
        # Quart's own limits would cut streams after 60 s and uploads without a word; both are
        # bounded elsewhere: by the stall guard of the connection and by read_body.
        self.config["RESPONSE_TIMEOUT"] = None
        self.config["BODY_TIMEOUT"] = None
        self.config["MAX_CONTENT_LENGTH"] = max_body_bytes
        self._add_routes()

    def _add_routes(self) -> None:
        def route(path: str, view: Callable[..., Any], methods: list[str]) -> None:
            for prefix in ("/v1", ""):
                self.add_url_rule(
                    prefix + path, f"{prefix}{path}", view, methods=methods, strict_slashes=False
                )

        route("/chat/completions", self._chat_completions, ["POST"])
        route("/models", self._models, ["GET"])
        route("/models/<path:name>", self._model, ["GET"])
        route("/health", self._health, ["GET"])
        route("/props", self._props, ["GET"])
        for path, view in TokenRoutes(self.router, self._read_body).table().items():
            route(path, view, ["POST"])
        self.add_url_rule("/status/json", "status", self._status, methods=["GET"])
        self.before_request(self._admit)
        self.after_request(self._identify)
        self.register_error_handler(GenerationError, self._domain_error)
        self.register_error_handler(HTTPException, self._http_error)
        self.register_error_handler(Exception, self._unexpected_error)

    # ------------------------------------------------------------------- around each request

    async def _admit(self) -> Response | None:
        refusal = self._access.refusal(request.path, request.headers)
        if refusal is not None:
            return _respond(refusal)
        if request.url_rule is not None and not is_open_path(request.path):
            self.router.check_open()
        return None

    async def _identify(self, response: Response) -> Response:
        response.headers["x-request-id"] = _request_id()
        if request.method == "OPTIONS":
            # The framework's own answer: a list of methods in a header, and an empty page.
            response.headers.remove("content-type")
        if speaks_anthropic(request.path):
            response.headers["request-id"] = _request_id()
        if self.router.draining:
            response.headers["connection"] = "close"
        return response

    async def _domain_error(self, error: GenerationError) -> Response:
        return _respond(answer_for(error))

    async def _http_error(self, error: HTTPException) -> Response:
        status = error.code or 500
        headers = {
            name.lower(): value
            for name, value in error.get_headers()
            if name.lower() in ("allow", "retry-after")
        }
        message = {
            404: f"There is no {_shown_path(request)} here.",
            405: f"{_shown_path(request)} does not answer {request.method}.",
        }.get(status, error.description or error.name)
        return _respond(http_answer(status, message, headers))

    async def _unexpected_error(self, error: Exception) -> Response:
        log.error("%s %s failed", request.method, _shown_path(request), exc_info=error)
        return _respond(INTERNAL_ERROR)

    # -------------------------------------------------------------------------- introspection

    async def _health(self) -> Response:
        code, body = introspection.health(self.server_status())
        response = _json_response(body, code)
        if code == 503:
            response.headers["retry-after"] = "5"
        return response

    async def _models(self) -> Response:
        return _json_response(introspection.model_list(self.server_status()))

    async def _model(self, name: str) -> Response:
        model = introspection.find_model(self.server_status(), name)
        if model is None:
            return _respond(http_answer(404, f"No loaded model is called {name[:128]!r}."))
        return _json_response(introspection.model_entry(model))

    async def _props(self) -> Response:
        properties = [model.properties() for model in self.router.models]
        return _json_response(introspection.props_body(self.server_status(), properties))

    async def _status(self) -> Response:
        return _json_response(introspection.status_body(self.server_status()))

    # --------------------------------------------------------------------------- generation

    async def _read_body(self) -> bytes:
        announced = request.content_length
        if announced is not None and announced <= self._max_body_bytes:
            # Before it is read: what cannot fit any model is not worth the memory.
            self.router.check_body_size(announced)
        raw = await read_body(
            request,
            request_scope(request),
            max_bytes=self._max_body_bytes,
            stall_timeout=self._stall_timeout,
        )
        self.router.check_open()
        self.router.check_body_size(len(raw))
        return raw

    async def _chat_completions(self) -> Response:
        scope = request_scope(request)
        raw = await self._read_body()
        call = await parse_body(parse_chat_call, raw)
        del raw
        reservation = await scope.reserve(call.request)
        patience = trio.current_time() + self._first_byte_patience
        generation = scope.submit()
        encoder = ChatEncoder(reservation.model.name, FINGERPRINT, include_usage=call.include_usage)
        headers = {"x-dflash-model": header_text(reservation.model.name)}
        if call.stream:
            return await self._stream(generation, encoder, headers, patience)
        return await self._whole(generation, encoder, headers)

    async def _whole(
        self, generation: Generation, encoder: ChatEncoder, headers: dict[str, str]
    ) -> Response:
        texts: list[str] = []
        generated = False
        while True:
            for event in await next_events(generation):
                if isinstance(event, TextDelta):
                    generated = True
                    texts.append(event.text)
                error = error_before_headers(event, anything_generated=generated)
                if error is not None:
                    raise error
                if isinstance(event, Finished):
                    _log_early_end(generation, event)
                    body = encoder.whole("".join(texts), event)
                    return Response(body, 200, headers, content_type="application/json")

    async def _stream(
        self,
        generation: Generation,
        encoder: ChatEncoder,
        headers: dict[str, str],
        patience: float,
    ) -> Response:
        # No header before the first token, so that what fails until then is a status code; but
        # no client is left without a sign of life for longer than its patience either.
        first: list[Event] = []
        with trio.move_on_at(patience):
            first = await next_events(generation)
        generated = any(isinstance(event, TextDelta) for event in first)
        for event in first:
            error = error_before_headers(event, anything_generated=generated)
            if error is not None:
                raise error
        body = self._stream_body(generation, encoder, first)
        return Response(body, 200, {**sse.HEADERS, **headers})

    async def _stream_body(
        self, generation: Generation, encoder: ChatEncoder, first: list[Event]
    ) -> AsyncIterator[bytes]:
        # No nursery and no cancel scope may span a yield here: only the waits are timed.
        chunk, done = encoder.encode(first)
        _log_early_ends(generation, first)
        yield encoder.opening() + chunk
        while not done:
            events: list[Event] = []
            with trio.move_on_after(self._keep_alive_interval) as waited:
                events = await next_events(generation)
            if waited.cancelled_caught and not events:
                yield sse.KEEP_ALIVE
                continue
            _log_early_ends(generation, events)
            chunk, done = encoder.encode(events)
            if chunk:
                yield chunk


async def next_events(generation: Generation) -> list[Event]:
    """Wait for something to happen, then take everything that has."""
    events = [await generation.events.receive()]
    while True:
        try:
            events.append(generation.events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return events


def _log_early_ends(generation: Generation, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, Finished):
            _log_early_end(generation, event)
        elif isinstance(event, Failed):
            log.error("generation %d failed: %s", generation.id, event.message)


def _log_early_end(generation: Generation, finished: Finished) -> None:
    if finished.detail is not None:
        log.info(
            "generation %d ended early after %d tokens: %s",
            generation.id,
            finished.usage.completion_tokens,
            finished.detail,
        )


def _request_id() -> str:
    """The current request's id: the client's own if it is printable and short, else a new one."""
    if "request_id" not in g:
        g.request_id = client_request_id(request.scope["headers"]) or new_request_id()
    return str(g.request_id)


def header_text(text: str) -> str:
    """Any name as a header value: percent-encoded where a header cannot carry it."""
    if text.isascii() and text.isprintable():
        return text
    return quote(text, safe=" /:+@")


def _shown_path(request: Request) -> str:
    return request.path[:200].encode("utf-8", "replace").decode()


def _json_response(body: Any, status: int = 200) -> Response:
    return Response(json.dumps(body), status, content_type="application/json")


def _respond(answer: ErrorAnswer) -> Response:
    body = answer.json_for(request.path, _request_id())
    return Response(body, answer.status, answer.all_headers())
