"""The web application: its routes, and what goes around each request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from quart import Request, Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ..generation.errors import Draining, GenerationError
from ..generation.status import ServerStatus
from ..routing.router import Router
from . import introspection
from .access import PAGE_FILES, AccessPolicy, is_open_path
from .chat_request import parse_chat_call
from .completions_request import parse_completion_call
from .connection import RequestConnection, request_scope
from .cors import is_preflight
from .error_responses import (
    INTERNAL_ERROR,
    ErrorAnswer,
    answer_for,
    http_answer,
    speaks_anthropic,
)
from .generating import FIRST_BYTE_PATIENCE, KEEP_ALIVE_INTERVAL, GenerationRoutes
from .messages_call import parse_messages_call
from .metrics import MetricsPage, ServerCollector
from .openapi import openapi_document, plain_route, route_labels
from .request_body import read_body
from .request_id import current_request_id
from .request_record import OTHER_ROUTE, request_record
from .request_totals import RequestTotals
from .request_trace import TraceExporter
from .responses_routes import ResponsesRoutes
from .status_page import StatusPage
from .status_stream import StatusStreams, stamped
from .token_routes import TokenRoutes

log = logging.getLogger("dflash_trio.api")


class DflashApp(QuartTrio):
    """The server's routes on top of a router.

    ``status``: takes a snapshot of everything, without waiting. ``traces``: where they go, if
    anywhere. Sizes in bytes, times in seconds.
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
        traces: TraceExporter | None = None,
    ) -> None:
        super().__init__("dflash_trio", static_folder=None)
        self.router = router
        self.server_status = status
        self.request_totals = RequestTotals()
        self.traces = traces
        collector = ServerCollector(
            self.request_totals, status, lambda: [model.timings() for model in router.models]
        )
        self._metrics_page = MetricsPage(collector)
        self._route_labels = route_labels()
        self._page = StatusPage(keyed=bool(access.api_keys))
        self._status_streams = StatusStreams(router, self._status_body, stall_timeout=stall_timeout)
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._stall_timeout = stall_timeout
        self._generation = GenerationRoutes(
            self._read_body,
            first_byte_patience=first_byte_patience,
            keep_alive_interval=keep_alive_interval,
        )
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

        route("/chat/completions", self._generation.view(parse_chat_call), ["POST"])
        route("/completions", self._generation.view(parse_completion_call), ["POST"])
        route("/messages", self._generation.view(parse_messages_call), ["POST"])
        route("/models", self._models, ["GET"])
        route("/models/<path:name>", self._model, ["GET"])
        route("/health", self._health, ["GET"])
        route("/props", self._props, ["GET"])
        route("/metrics", self._metrics, ["GET"])
        route("/openapi.json", self._openapi, ["GET"])
        responses = ResponsesRoutes(self._generation, self._read_body, self._access.api_keys)
        tokens = TokenRoutes(self.router, self._read_body, kept=responses.visible)
        for path, view in tokens.table().items():
            route(path, view, ["POST"])
        for path, kept_view, methods in responses.table():
            route(path, kept_view, methods)
        self.add_url_rule("/status/json", "status", self._status, methods=["GET"])
        self.add_url_rule("/status/stream", "stream", self._status_streams.view, methods=["GET"])
        self.add_url_rule("/", "page", self._shell, methods=["GET"])
        self.add_url_rule(
            f"{PAGE_FILES}<version>/<file>", "page_file", self._page_file, methods=["GET"]
        )
        self.before_request(self._admit)
        self.after_request(self._identify)
        self.register_error_handler(GenerationError, self._domain_error)
        self.register_error_handler(HTTPException, self._http_error)
        self.register_error_handler(Exception, self._unexpected_error)

    # ------------------------------------------------------------------- around each request

    async def _admit(self) -> Response | None:
        if request.url_rule is not None:
            route = self._route_labels.get(plain_route(request.url_rule.rule), OTHER_ROUTE)
            request_record(request).route = route
        refusal = self._access.refusal(request.method, request.path, request.headers)
        if refusal is not None:
            return _respond(refusal)
        if is_preflight(request.method, request.headers):
            # Whatever the path: that it leads nowhere, the page is told when it goes there.
            return Response(b"", 204)
        if request.url_rule is not None and not is_open_path(request.path):
            self.router.check_open()
        return None

    async def _identify(self, response: Response) -> Response:
        response.headers["x-request-id"] = current_request_id()
        if request.method == "OPTIONS":
            # The framework's own answer: a list of methods in a header, and an empty page.
            response.headers.remove("content-type")
        for name, value in self._access.cors.headers(request.method, request.headers).items():
            response.headers[name] = value
        if speaks_anthropic(request.path):
            response.headers["request-id"] = current_request_id()
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

    async def _openapi(self) -> Response:
        return _json_response(openapi_document(keyed=bool(self._access.api_keys)))

    async def _metrics(self) -> Response:
        page, content_type = self._metrics_page.render(request.headers.get("Accept", ""))
        return Response(page, 200, content_type=content_type)

    def _status_body(self) -> dict[str, Any]:
        recent = self.request_totals.recent.newest_first()
        return introspection.status_body(self.server_status(), recent)

    async def _status(self) -> Response:
        return _json_response(stamped(self._status_body()))

    # ---------------------------------------------------------------------- the status page

    async def _shell(self) -> Response:
        self._check_not_draining()
        return self._page.shell()

    async def _page_file(self, version: str, file: str) -> Response:
        self._check_not_draining()
        return self._page.file(version, file)

    def _check_not_draining(self) -> None:
        # While the models load these answer already; in a shutdown nothing new does.
        if self.router.draining:
            raise Draining

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


def _shown_path(request: Request) -> str:
    return request.path[:200].encode("utf-8", "replace").decode()


def _json_response(body: Any, status: int = 200) -> Response:
    return Response(json.dumps(body), status, content_type="application/json")


def _respond(answer: ErrorAnswer) -> Response:
    body = answer.json_for(request.path, current_request_id())
    return Response(body, answer.status, answer.all_headers())
