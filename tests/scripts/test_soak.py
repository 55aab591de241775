"""scripts/soak on scripted engines for a few seconds, and that it sees what is wrong."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's socket states")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the script's library."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return lambda name: importlib.import_module(f"soak_lib.{name}")


def test_the_command_can_be_started_and_explains_itself() -> None:
    assert os.access(ROOT / "scripts" / "soak", os.X_OK)
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "lib" / "soak.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.startswith("usage: scripts/soak")


def test_missing_models_are_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts/lib/soak.py", "--model-a", tmp_path / "none.gguf"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "none.gguf" in result.stderr.splitlines()[-1]


def test_shell_syntax() -> None:
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", ROOT / "scripts" / "soak"], check=True)


@pytest.mark.real
def test_a_signal_ends_it_and_its_server() -> None:
    command = [sys.executable, ROOT / "scripts" / "lib" / "soak.py", "--scripted", "--minutes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as soak:
        assert soak.stdout is not None
        assert "ready after" in soak.stdout.readline()
        (server,) = psutil.Process(soak.pid).children()
        soak.send_signal(signal.SIGTERM)
        output, _ = soak.communicate(timeout=60)
        assert soak.returncode == 1
        assert "stopped by SIGTERM" in output
        assert not server.is_running()


@pytest.mark.real
def test_some_seconds_of_chaos_break_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, ROOT / "scripts" / "lib" / "soak.py", "--scripted"]
    command += ["--minutes", "0.08", "--seed", "3", "--json", out]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert found["violation_count"] == 0
    assert found["figures"]["clients"] >= 12
    assert found["figures"]["exit code"] == 0
    assert len(found["outcomes"]) > 5
    assert found["samples"]


@pytest.mark.real
async def test_a_broken_invariant_is_found(soak: Callable[[str], ModuleType]) -> None:
    def alter(status: dict[str, Any]) -> dict[str, Any]:
        altered = copy.deepcopy(status)
        altered["models"][1]["kv_pool"]["committed"] = altered["models"][1]["kv_pool"]["total"] + 1
        return altered

    report = soak("report").Report("test", quiet=True)
    monitor = soak("monitor")
    setup = soak("setup").two_models(None)
    server_module = soak("server")
    async with server_module.running(setup, report) as server:
        await monitor.Monitor(server, report, alter_status=alter).look()
    assert report.figures["exit code"] == 0
    assert {violation["where"] for violation in report.violations} == {"invariant"}
    assert any("1025 of 1024 cells" in violation["what"] for violation in report.violations)


# ----------------------------------------------------------------------- what is judged, alone


def model_page(**changes: Any) -> dict[str, Any]:
    page = {
        "name": "m",
        "slots": {"total": 2, "reserved": 1},
        "kv_pool": {"total": 100, "committed": 30, "used": 10},
        "in_flight": {"reserved": 0, "prefill": 0, "decode": 1, "draining": 0},
        "engine": {"sequences_prefilling": 0, "sequences_decoding": 1},
        "health": {"healthy": True, "reason": None},
    }
    for path, value in changes.items():
        outer, inner = path.split("__")
        page[outer][inner] = value
    return page


def page(*, waiting: int = 0, state: str = "ready", **changes: Any) -> dict[str, Any]:
    return {
        "state": state,
        "routing": {"waiting": waiting, "waiting_limit": 4, "preparing": 0},
        "models": [model_page(**changes)],
    }


def test_a_sound_page_breaks_no_invariant(soak: Callable[[str], ModuleType]) -> None:
    broken_invariants = soak("monitor").broken_invariants
    assert broken_invariants(page(waiting=4)) == []
    assert broken_invariants(page(slots__reserved=2)) == []  # two answers to one request
    more = {"total": 4, "reserved": 3}
    status = page()
    status["models"][0]["slots"] = more
    assert broken_invariants(status) == ["m: 1 in flight hold 3 slots"]


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting": 5},
        {"state": "draining"},
        {"slots__reserved": 3},
        {"slots__reserved": 0},
        {"kv_pool__committed": 101},
        {"kv_pool__committed": 0},
        {"kv_pool__used": 101},
        {"in_flight__decode": 2},
        {"in_flight__draining": -1},
        {"health__healthy": False},
    ],
)
def test_each_broken_invariant_is_named(
    soak: Callable[[str], ModuleType], changes: dict[str, Any]
) -> None:
    assert soak("monitor").broken_invariants(page(**changes))


def test_what_is_left_at_the_end_is_named(soak: Callable[[str], ModuleType]) -> None:
    left = soak("monitor").not_idle(page(waiting=1))
    assert left == [
        "waiting 1",
        "m slots 1",
        "m cells committed 30",
        "m cells used 10",
        "m in flight 1",
        "m sequences 1",
    ]


def test_the_slope_of_a_line(soak: Callable[[str], ModuleType]) -> None:
    slope = soak("monitor").slope
    assert slope([(x, 7 + 3 * x) for x in range(10)]) == pytest.approx(3)
    assert slope([(1, 5)]) == 0


def error(status: int, **headers: str) -> tuple[int, dict[str, str], bytes]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": "m", "type": kind, "param": None, "code": "c"}})
    length = str(len(body))
    given = {"x-request-id": "1", "content-type": "application/json", "content-length": length}
    return status, {**given, **headers}, body.encode()


def test_a_right_error_is_let_through(soak: Callable[[str], ModuleType]) -> None:
    answer = soak("wire").Answer(*error(503, **{"retry-after": "1"}), True)
    assert soak("judge").check_answer(answer, {200, 503}) == "503 c"


@pytest.mark.parametrize(
    ("status", "headers", "body", "complete"),
    [
        (*error(500), True),
        (*error(503), True),  # without Retry-After
        (*error(400), False),
        (400, {"x-request-id": "1", "content-type": "text/html"}, b"<html>", True),
        (400, {"content-type": "application/json"}, b"{}", True),
        (*error(400)[:2], b"{}", True),
        (*error(400)[:2], b"Traceback (most recent call last)", True),
        (0, {}, b"", False),
    ],
)
def test_a_wrong_answer_is_a_violation(
    soak: Callable[[str], ModuleType],
    status: int,
    headers: dict[str, str],
    body: bytes,
    complete: bool,
) -> None:
    judge = soak("judge")
    answer = soak("wire").Answer(status, headers, body, complete)
    with pytest.raises(judge.Violation):
        judge.check_answer(answer, {200, 400, 503})


def anthropic(status: int, kind: str, message: str = "m", id_: str = "1") -> Any:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": id_}
    raw = json.dumps(body).encode()
    headers = {"x-request-id": "1", "request-id": "1", "content-type": "application/json"}
    headers |= {"content-length": str(len(raw)), "retry-after": "1"}
    return status, headers, raw, True


def test_a_right_error_of_messages_is_let_through(soak: Callable[[str], ModuleType]) -> None:
    judge, answer = soak("judge"), soak("wire").Answer
    bad = answer(*anthropic(400, "invalid_request_error"))
    assert judge.check_answer(bad, {400}, api="messages") == "400 invalid_request_error"
    full = answer(*anthropic(503, "overloaded_error", f"{judge.QUEUE_FULL_WORDS} and"))
    assert judge.check_refusal(full, "messages") == judge.QUEUE_FULL


@pytest.mark.parametrize(
    "answer",
    [
        anthropic(400, "overloaded_error"),
        anthropic(503, "api_error"),
        anthropic(400, "invalid_request_error", ""),
        anthropic(400, "invalid_request_error", "m", "another"),
        (*error(400), True),
    ],
)
def test_a_wrong_error_of_messages_is_a_violation(
    soak: Callable[[str], ModuleType], answer: Any
) -> None:
    judge = soak("judge")
    with pytest.raises(judge.Violation):
        judge.check_answer(soak("wire").Answer(*answer), {400, 503}, api="messages")


def test_a_503_of_messages_that_is_no_full_queue_is_a_violation(
    soak: Callable[[str], ModuleType],
) -> None:
    judge = soak("judge")
    with pytest.raises(judge.Violation):
        judge.check_refusal(soak("wire").Answer(*anthropic(503, "overloaded_error")), "messages")


def test_the_log_is_read_for_errors(soak: Callable[[str], ModuleType]) -> None:
    check_log = soak("server").check_log
    assert check_log("10:00:00 INFO    ready: a\n10:00:01 WARNING careful\n") == []
    assert check_log("10:00:00 ERROR   a connection failed: x\n")
    assert check_log("Traceback (most recent call last):\n")
