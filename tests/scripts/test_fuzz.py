"""scripts/fuzz on a scripted engine for some thousand bodies, and that it sees what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, str(ROOT / "scripts" / "lib" / "fuzz.py")]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's socket states")


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the script's library."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return lambda name: importlib.import_module(f"fuzz_lib.{name}")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=280, check=False
    )


def test_the_command_can_be_started_and_explains_itself() -> None:
    assert os.access(ROOT / "scripts" / "fuzz", os.X_OK)
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", ROOT / "scripts" / "fuzz"], check=True)
    result = run_command("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: scripts/fuzz")


@pytest.mark.parametrize(
    "url", ["http://example.org:80", "https://127.0.0.1:1", "127.0.0.1:8080", "http://10.0.0.1:80"]
)
def test_no_other_machine_is_fuzzed(url: str) -> None:
    result = run_command(url)
    assert result.returncode == 2
    assert "only this machine" in result.stderr


@pytest.mark.real
def test_two_hundred_hostile_bodies_for_each_route_break_nothing(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    result = run_command("--count", "200", "--seed", "3", "--json", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert found["violation_count"] == 0
    assert len(found["outcomes"]) == 10
    for route, outcomes in found["outcomes"].items():
        assert sum(outcomes.values()) == 200
        # Not all is refused, and not all is let through.
        assert route.endswith("/cancel") or 20 < outcomes["200"] < 150, (route, outcomes)
    assert found["figures"]["exit code"] == 0


def test_a_case_is_always_the_same_one(fuzz: Callable[[str], ModuleType]) -> None:
    make_case = fuzz("cases").make_case
    for route in fuzz("shapes").SHAPES:
        assert make_case(route, 3, 7) == make_case(route, 3, 7)
        assert len({make_case(route, 3, n).body for n in range(50)}) > 25 or "{" in route


# ----------------------------------------------------------------------- what is judged, alone

OPENAI = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "m"},
    "request_id": "r1",
}
HEADERS = {"x-request-id": "r1", "request-id": "r1", "content-type": "application/json"}


def judged(
    fuzz: Callable[[str], ModuleType], path: str, status: int, body: Any, **headers: str
) -> str:
    case = fuzz("cases").Case(path, 0, path, b"", {})
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = importlib.import_module("soak_lib.wire").Answer(
        status, {**HEADERS, **headers}, raw, True
    )
    return str(fuzz("judge").judge(case, answer))


def test_right_refusals_are_let_through(fuzz: Callable[[str], ModuleType]) -> None:
    assert judged(fuzz, "/v1/chat/completions", 400, OPENAI) == "400"
    assert judged(fuzz, "/v1/messages", 400, ANTHROPIC) == "400"
    assert judged(fuzz, "/tokenize", 200, {"tokens": []}) == "200"


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/chat/completions", 500, OPENAI),
        ("/v1/chat/completions", 302, OPENAI),
        ("/v1/chat/completions", 400, ANTHROPIC),
        ("/v1/messages", 400, OPENAI),
        ("/v1/messages", 400, {**ANTHROPIC, "request_id": "r2"}),
        ("/v1/messages", 413, ANTHROPIC),
        ("/tokenize", 400, {"error": {**OPENAI["error"], "code": 7}}),
        ("/tokenize", 400, {"error": {**OPENAI["error"], "message": " "}}),
        ("/tokenize", 400, {"error": {**OPENAI["error"], "message": "m" * 5000}}),
        ("/tokenize", 503, {"error": {**OPENAI["error"], "type": "server_error"}}),
        ("/tokenize", 400, b"<html>"),
        ("/tokenize", 400, b"Traceback (most recent call last):"),
        ("/tokenize", 200, {"content": ""}),
        ("/tokenize", 200, b'{"tokens": [NaN]}'),
        ("/tokenize", 200, b'{"tokens": ["\\ud83d"]}'),
    ],
)
def test_a_wrong_answer_is_a_violation(
    fuzz: Callable[[str], ModuleType], path: str, status: int, body: Any
) -> None:
    fuzz("judge")
    violation = importlib.import_module("soak_lib.judge").Violation
    with pytest.raises(violation):
        judged(fuzz, path, status, body)


STREAM = b'data: {"choices": []}\n\ndata: [DONE]\n\n'


def test_a_whole_stream_is_let_through(fuzz: Callable[[str], ModuleType]) -> None:
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    assert judged(fuzz, "/v1/chat/completions", 200, STREAM, **kind) == "200 stream"
    named = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    assert judged(fuzz, "/v1/messages", 200, named, **kind) == "200 stream"


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        STREAM[:-3],
        STREAM.replace(b"[DONE]", b"{}"),
        STREAM + b"data: {}\n\n",
        STREAM.replace(b"[]}", b'[], "error": {"message": "m"}}'),
        STREAM.replace(b"data: {", b"event: x\ndata: {"),
        STREAM.replace(b"[]", '["\u2028"]'.encode()),
    ],
)
def test_a_wrong_stream_is_a_violation(fuzz: Callable[[str], ModuleType], stream: bytes) -> None:
    fuzz("judge")
    violation = importlib.import_module("soak_lib.judge").Violation
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    with pytest.raises(violation):
        judged(fuzz, "/v1/chat/completions", 200, stream, **kind)


def test_health_that_is_late_twice_in_a_row_or_not_ok_is_a_violation(
    fuzz: Callable[[str], ModuleType],
) -> None:
    judge_health = fuzz("run").judge_health
    report_class = importlib.import_module("soak_lib.report").Report

    def violations(*probes: tuple[int, float, float]) -> int:
        report = report_class("test", quiet=True)
        judge_health(probes, report)
        return int(report.violation_count)

    assert violations((200, 0.01, 0.01), (200, 0.3, 0.3), (200, 0.01, 0.01)) == 0
    assert violations((200, 0.3, 0.3), (200, 0.3, 0.3)) == 1
    assert violations((200, 0.9, 0.1), (200, 0.9, 0.1)) == 0  # the machine did something else
    assert violations((200, 0.01, 0.01), (503, 0.01, 0.01)) == 1
    assert violations() == 1
