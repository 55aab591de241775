"""One request as spans: what its trace says of it, in OpenTelemetry's words and in no library's.

Nothing is built while a request runs: a few times are noted, and the spans are made of them when it
is over, by whoever exports them. So nothing has to be handed from task to thread and back, and a
request that nobody traces pays for none of it. No prompt and no answer is in any of it.
docs/traces.md says what each attribute means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from attrs import define, field, frozen

from ..engine.client import Generation
from ..generation.events import Finished
from ..generation.request import GenerationRequest, SamplingOverrides
from ..routing.reservation import Reservation
from .request_totals import Outcome

Value = str | int | float | bool | Sequence[str]
Headers = Mapping[str, Sequence[str]]
"""Those of a request that may say which trace it belongs to, by names in small letters."""

MOST_OF_A_NAME = 128
"""Characters of the client's own name for the model that are told."""
PROVIDER = "dflash"


@frozen
class SpanData:
    """A span. Times are nanoseconds since 1970."""

    name: str
    began: int
    ended: int
    attributes: Mapping[str, Value]


@frozen
class TracedRequest:
    """A request that is over."""

    span: SpanData
    """The server's, around everything."""
    failure: str | None
    """What went wrong on the server's side, in a word; ``None``: nothing did."""
    headers: Headers
    parts: Callable[[], Iterable[SpanData]]
    """Its children. Called only if somebody wants them."""


class TraceExporter(Protocol):
    """Where traces go. Called on the event loop; must not raise or wait."""

    @property
    def headers(self) -> frozenset[str]:
        """Names of the headers that say which trace a request belongs to, in small letters."""
        ...

    def has_parent(self, headers: Headers) -> bool:
        """Whether the headers name a trace."""
        ...

    def export(self, request: TracedRequest) -> str | None:
        """Take a request; the id of its trace, whether or not that is sampled. ``None``: it has
        none."""
        ...


@frozen
class Asked:
    """What of a body its span says; nothing of it keeps the prompt in memory."""

    sampling: SamplingOverrides
    max_tokens: int | None
    n: int
    model: str | None
    """What the body calls the model, or the beginning of it."""
    stream: bool

    @classmethod
    def of(cls, request: GenerationRequest, model: str | None, *, stream: bool) -> Asked:
        short = model[:MOST_OF_A_NAME] if model is not None else None
        return cls(request.sampling, request.max_tokens, request.n, short, stream)


@define(eq=False)
class RequestTrace:
    """Notes what only a trace wants to know of a request. ``began``: its arrival on trio's clock,
    in seconds, as all its times."""

    exporter: TraceExporter
    began: float
    headers: Headers
    path: str
    scheme: str
    http_version: str
    asked: Asked | None = None
    waiting_since: float | None = None
    """``None``: it never waited for capacity."""
    reserved_at: float | None = None
    _began_ns: int = field(factory=time.time_ns)

    def finish(
        self,
        *,
        method: str,
        route: str | None,
        status: int | None,
        outcome: Outcome,
        total: float,
        request_id: str,
        reservation: Reservation | None,
        first_token_at: float | None,
        sent: int,
    ) -> str | None:
        """Hand it over; the id of its trace. ``route``: ``None`` where it led nowhere. ``total``:
        seconds from its arrival to its end; ``sent``: bytes of its answer."""
        ended = self.began + total
        generation = reservation.generation if reservation is not None else None
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "url.scheme": self.scheme,
            "network.protocol.version": self.http_version,
            "dflash.outcome": outcome,
            "dflash.request_id": request_id,
        }
        if route is not None:
            attributes["http.route"] = route
            if "{" not in route:
                # Others have a name in them that its client chose.
                attributes["url.path"] = self.path
        if status is not None:
            attributes["http.response.status_code"] = status
        failure = failure_of(outcome, status, generation)
        if failure is not None:
            attributes["error.type"] = failure
        if self.asked is not None:
            attributes |= _of_the_request(self.asked, route)
        if reservation is not None:
            attributes |= _of_the_answer(reservation, generation)
            if first_token_at is not None and self.asked is not None and self.asked.stream:
                attributes["gen_ai.response.time_to_first_chunk"] = first_token_at - self.began
        name = "HTTP" if method == "_OTHER" else method
        span = self._span(f"{name} {route}" if route else name, self.began, ended, attributes)

        def parts() -> Iterator[SpanData]:
            yield from self._parts(generation, first_token_at, ended, sent)

        return self.exporter.export(TracedRequest(span, failure, self.headers, parts))

    def _parts(
        self, generation: Generation | None, first_token_at: float | None, ended: float, sent: int
    ) -> Iterator[SpanData]:
        if self.waiting_since is not None:
            yield self._span("queue", self.waiting_since, self.reserved_at or ended, {})
        if generation is None or self.reserved_at is None:
            return
        generated = min(ended, generation.ended_at or ended)
        finished = generation.finished
        prefill: dict[str, Value] = {"dflash.prompt_tokens": generation.prepared.prompt_tokens}
        if finished is not None:
            prefill["dflash.cached_tokens"] = finished.usage.cached_tokens
        yield self._span("prefill", self.reserved_at, first_token_at or generated, prefill)
        if first_token_at is not None:
            yield self._span("decode", first_token_at, generated, _of_decoding(generation))
        if generation.ended_at is not None:
            yield self._span("drain", generated, ended, {"dflash.body_bytes": sent})

    def _span(
        self, name: str, began: float, ended: float, attributes: Mapping[str, Value]
    ) -> SpanData:
        return SpanData(name, self._at(began), self._at(max(began, ended)), attributes)

    def _at(self, moment: float) -> int:
        return self._began_ns + round((moment - self.began) * 1e9)


def new_trace(
    exporter: TraceExporter, scope: Mapping[str, object], path: str, began: float
) -> RequestTrace:
    """Of a request that just came. ``scope``: ASGI's; ``path``: as it was asked for."""
    wanted = exporter.headers
    headers: dict[str, list[str]] = {}
    given: Iterable[tuple[bytes, bytes]] = scope["headers"]  # type: ignore[assignment]
    for raw_name, raw_value in given:
        name = raw_name.decode("latin-1").lower()
        if name in wanted:
            headers.setdefault(name, []).append(raw_value.decode("latin-1"))
    return RequestTrace(
        exporter,
        began,
        headers,
        path,
        str(scope["scheme"]),
        str(scope["http_version"]),
    )


def failure_of(outcome: Outcome, status: int | None, generation: Generation | None) -> str | None:
    """A word for what the server failed at; ``None``: it did not. A request that is refused or
    cancelled is no failure of the server, by OpenTelemetry's conventions too."""
    if outcome not in ("failed", "unavailable"):
        return None
    if status is not None and status >= 500:
        return str(status)
    # In a stream that had begun.
    return "engine_failed" if generation is not None and generation.failed else "_OTHER"


def _of_the_request(asked: Asked, route: str | None) -> dict[str, Value]:
    sampling = asked.sampling
    given: dict[str, Value | None] = {
        "gen_ai.operation.name": "text_completion" if route == "/v1/completions" else "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.choice.count": asked.n if asked.n != 1 else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
    }
    # A seed may be larger than what OTLP has for integers.
    return {
        name: str(value) if isinstance(value, int) and value >= 2**63 else value
        for name, value in given.items()
        if value is not None
    }


def _of_the_answer(reservation: Reservation, generation: Generation | None) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.response.model": reservation.model.name,
        "gen_ai.usage.input_tokens": reservation.prepared.prompt_tokens,
        "dflash.queue_wait": reservation.waited,
    }
    if reservation.fallback is not None:
        attributes["dflash.fallback"] = reservation.fallback
    if generation is None or not generation.endings:
        return attributes
    last = generation.endings[-1]
    attributes["gen_ai.response.finish_reasons"] = _in_order(generation.endings)
    attributes["gen_ai.usage.cache_read.input_tokens"] = last.usage.cached_tokens
    if last.detail is not None:
        attributes["dflash.ended_by"] = last.detail
    if generation.failed is None and generation.ended:
        attributes["gen_ai.usage.output_tokens"] = generation.completion_tokens
        thought = sum(ending.usage.reasoning_tokens for ending in generation.endings)
        if thought:
            attributes["gen_ai.usage.reasoning.output_tokens"] = thought
    return attributes


def _in_order(endings: Sequence[Finished]) -> list[str]:
    """Why each answer ended, by its index."""
    return [ending.reason for ending in sorted(endings, key=lambda ending: ending.index)]


def _of_decoding(generation: Generation) -> dict[str, Value]:
    attributes: dict[str, Value] = {"dflash.completion_tokens": generation.completion_tokens}
    usages = [ending.usage for ending in generation.endings]
    if any(usage.accepted_drafts is not None for usage in usages):
        accepted = sum(usage.accepted_drafts or 0 for usage in usages)
        rejected = sum(usage.rejected_drafts or 0 for usage in usages)
        attributes["dflash.draft.accepted_tokens"] = accepted
        attributes["dflash.draft.rejected_tokens"] = rejected
    return attributes
