"""What is written at the end: a Markdown table, and everything as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .figures import Series, quantile, summary
from .rounds import Measured

_COLUMNS = (
    "streams",
    "server",
    "tokens/s",
    "ratio [95 %]",
    "TTFT median / p95, ms",
    "gap median / p95 / max, ms",
    "CPU s per 1000 tokens",
    "peak Pss_Anon, MiB",
    "peak RSS, MiB",
    "pairs",
)


def machine(device_note: str | None) -> dict[str, Any]:
    """Where it was measured."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
                break
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinities
        cores = os.cpu_count() or 1
    return {
        "cpu": model,
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
        "device_note": device_note,
    }


def markdown(
    results: Sequence[Measured], place: Mapping[str, Any], commands: Mapping[str, str | None]
) -> str:
    """The table with what it needs to be understood."""
    done = [measured for measured in results if measured.pairs]
    if not done:
        return "Nothing was measured."
    work = done[0].workload
    shared = f"a shared head of {work.shared_words} words and " if work.shared_words else ""
    asked = f"Prompts of {shared}{work.words} words"
    if work.prompts:
        asked = f"{len(work.prompts)} prompts in turn"
    ends = "" if work.ignore_eos else " at most"
    note = f"; {place['device_note']}" if place["device_note"] else ""
    loads = [turn.load for m in done for s in m.series for turn in s.rounds]
    lines = [
        f"{place['cpu']}, {place['cores']} cores, {place['system']}{note}. Load average "
        f"{min(loads):.1f} to {max(loads):.1f} (what is measured included).",
        "",
        f"{asked}, {work.tokens} tokens each{ends}, {work.requests} "
        f"per stream and round, temperature {work.temperature:g}. Ratios are to "
        f"{done[0].baseline.name}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for measured in done:
        lines += [_row(measured, series) for series in measured.series]
    wide = [str(m.workload.streams) for m in done if not m.narrow]
    if wide:
        lines += ["", f"Stopped by a limit, not by a narrow interval: {', '.join(wide)} streams."]
    lines += [
        "",
        *(f"- {name}: `{command or 'given by URL'}`" for name, command in commands.items()),
    ]
    return "\n".join(lines)


def _row(measured: Measured, series: Series) -> str:
    found = summary(series, measured.baseline)
    low, high = found["ratio_interval"]
    ratio = "1" if series is measured.baseline else f"{found['ratio']:.3f}"
    if series is not measured.baseline and measured.pairs > 1:
        ratio += f" [{low:.3f}, {high:.3f}]"
    cells = (
        str(measured.workload.streams),
        series.name,
        _number(found["tokens_per_second"]),
        ratio,
        " / ".join(_number(found[f"ttft_{name}_ms"]) for name in ("median", "p95")),
        " / ".join(_number(found[f"gap_{name}_ms"]) for name in ("median", "p95", "max")),
        _number(found["cpu_seconds_per_1000_tokens"]),
        _number(found["peak_pss_anon_mib"]),
        _number(found["peak_rss_mib"]),
        str(measured.pairs),
    )
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    """Three digits or a little more; a dash for what is not known."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_json(
    results: Sequence[Measured],
    place: Mapping[str, Any],
    commands: Mapping[str, str | None],
    arguments: Mapping[str, Any],
) -> str:
    """All of it: the summaries, and each round for whoever wants to count differently."""
    page = {
        "machine": place,
        "commands": commands,
        "arguments": arguments,
        "workloads": [
            {
                **attrs.asdict(measured.workload),
                "baseline": measured.baseline.name,
                "narrow": measured.narrow,
                "servers": [
                    {
                        "name": series.name,
                        **summary(series, measured.baseline),
                        "round_list": [_round(turn) for turn in series.rounds],
                    }
                    for series in measured.series
                ],
            }
            for measured in results
            if measured.pairs
        ],
    }
    return json.dumps(_without_nan(page), indent=1, default=str) + "\n"


def _round(turn: Any) -> dict[str, Any]:
    gaps = [gap for request in turn.requests for gap in request.gaps]
    return {
        "seconds": turn.seconds,
        "tokens": turn.tokens,
        "tokens_per_second": turn.rate,
        "cpu_seconds": turn.cpu_seconds,
        "generator_cpu_seconds": turn.generator_cpu_seconds,
        "load": turn.load,
        "ttft_seconds": [request.first - request.sent for request in turn.requests],
        "gap_seconds": {
            name: quantile(gaps, share)
            for name, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))
        },
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what is not known is null."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
