"""One HTTP request as the metrics and the log see it: what it was, how it ended, what it took.

Made by the connection for every request that reaches the application, and closed by it after the
request's scope: a cancelled generation has been retired then, and its tokens are known.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog
import trio
from attrs import define, field
from quart import Request

from ..engine.client import Generation
from ..generation.request import GenerationRequest
from ..routing.reservation import Reservation
from .request_totals import NO_MODEL, Outcome, RequestTotals
from .request_trace import Asked, RequestTrace

OTHER_ROUTE = "other"
"""Of requests that lead nowhere. What they asked for is the client's to choose, so no label."""
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_POLLED = frozenset(
    {"/", "/page/{version}/{file}", "/health", "/metrics", "/status/json", "/status/stream"}
)
"""Routes that machines and the status page ask every few seconds: their lines are for
debugging."""

_SCOPE_KEY = "dflash_trio.request_record"

# Rendered by whoever set the logging up; see log_setup.
_stdlib_log = logging.getLogger("dflash_trio.requests")
_log = structlog.wrap_logger(
    _stdlib_log,
    processors=[structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
)


@define(eq=False)
class RequestRecord:
    """Written on the event loop, and :meth:`sent` by the engine's thread while the stream's owner
    waits for that. Times are seconds on trio's clock."""

    totals: RequestTotals
    request_id: str
    method: str
    began: float = field(factory=trio.current_time)
    trace: RequestTrace | None = None
    """``None``: nobody traces."""
    route: str = OTHER_ROUTE
    """As the API's description has it, names of things left open: ``/v1/models/{name}``."""
    status: int | None = None
    """``None``: no response has begun."""
    reservation: Reservation | None = None
    first_token_after: float | None = None
    """From its arrival."""
    _ended_after: float | None = None
    left: bool = False
    _all_said: bool = False
    _crashed: bool = False
    _length: int | None = None
    _sent: int = 0

    # ----------------------------------------------------------- as it happens: RequestObserver

    def waits(self) -> None:
        if self.trace is not None:
            self.trace.waiting_since = trio.current_time()

    def reserved(self, reservation: Reservation) -> None:
        self.reservation = reservation
        if self.trace is not None:
            self.trace.reserved_at = trio.current_time()
        name = reservation.model.name
        self.totals.queue_wait[name].observe(reservation.waited)
        if reservation.fallback is not None:
            self.totals.fallbacks[name, reservation.fallback] += 1

    def first_token(self) -> None:
        assert self.reservation is not None
        self.first_token_after = trio.current_time() - self.began
        self.totals.first_token[self.reservation.model.name].observe(self.first_token_after)

    def asked(self, request: GenerationRequest, model: str | None, *, stream: bool) -> None:
        """It is a request to generate. ``model``: what its body calls the model."""
        if self.trace is not None:
            self.trace.asked = Asked.of(request, model, stream=stream)

    def response_began(self, status: int, length: int | None) -> None:
        """``length``: of its body in bytes, where that was announced."""
        self.status, self._length = status, length

    def all_said(self) -> None:
        """What the body has next is the last that its client needs, though not HTTP."""
        self._all_said = True

    def sent(self, body_bytes: int, *, last: bool, in_vain: bool) -> None:
        """A part of the body has been sent. ``last``: HTTP's end came with it; ``in_vain``: it is
        not all with the kernel, or the client had left before."""
        self._sent += body_bytes
        # A client that counts, or knows the dialect, may be gone before HTTP's end.
        complete = last or self._all_said or self._sent == self._length
        if complete and not in_vain and self._ended_after is None:
            self._ended_after = trio.current_time() - self.began

    def client_left(self) -> None:
        """The connection is over, or, after the last byte, the request."""
        self.left = True

    def crashed(self) -> None:
        """Handling it raised an error that nobody had foreseen."""
        self._crashed = True

    # ---------------------------------------------------------------------------- at its end

    @property
    def outcome(self) -> Outcome:
        generation = self.reservation.generation if self.reservation is not None else None
        if self._ended_after is None:
            return "failed" if self._crashed else "cancelled"
        if generation is not None:
            if generation.failed is not None:
                return "refused" if generation.failed.is_the_requests else "failed"
            if generation.finished is not None and generation.finished.reason == "cancelled":
                return "cancelled"
        if self.status is None or self.status < 400:
            return "completed"
        if self.status == 503:
            return "unavailable"
        return "refused" if self.status < 500 else "failed"

    def close(self) -> None:
        """Count it and write its line. Once, after its scope."""
        total = self._ended_after
        if total is None:
            total = trio.current_time() - self.began
        outcome = self.outcome
        model = self.reservation.model.name if self.reservation is not None else NO_MODEL
        self.totals.requests[self.route, model, outcome] += 1
        if self.reservation is not None:
            self.totals.duration[model].observe(total)
        level = logging.WARNING if outcome == "failed" else logging.INFO
        if self.route in _POLLED and level == logging.INFO:
            level = logging.DEBUG
        trace_id = self._trace(outcome, total)
        shown, logged = self.totals.recent.wants(self.route), _stdlib_log.isEnabledFor(level)
        if not (shown or logged):
            return
        fields = self._fields(outcome, total, trace_id)
        if shown:
            self.totals.recent.add(fields)
        if logged:
            _log.log(level, "request", **fields)

    def _trace(self, outcome: Outcome, total: float) -> str | None:
        """Hand its spans over, if it has some; the id of its trace. Of what is polled, only what
        failed and what its client traces is worth any."""
        trace = self.trace
        if trace is None:
            return None
        polled = self.route in _POLLED and outcome != "failed"
        if polled and not trace.exporter.has_parent(trace.headers):
            return None
        first = self.first_token_after
        return trace.finish(
            method=self.method if self.method in _METHODS else "_OTHER",
            route=self.route if self.route != OTHER_ROUTE else None,
            status=self.status,
            outcome=outcome,
            total=total,
            request_id=self.request_id,
            reservation=self.reservation,
            first_token_at=self.began + first if first is not None else None,
            sent=self._sent,
        )

    def _fields(self, outcome: Outcome, total: float, trace_id: str | None) -> dict[str, Any]:
        """What its line and the status say. Nothing in it is the client's but the request's id,
        which is printable and short."""
        reservation = self.reservation
        generation = reservation.generation if reservation is not None else None
        finished = generation.finished if generation is not None else None
        return {
            "request_id": self.request_id,
            "trace_id": trace_id,
            "method": self.method if self.method in _METHODS else OTHER_ROUTE,
            "route": self.route,
            "model": reservation.model.name if reservation is not None else None,
            "outcome": outcome,
            "status": self.status,
            "queue_s": round(reservation.waited, 4) if reservation is not None else None,
            "ttft_s": None if self.first_token_after is None else round(self.first_token_after, 4),
            "total_s": round(total, 4),
            "prompt_tokens": reservation.prepared.prompt_tokens if reservation else None,
            "cached_tokens": finished.usage.cached_tokens if finished is not None else None,
            "completion_tokens": _tokens_of(generation),
            "finish_reason": finished.reason if finished is not None else None,
            "ended_by": finished.detail if finished is not None else None,
            "fallback": reservation.fallback if reservation is not None else None,
        }


def _tokens_of(generation: Generation | None) -> int | None:
    """``None``: there was none, or what was made is not known. An answer tells how many tokens it
    had when it finishes; one that fails, or whose engine has stalled, tells nothing."""
    if generation is None or generation.failed is not None or not generation.ended:
        return None
    return generation.completion_tokens


def put_record(scope: Any, record: RequestRecord) -> None:
    """Leave it where :func:`request_record` finds it. ``scope``: ASGI's."""
    scope[_SCOPE_KEY] = record


def request_record(request: Request) -> RequestRecord:
    """The record of this request."""
    return cast(RequestRecord, cast(dict[str, object], request.scope)[_SCOPE_KEY])
