"""What came out, as a table for people, and as JSON and JUnit XML for machines."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from .client import End
from .runner import Result
from .verdicts import exit_words, read_answer, seen_words
from .witnesses import Account

HEADINGS = (
    "scenario", "phase reached", "clients saw", "exit", "seconds", "left over", "verdict",
)  # fmt: skip
BODY_TAIL_BYTES = 2000


def table(results: Sequence[Result]) -> str:
    """A table in Markdown, its columns aligned, and a line with the sums."""
    rows = [HEADINGS, *(_row(result) for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, _line(["-" * width for width in widths], widths))
    return "\n".join([*lines, "", summary(results)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _row(result: Result) -> tuple[str, ...]:
    observation = result.observation
    seconds = observation.seconds
    ended = observation.exited_at is not None
    cells = (
        result.scenario.name,
        "no" if observation.reached is None else "yes",
        clients_words(result),
        str(observation.exit_code) if ended else ("none" if observation.signals_at else ""),
        "" if seconds is None else f"{seconds:.2f}",
        "; ".join(observation.leftovers) or ("nothing" if ended else ""),
        verdict_words(result),
    )
    return tuple(cell.replace("|", "/").replace("\n", " ") for cell in cells)


def clients_words(result: Result) -> str:
    """What each client saw; equal ones once, with their number."""
    seen = Counter(
        f"{client.role.value}: {_seen(client, result)}" for client in result.observation.clients
    )
    return "; ".join(text if n == 1 else f"{n} x {text}" for text, n in seen.items())


def _seen(client: Account, result: Result) -> str:
    return seen_words(client, read_answer(client, result.scenario.api))


def verdict_words(result: Result) -> str:
    """The verdict with its reasons."""
    verdict = result.verdict
    kind = verdict.kind if verdict.kind == "right" else verdict.kind.upper()
    return f"{kind}: {'; '.join(verdict.reasons)}" if verdict.reasons else kind


def summary(results: Sequence[Result]) -> str:
    """How many of each verdict."""
    counts = Counter(result.verdict.kind for result in results)
    kinds = [f"{count} {kind}" for kind, count in counts.most_common()]
    return f"{len(results)} scenarios: {', '.join(kinds)}"


# ---------------------------------------------------------------------------- machines


def as_json(results: Sequence[Result]) -> str:
    """Everything, as one JSON object. Times in seconds after the first signal."""
    return json.dumps({"results": [_object(result) for result in results]}, indent=2) + "\n"


def _object(result: Result) -> dict[str, Any]:
    observation, scenario = result.observation, result.scenario
    return {
        "scenario": scenario.name,
        "phase": scenario.phase,
        "signals": scenario.pattern,
        "api": scenario.api,
        "verdict": result.verdict.kind,
        "reasons": list(result.verdict.reasons),
        "reached": observation.reached,
        "exit_code": observation.exit_code,
        "seconds": observation.seconds,
        "leftovers": list(observation.leftovers),
        "clients": [_client(client, result) for client in observation.clients],
        "log_tail": observation.log_tail,
    }


def _client(client: Account, result: Result) -> dict[str, Any]:
    seen, answer = client.seen, read_answer(client, result.scenario.api)
    at = result.observation.signals_at
    ended = seen.ended_at - at[0] if at and seen.ended_at is not None else None
    return {
        "role": client.role.value,
        "end": seen.end.value,
        "status": seen.status,
        "ended_after_seconds": ended,
        "body_bytes": len(seen.body),
        "body_sha256": hashlib.sha256(seen.body).hexdigest(),
        "body_tail": seen.body[-BODY_TAIL_BYTES:].decode("utf-8", "replace"),
        "text": answer.text,
        "finish": answer.finish,
        "tokens": answer.tokens,
        "terminal": answer.terminal,
        "problem": answer.problem,
    }


def as_junit(results: Sequence[Result]) -> str:
    """JUnit XML. What was not reached or not served is an error: it is never passed over."""
    counts = Counter(result.verdict.kind for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name="dflash-shutdown-check",
        tests=str(len(results)),
        failures=str(counts["wrong"]),
        errors=str(counts["not reached"] + counts["not served"]),
        skipped="0",
        time=f"{sum(result.observation.seconds or 0 for result in results):.3f}",
    )
    for result in results:
        _test_case(suite, result)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _test_case(suite: ElementTree.Element, result: Result) -> None:
    verdict, observation = result.verdict, result.observation
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"shutdown.{result.scenario.api or 'process'}",
        name=result.scenario.name,
        time=f"{observation.seconds or 0:.3f}",
    )
    if verdict.kind != "right":
        tag = "failure" if verdict.kind == "wrong" else "error"
        message = _printable(verdict_words(result))
        fault = ElementTree.SubElement(case, tag, type=verdict.kind, message=message)
        exited = exit_words(observation.exit_code)
        fault.text = _printable(f"{clients_words(result)}\n{exited}\n{observation.log_tail}")


def _printable(text: str) -> str:
    """XML 1.0 has no way to say most control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def progress_line(result: Result) -> str:
    """One line as a scenario ends."""
    open_ended = sum(client.seen.end is End.OPEN for client in result.observation.clients)
    unended = f" ({open_ended} clients unended)" if open_ended else ""
    return f"{result.scenario.name}: {verdict_words(result)}{unended}"
