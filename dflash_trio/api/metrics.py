"""``/metrics``: the server's numbers in Prometheus's words.

Nothing is kept here. Everything that counts keeps its own numbers as plain data, and a scrape reads
them all at that moment: no lock is shared with an engine's step, and nobody pays for a metric that
is not asked for. docs/metrics.md says what each one means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .. import __version__
from ..generation.histogram import HistogramSnapshot
from ..generation.status import DraftStatistics, EngineTimings, ModelStatus, ServerStatus
from ..routing.policy import FallbackReason
from .request_totals import RequestTotals, Timed

Page = Callable[[CollectorRegistry], bytes]
# Their own package leaves the second of these untyped.
_plain_page: Page = generate_latest
_openmetrics_page = cast(Page, openmetrics.generate_latest)

Read = Callable[[ModelStatus], float]

GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("dflash_slots", "Sequences that the model generates at a time.", lambda m: m.ledger.slots),
    (
        "dflash_slots_reserved",
        "Slots that reservations hold.",
        lambda m: m.ledger.slots_reserved,
    ),
    ("dflash_kv_cells", "KV cells of the model's pool.", lambda m: m.ledger.pool),
    (
        "dflash_kv_cells_committed",
        "KV cells promised to reservations.",
        lambda m: m.ledger.committed,
    ),
    (
        "dflash_kv_cells_used",
        "KV cells that hold a token of a running sequence.",
        lambda m: m.engine.cells_used,
    ),
    (
        "dflash_kv_cells_cached",
        "KV cells kept for prompts that begin alike.",
        lambda m: m.engine.cells_cached,
    ),
    (
        "dflash_prefixes_kept",
        "Ended answers and whole prompts that are kept in rows and memory.",
        lambda m: m.engine.prefixes_cached,
    ),
    (
        "dflash_prefix_disk_entries",
        "Beginnings of prompts that are kept on disk.",
        lambda m: m.engine.prefixes_stored,
    ),
    (
        "dflash_prefix_disk_bytes",
        "Size of what is kept on disk.",
        lambda m: m.engine.bytes_stored,
    ),
    (
        "dflash_model_healthy",
        "1: the model's engine takes requests; 0: it died or stalled.",
        lambda m: m.healthy,
    ),
)
"""For each model: name, help, value."""

COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("dflash_steps", "Steps of the model's engine.", lambda m: m.engine.steps),
    (
        "dflash_prompt_tokens",
        "Prompt tokens computed, again after a pause included.",
        lambda m: m.engine.prompt_tokens,
    ),
    (
        "dflash_cached_tokens",
        "Prompt tokens taken from the prefix cache instead, again after a pause included.",
        lambda m: m.engine.cached_tokens,
    ),
    (
        "dflash_completion_tokens",
        "Tokens sampled.",
        lambda m: m.engine.completion_tokens,
    ),
    (
        "dflash_pauses",
        "Generations paused because the pool had run out.",
        lambda m: m.engine.pauses,
    ),
)
"""For each model, since it loaded: name without ``_total``, help, value."""

DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[DraftStatistics], float]], ...] = (
    (
        "dflash_draft_proposed_tokens",
        "Tokens that were guessed and verified.",
        lambda d: d.proposed,
    ),
    ("dflash_draft_accepted_tokens", "Those of them that came.", lambda d: d.accepted),
    ("dflash_draft_steps", "Steps in which guesses were verified.", lambda d: d.steps),
    (
        "dflash_draft_runs",
        "Parts of sequences in those steps: how often one had guesses verified.",
        lambda d: d.runs,
    ),
    ("dflash_draft_seconds", "Time that went into guessing.", lambda d: d.draft_seconds),
    (
        "dflash_draft_verify_seconds",
        "Time of the steps that verified, their sampling included.",
        lambda d: d.verify_seconds,
    ),
)
"""For each model with a draft, since it loaded: as COUNTERS."""


class MetricsPage:
    """Renders the page of what ``collector`` reads."""

    def __init__(self, collector: ServerCollector) -> None:
        # Our own, so that nothing that others count in this process shows up here.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, in the format that an Accept header wants."""
        if prefers_openmetrics(accept):
            return _openmetrics_page(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return _plain_page(self._registry), CONTENT_TYPE_PLAIN_0_0_4


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics, and plain text not before it."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind in weights:
            given = [part[2:] for part in parameters if part.startswith("q=")]
            try:
                weight = float(given[0]) if given else 1.0
            except ValueError:
                continue
            weights[kind] = max(weights[kind], weight)
    wanted, plain = weights.values()
    return wanted > 0 and wanted >= plain


class ServerCollector(Collector):
    """Reads the snapshots when it is asked. ``status`` and ``timings``: those of all models in the
    same order, taken without waiting."""

    def __init__(
        self,
        requests: RequestTotals,
        status: Callable[[], ServerStatus],
        timings: Callable[[], Sequence[EngineTimings]],
    ) -> None:
        self._requests = requests
        self._status = status
        self._timings = timings

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _of_the_server(status)
        yield from _of_models(status.models)
        yield from _of_drafts(status.models)
        yield from _of_engines(status.models, self._timings())
        yield from self._of_requests(status.models)

    def _of_requests(self, models: Sequence[ModelStatus]) -> Iterator[Metric]:
        totals = self._requests
        requests = CounterMetricFamily(
            "dflash_requests",
            "Requests that are over, by how they ended.",
            labels=("route", "model", "outcome"),
        )
        for key, count in totals.requests.items():
            requests.add_metric(key, count)
        yield requests
        fallbacks = CounterMetricFamily(
            "dflash_fallbacks",
            "Reservations of a model other than the primary, by what kept the primary from it.",
            labels=("model", "reason"),
        )
        for model in models[1:]:
            for reason in get_args(FallbackReason):
                fallbacks.add_metric((model.name, reason), totals.fallbacks[model.name, reason])
        yield fallbacks
        names = [model.name for model in models]
        yield _by_model(
            "dflash_queue_wait_seconds",
            "Waiting for capacity, of requests that got some.",
            names,
            totals.queue_wait,
        )
        yield _by_model(
            "dflash_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            names,
            totals.first_token,
        )
        yield _by_model(
            "dflash_request_duration_seconds",
            "From the arrival to the end of requests that got a model.",
            names,
            totals.duration,
        )


def _of_the_server(status: ServerStatus) -> Iterator[Metric]:
    build = GaugeMetricFamily("dflash_build_info", "The server's version.", labels=("version",))
    build.add_metric((__version__,), 1)
    yield build
    router = status.router
    yield GaugeMetricFamily(
        "dflash_waiting_requests", "Requests that wait for capacity.", router.waiting
    )
    yield GaugeMetricFamily(
        "dflash_waiting_requests_limit", "How many may wait.", router.waiting_limit
    )
    yield GaugeMetricFamily(
        "dflash_preparing_requests",
        "Requests being rendered and tokenized, or in line for it.",
        router.preparing,
    )


def _of_models(models: Sequence[ModelStatus]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "dflash_model_info",
        "A loaded model's place.",
        labels=("model", "architecture", "device", "priority", "draft"),
    )
    for model in models:
        device = model.placement.target_device
        draft = model.draft.kind or ""
        info.add_metric((model.name, model.architecture, device, str(model.priority), draft), 1)
    yield info
    for name, text, read in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("model",))
        for model in models:
            gauge.add_metric((model.name,), read(model))
        yield gauge
    for name, text, read in COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("model",))
        for model in models:
            counter.add_metric((model.name,), read(model))
        yield counter
    in_flight = GaugeMetricFamily(
        "dflash_reservations", "Reservations by phase.", labels=("model", "phase")
    )
    sequences = GaugeMetricFamily(
        "dflash_sequences", "Sequences in the engine by state.", labels=("model", "state")
    )
    for model in models:
        for phase, count in model.in_flight.items():
            in_flight.add_metric((model.name, phase), count)
        engine = model.engine
        sequences.add_metric((model.name, "prefilling"), engine.sequences_prefilling)
        sequences.add_metric((model.name, "decoding"), engine.sequences_decoding)
        sequences.add_metric((model.name, "paused"), engine.sequences_paused)
    yield in_flight
    yield sequences


def _of_drafts(models: Iterable[ModelStatus]) -> Iterator[Metric]:
    drafts = [(m.name, m.engine.drafts) for m in models if m.engine.drafts is not None]
    for name, text, read in DRAFT_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("model",))
        for model, statistics in drafts:
            counter.add_metric((model,), read(statistics))
        yield counter


def _of_engines(
    models: Iterable[ModelStatus], timings: Iterable[EngineTimings]
) -> Iterator[Metric]:
    steps = HistogramMetricFamily(
        "dflash_step_seconds",
        "Parts of the engine's steps: draft, decode, sample, deliver.",
        labels=("model", "part"),
    )
    gaps = HistogramMetricFamily(
        "dflash_inter_token_seconds",
        "Between two deliveries of text of the same answer.",
        labels=("model",),
    )
    for model, timing in zip(models, timings, strict=True):
        name = model.name
        if model.engine.drafts is not None:
            _add(steps, (name, "draft"), timing.draft)
        _add(steps, (name, "decode"), timing.decode)
        _add(steps, (name, "sample"), timing.sample)
        _add(steps, (name, "deliver"), timing.deliver)
        _add(gaps, (name,), timing.inter_token)
    yield steps
    yield gaps


def _by_model(name: str, text: str, models: Iterable[str], timed: Timed) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("model",))
    for model in models:
        _add(family, (model,), timed[model].snapshot())
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], snapshot: HistogramSnapshot) -> None:
    buckets: list[tuple[str, float]] = []
    sum_so_far = 0
    bounds = (*map(floatToGoString, snapshot.bounds), "+Inf")
    for bound, count in zip(bounds, snapshot.counts, strict=True):
        sum_so_far += count
        buckets.append((bound, sum_so_far))
    family.add_metric(labels, buckets, snapshot.total)
