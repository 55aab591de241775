"""What the environment says of traces, decided before anything of OpenTelemetry's is imported.

The SDK's variables stay the SDK's. Decided here is only whether there are traces at all, and what
to tell an operator who has set something that does not do what it says. Never a refusal: these
variables are set for whole fleets, and a server that nobody can observe still serves.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from attrs import frozen

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOL = "http/protobuf"
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_NOT_SERVED = {
    "OTEL_METRICS_EXPORTER": "metrics are not pushed: Prometheus gets them from /metrics",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "metrics are not pushed: Prometheus gets them from "
    "/metrics",
    "OTEL_LOGS_EXPORTER": "the log is not pushed: it is on standard error",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "the log is not pushed: it is on standard error",
    "OTEL_CONFIG_FILE": "its file is not read: the other variables count",
    "OTEL_EXPERIMENTAL_CONFIG_FILE": "its file is not read: the other variables count",
    "OTEL_BSP_EXPORT_TIMEOUT": "the SDK has no use for it: OTEL_EXPORTER_OTLP_TIMEOUT counts",
}
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")
_COMPRESSIONS = ("none", "gzip", "deflate")
_CHOICES = {
    "OTEL_SDK_DISABLED": ("true", "false"),
    "OTEL_TRACES_SAMPLER": (
        "always_on",
        "always_off",
        "parentbased_always_on",
        "parentbased_always_off",
        *_RATIO_SAMPLERS,
    ),
    "OTEL_EXPORTER_OTLP_COMPRESSION": _COMPRESSIONS,
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": _COMPRESSIONS,
}
_SAMPLER_ARG = "OTEL_TRACES_SAMPLER_ARG"
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
_DAY = 86_400
_MOST_SPANS = 1_000_000
_QUEUE, _BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_SDK_QUEUE, _SDK_BATCH = 2048, 512
"""What the SDK takes where nothing is given. It refuses a queue that is smaller than a batch, in
words that name neither variable."""
_NUMBERS: Mapping[str, tuple[type[int] | type[float], float, float]] = {
    # A wait that is too long for a thread ends the SDK's with an error.
    "OTEL_BSP_SCHEDULE_DELAY": (int, 1, 1000 * _DAY),
    _QUEUE: (int, 1, _MOST_SPANS),
    _BATCH: (int, 1, _MOST_SPANS),
    **dict.fromkeys(_TIMEOUTS, (float, 0.001, _DAY)),
}
_KINDS = {int: "whole number", float: "number"}
_LONG_TIMEOUT = 600.0
"""Seconds from which on somebody has probably meant milliseconds."""
_FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}{file}"
    for signal in ("", "TRACES_")
    for file in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
)


@frozen
class TraceSettings:
    """What the environment comes to."""

    endpoint: str | None = None
    """Where traces go, without what a URL may have of a secret; ``None``: there are none."""
    warnings: tuple[str, ...] = ()
    """What is set and does not do what it says, one line each."""


def read_trace_settings(environ: Mapping[str, str]) -> TraceSettings:
    """Decide. An empty variable counts as unset."""
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return TraceSettings()
    warnings = list(_unserved(given))
    name = _TRACES_ENDPOINT if _TRACES_ENDPOINT in given else _ENDPOINT
    endpoint = given.get(name)
    if endpoint is None:
        if given.get("OTEL_TRACES_EXPORTER", "none").lower() != "none":
            warnings.append(f"OTEL_TRACES_EXPORTER is set, but traces are off without {_ENDPOINT}")
        return TraceSettings(None, tuple(warnings))
    named = given.get("OTEL_TRACES_EXPORTER", "otlp").lower().split(",")
    exporters = {exporter.strip() for exporter in named if exporter.strip()}
    if exporters == {"none"}:
        return TraceSettings(None, tuple(warnings))
    if exporters != {"otlp"}:
        others = ", ".join(sorted(exporters - {"otlp"}))
        warnings.append(f"OTEL_TRACES_EXPORTER names {others}: traces go by otlp, or nowhere")
    warnings += _odd_values(given)
    problem = _why_off(given) if "otlp" in exporters else "otlp is not among those named"
    problem = problem or _endpoint_problem(endpoint, path_is_added=name == _ENDPOINT)
    if problem is not None:
        warnings.append(f"{name} is set, but traces are off: {problem}")
        return TraceSettings(None, tuple(warnings))
    return TraceSettings(_without_secrets(endpoint), tuple(warnings))


def _unserved(given: Mapping[str, str]) -> Iterator[str]:
    for name, reason in _NOT_SERVED.items():
        if given.get(name, "none").lower() != "none":
            yield f"{name} is set, but {reason}"


def _odd_values(given: Mapping[str, str]) -> Iterator[str]:
    """Of what the SDK puts up with, or warns of without a name."""
    for name, choices in _CHOICES.items():
        if name in given and given[name].lower() not in choices:
            yield (
                f"{name} is {given[name]}, which is none of {', '.join(choices)}: "
                "what counts is its default"
            )
    if _SAMPLER_ARG in given and not _samples_by_ratio(given):
        yield f"{_SAMPLER_ARG} is set, but only {' and '.join(_RATIO_SAMPLERS)} have a use for it"
    for name in _TIMEOUTS:
        if name in given and _is_within(given[name], float, _LONG_TIMEOUT, _DAY):
            yield f"{name} is {given[name]}, which Python's SDK counts in seconds"


def _samples_by_ratio(given: Mapping[str, str]) -> bool:
    return given.get("OTEL_TRACES_SAMPLER", "").lower() in _RATIO_SAMPLERS


def _why_off(given: Mapping[str, str]) -> str | None:
    """What keeps traces from where they are wanted; ``None``: nothing."""
    protocol = given.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL
    )
    if protocol.lower() != _PROTOCOL:
        return (
            f"OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}, and only {_PROTOCOL} is spoken "
            "(collectors take it on port 4318)"
        )
    if not all(map(_is_installed, _PACKAGES)):
        return "OpenTelemetry is not installed; its packages are the extra otel: dflash-trio[otel]"
    numbers = dict(_NUMBERS)
    if _samples_by_ratio(given):
        numbers[_SAMPLER_ARG] = (float, 0, 1)
    for name, (kind, least, most) in numbers.items():
        if name in given and not _is_within(given[name], kind, least, most):
            return f"{name} is {given[name]}, which is no {_KINDS[kind]} from {least} to {most}"
    queue = int(given.get(_QUEUE, _SDK_QUEUE))
    if (batch := int(given.get(_BATCH, _SDK_BATCH))) > queue:
        return f"{_QUEUE} is {queue}, and {_BATCH} {batch}: a batch has to fit into the queue"
    for name in _FILES:
        if name in given and not os.path.exists(given[name]):
            return f"{name} names {given[name]}, which is not there"
    return None


def _endpoint_problem(endpoint: str, *, path_is_added: bool) -> str | None:
    """Why nothing can be sent there; ``None``: perhaps it can. Quotes nothing of it."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not endpoint.isprintable() or " " in endpoint:
        return "it is no URL of a host by http or https"
    if path_is_added and (parts.query or parts.fragment):
        return (
            f"it has a query or a fragment, where no path can be added; {_TRACES_ENDPOINT} "
            "is taken as it is"
        )
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.rpartition(".")[0]) is not None
    except ModuleNotFoundError:
        return False


def _is_within(text: str, kind: type[int] | type[float], least: float, most: float) -> bool:
    try:
        return least <= kind(text) <= most
    except ValueError:
        return False


def _without_secrets(endpoint: str) -> str:
    """Neither the user nor the query of a URL."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
