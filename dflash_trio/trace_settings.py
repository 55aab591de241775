"""What the environment says of traces, decided before anything of OpenTelemetry's is imported.

The SDK's variables stay the SDK's. Decided here is only whether there are traces at all, and what
to tell an operator who has set something that does not do what it says. Never a refusal: these
variables are set for whole fleets, and a server that nobody can observe still serves.
"""

from __future__ import annotations

import importlib.util
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
}


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
    endpoint = given.get(_TRACES_ENDPOINT) or given.get(_ENDPOINT)
    if endpoint is None:
        if given.get("OTEL_TRACES_EXPORTER", "none") != "none":
            warnings.append(f"OTEL_TRACES_EXPORTER is set, but traces are off without {_ENDPOINT}")
        return TraceSettings(None, tuple(warnings))
    exporters = {name.strip() for name in given.get("OTEL_TRACES_EXPORTER", "otlp").split(",")}
    if exporters == {"none"}:
        return TraceSettings(None, tuple(warnings))
    if exporters != {"otlp"}:
        others = ", ".join(sorted(exporters - {"otlp"}))
        warnings.append(f"OTEL_TRACES_EXPORTER names {others}: traces go by otlp, or nowhere")
    problem = _why_off(given) if "otlp" in exporters else "otlp is not among those named"
    if problem is not None:
        name = _TRACES_ENDPOINT if _TRACES_ENDPOINT in given else _ENDPOINT
        warnings.append(f"{name} is set, but traces are off: {problem}")
        return TraceSettings(None, tuple(warnings))
    return TraceSettings(_without_secrets(endpoint), tuple(warnings))


def _unserved(given: Mapping[str, str]) -> Iterator[str]:
    for name, reason in _NOT_SERVED.items():
        if given.get(name, "none") != "none":
            yield f"{name} is set, but {reason}"


def _why_off(given: Mapping[str, str]) -> str | None:
    """What keeps traces from where they are wanted; ``None``: nothing."""
    protocol = given.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL
    )
    if protocol != _PROTOCOL:
        return (
            f"OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}, and only {_PROTOCOL} is spoken "
            "(collectors take it on port 4318)"
        )
    if not all(map(_is_installed, _PACKAGES)):
        return "OpenTelemetry is not installed; its packages are the extra otel: dflash-trio[otel]"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.rpartition(".")[0]) is not None
    except ModuleNotFoundError:
        return False


def _without_secrets(endpoint: str) -> str:
    """Neither the user nor the query of a URL."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return "an endpoint that is no URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
