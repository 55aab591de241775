"""Traces over OTLP, by OpenTelemetry's SDK: the only file that imports it, and only when wanted.

The SDK sends from a thread of its own, out of a queue that drops the oldest when it is full: a
collector that is slow or dead costs spans, never a request. Requests hand their spans over when
they are over, parent and times included, so no context is ever taken from the surroundings.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import trio

from . import __version__
from .api.request_trace import Headers, SpanData, TracedRequest, Value
from .trace_settings import TraceSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("dflash_trio.traces")

FLUSH_BOUND = 2.0
"""Seconds that the collector has, once the last request is over, for what is still queued."""
HURRIED_FLUSH_BOUND = 0.25
"""The same from a second signal on."""
COMPLAINT_INTERVAL = 60.0
"""Seconds between two lines about a collector that does not take what it is sent."""
SERVICE = "dflash-server"


def start_traces(settings: TraceSettings) -> Traces | None:
    """Begin to export as the environment says. ``None``: there are no traces, and where they were
    wanted and cannot be had, a line has said so."""
    if settings.endpoint is None:
        return None
    strip_variables(os.environ)
    try:
        traces = Traces()
    except Exception as error:  # whatever a variable of the SDK's has in it
        log.warning("traces are off: %s", error)
        return None
    log.info("traces go to %s, as %s", settings.endpoint, traces.service)
    return traces


def strip_variables(environ: MutableMapping[str, str]) -> None:
    """Make the SDK read what :func:`read_trace_settings` has read: values without spaces around
    them, and none that are empty, which it takes for nonsense or for an endpoint."""
    for name in [name for name in environ if name.startswith("OTEL_")]:
        environ[name] = environ[name].strip()
        if not environ[name]:
            del environ[name]


class Traces:
    """Exports requests that are over. Owns the SDK's thread until :meth:`flush`.

    ``exporter``: what sends them; by default as the environment says.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        _quieten()
        self._propagator = _propagator()
        resource = _resource()
        self.service = str(resource.attributes["service.name"])
        # Not on exit: that has no bound that fits a shutdown.
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(
            exporter or _otlp_exporter(),
            export_timeout_millis=0,  # which it has no use for
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("dflash_trio", __version__)
        self._failed = False
        # Baggage is for those that call others.
        self.headers = frozenset(map(str.lower, self._propagator.fields)) - {"baggage"}

    def has_parent(self, headers: Headers) -> bool:
        from opentelemetry.trace import get_current_span

        return (
            bool(headers) and get_current_span(self._context(headers)).get_span_context().is_valid
        )

    def export(self, request: TracedRequest) -> str | None:
        """Queue a request's spans, if its trace is sampled; the trace's id. ``None``: the SDK, or
        what its variables brought into it, failed."""
        try:
            return self._export(request)
        except Exception as error:
            self._tell(error)
            return None

    def _tell(self, error: Exception) -> None:
        """Once: what fails for one request may well fail for all."""
        if not self._failed:
            self._failed = True
            log.error("a request could not be traced; this is said once", exc_info=error)

    def _export(self, request: TracedRequest) -> str:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        data = request.span
        span = self._tracer.start_span(
            data.name,
            self._context(request.headers),
            SpanKind.SERVER,
            attributes=_clean(data.attributes),
            start_time=data.began,
        )
        if span.is_recording():
            if request.failure is not None:
                span.set_status(Status(StatusCode.ERROR))
            inside = set_span_in_context(span, Context())
            for part in request.parts():
                self._export_part(part, inside)
            span.end(data.ended)
        return f"{span.get_span_context().trace_id:032x}"

    def _export_part(self, part: SpanData, inside: Context) -> None:
        self._tracer.start_span(
            part.name, inside, attributes=_clean(part.attributes), start_time=part.began
        ).end(part.ended)

    def _context(self, headers: Headers) -> Context:
        """The parent that headers name, and nothing else. What is malformed names none, and so
        does a ``traceparent`` that comes twice: nobody knows which is meant."""
        from opentelemetry.context import Context

        if not headers or len(headers.get("traceparent", ())) > 1:
            return Context()
        try:
            return self._propagator.extract(headers, Context())
        except Exception as error:
            self._tell(error)
            return Context()

    async def flush(self, hurried: trio.Event) -> None:
        """Send what is queued and end, within FLUSH_BOUND; what then is not sent is lost. From
        ``hurried`` on it has HURRIED_FLUSH_BOUND."""
        with trio.move_on_after(FLUSH_BOUND) as bound:
            async with trio.open_nursery() as nursery:

                async def hurry() -> None:
                    await hurried.wait()
                    bound.deadline = min(bound.deadline, trio.current_time() + HURRIED_FLUSH_BOUND)

                nursery.start_soon(hurry)
                # A limiter of its own: the default one may be full. Left behind when it is late;
                # its thread, like the SDK's, does not keep a process from ending.
                try:
                    await trio.to_thread.run_sync(
                        self._provider.shutdown,
                        limiter=trio.CapacityLimiter(1),
                        abandon_on_cancel=True,
                    )
                except Exception as error:  # the SDK's, or no thread is to be had
                    log.warning("the last spans could not be sent: %s", error)
                nursery.cancel_scope.cancel()
        if bound.cancelled_caught:
            log.warning("the collector did not take the last spans in time; they are lost")


def _propagator() -> TextMapPropagator:
    try:
        # One that is named and not there fails the import.
        from opentelemetry.propagate import get_global_textmap
    except Exception as error:
        raise ValueError(f"OTEL_PROPAGATORS: {error}") from error
    return get_global_textmap()


def _otlp_exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _resource() -> Resource:
    """Who speaks: as the environment says, by our name where it says nothing."""
    from opentelemetry.sdk.resources import Resource

    ours = {"service.name": SERVICE, "service.version": __version__}
    given = Resource.create()
    if str(given.attributes["service.name"]).startswith("unknown_service"):
        return given.merge(Resource(ours))
    return Resource(ours).merge(given)


def _clean(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """With text that UTF-8 can spell: one lone surrogate would cost the whole batch."""
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in attributes.items()
    }


class OncePerInterval(logging.Filter):
    """Lets one line pass in an interval. ``clock``: seconds."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval, self._clock = interval, clock
        self._next = -float("inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True


class InShort(logging.Filter):
    """Says of an error its kind, and what the system said of it: the words of HTTP's libraries
    quote the URL with its query, and headers with their keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_in_short, record.args))
        return True


def _in_short(value: Any) -> Any:
    if not isinstance(value, Exception):
        return value
    said, deeper = type(value).__name__, value.__cause__ or value.__context__
    while deeper is not None:
        if isinstance(deeper, OSError) and deeper.strerror:
            said = f"{type(value).__name__} ({deeper.strerror})"
        deeper = deeper.__cause__ or deeper.__context__
    return said


class Unquoted(logging.Filter):
    """Says which variables are meant, and nothing of what is in them: headers have keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.args = ("in OTEL_EXPORTER_OTLP_HEADERS or OTEL_EXPORTER_OTLP_TRACES_HEADERS",)
        return True


def _quieten() -> None:
    """Keep the SDK from filling the log with a dead collector, and clients with their headers; and
    keys out of it."""
    for name, filters in {
        "opentelemetry.exporter.otlp.proto.http.trace_exporter": (
            OncePerInterval(COMPLAINT_INTERVAL),
            InShort(),
        ),
        "opentelemetry.sdk._shared_internal": (OncePerInterval(COMPLAINT_INTERVAL),),
        "opentelemetry.util.re": (Unquoted(),),
    }.items():
        logger = logging.getLogger(name)
        for each in filters:
            if not any(isinstance(there, type(each)) for there in logger.filters):
                logger.addFilter(each)
    for name in (
        "opentelemetry.trace.span",
        "opentelemetry.trace.propagation.tracecontext",
        "opentelemetry.attributes",  # a line for each that a limit cuts, which is its purpose
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
