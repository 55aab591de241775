"""An OTLP collector in this process: a real HTTP server that decodes what it is sent."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import trio

from tests.support.http_client import PATIENCE


@attrs.frozen
class Span:
    """As it came, with the times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began: int
    ended: int
    status: int
    """0: unset; 2: error."""
    trace_state: str
    attributes: dict[str, Any]


@attrs.define
class Collector:
    """What has come. Its fields are read while its server's threads write."""

    port: int = 0
    spans: list[Span] = attrs.field(factory=list)
    resource: dict[str, Any] = attrs.field(factory=dict)
    raw: list[bytes] = attrs.field(factory=list)
    """Bodies of the requests."""
    asked: threading.Event = attrs.field(factory=threading.Event)
    """Somebody has sent something, taken or not."""
    answer: threading.Event = attrs.field(factory=threading.Event)
    """Until it is set, nothing is answered."""

    @property
    def environ(self) -> dict[str, str]:
        """What makes a process send its spans here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "5",
        }

    def servers(self) -> list[Span]:
        """The spans around whole requests, in the order of their beginnings."""
        return sorted((s for s in list(self.spans) if s.kind == 2), key=lambda s: s.began)

    def parts(self, server: Span) -> dict[str, Span]:
        """A request's child spans by their names."""
        return {s.name: s for s in list(self.spans) if s.parent_id == server.span_id}

    async def until(self, requests: int) -> list[Span]:
        """The spans of the first so many requests, once they are here with their children."""
        with trio.fail_after(PATIENCE):
            # It is another thread's, at the end of a socket.
            while True:
                if len(found := self.servers()) >= requests:
                    return found
                await trio.sleep(0.005)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        message = ExportTraceServiceRequest.FromString(body)
        self.raw.append(body)
        for resource_spans in message.resource_spans:
            self.resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                # Children come before the span that they are in: one batch has them all.
                self.spans += [_span(each) for each in scope_spans.spans]


def _span(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        span.trace_state,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        if kind == "array_value":
            return [value(one) for one in each.array_value.values]
        return getattr(each, kind)

    return {pair.key: value(pair.value) for pair in pairs}


@contextlib.contextmanager
def collector(*, hangs: bool = False) -> Iterator[Collector]:
    """Listen until the block ends. ``hangs``: takes requests and answers none before that."""
    collected = Collector()
    if not hangs:
        collected.answer.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collected.asked.set()
            collected.answer.wait(PATIENCE)
            assert self.path == "/v1/traces"
            if not hangs:
                collected.take(body)
            with contextlib.suppress(OSError):
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collected.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collected
    finally:
        collected.answer.set()
        server.shutdown()
        thread.join()
        server.server_close()
