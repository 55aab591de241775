"""Wrong servers: every fault is found and named, and nothing that was not reached passes."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from dflash_trio.testing import CheckOptions, Result, ServerFailed, all_right, check, table
from tests.support.http_client import PATIENCE
from tests.testing.harness import PATIENT, QUICK, SHARED_MEMORY_NAME, bad_server, changed, check_all

# The first test waits for the servers of all.
pytestmark = pytest.mark.timeout(900)

# fault: (where it shows, what has to be said of it, further options)
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cuts": ("chat/streaming/term", "active answer: cut after", {}),
    "ignores": ("chat/streaming/term", "the server did not end within 20 s", {"timeout": 20.0}),
    "leaves-child": ("idle/term", "(sleep)", {}),
    "leaves-port": ("idle/term", " still bound", {}),
    "leaves-socket-file": (
        "idle/term",
        "left over: socket file ",
        {"server": bad_server("leaves-socket-file", place="{socket}")},
    ),
    "leaves-shared-memory": ("idle/term", f"shared memory /dev/shm/{SHARED_MEMORY_NAME}", {}),
    "exit-3": ("idle/term", "exit code 3 instead of exit code 0", {}),
    "forgets-waiters": (
        "chat/queued/term",
        "waiting request: was closed without an answer instead of a 503",
        {},
    ),
    "serves-waiters": ("chat/queued/term", "waiting request: got 200 instead of a 503", {}),
    "wrong-text": (
        "chat/streaming/term",
        "active answer: its text differs from the golden run's at character",
        {},
    ),
    "wrong-finish": ("chat/streaming/term", "ended with stop instead of length", {}),
    "no-terminal-event": ("chat/streaming/term", "ended without its terminal event", {}),
    "listens-on": ("chat/streaming/term", "new connection: still accepted", {"timeout": 20.0}),
    "keeps-idle": ("idle-keep-alive/term", "idle connection: was not closed", {"timeout": 20.0}),
}
OTHERS: dict[str, CheckOptions] = {
    "drains instead of finalizing": changed(
        PATIENT,
        server=bad_server("right"),
        policy="finalize",
        answer_tokens=300,
        scenarios=("streaming/term", "prefilling", "non-streaming"),
    ),
    "finalizes instead of draining": changed(
        PATIENT,
        server=bad_server("right", "finalize"),
        scenarios=("streaming/term", "prefilling", "non-streaming"),
    ),
    "hasty": changed(QUICK, server=bad_server("hasty"), answer_tokens=8, jobs=2),
    "small answers": changed(
        QUICK, server=bad_server("right"), long_answer_tokens=50, scenarios=("zero-window/term",)
    ),
    "chat-only": changed(
        PATIENT,
        server=bad_server("chat-only"),
        apis=("chat", "messages"),
        scenarios=("streaming/term",),
    ),
    "right, drain": changed(PATIENT, server=bad_server("right"), jobs=4),
    "right, finalize": changed(
        PATIENT,
        server=bad_server("right", "finalize"),
        policy="finalize",
        apis=("messages", "responses"),
        scenarios=("streaming/term", "non-streaming", "prefilling", "queued"),
        jobs=2,
    ),
    "right, other APIs": changed(
        PATIENT,
        server=bad_server("right"),
        apis=("messages", "responses", "completions"),
        scenarios=("streaming/term", "non-streaming"),
        jobs=2,
    ),
    "never ready": changed(QUICK, server=("sleep", "60", "{port}"), timeout=0.5),
    "ends": changed(QUICK, server=("false", "{port}")),
    "not there": changed(QUICK, server=("/nowhere/server", "{port}")),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result] | Exception]:
    faults = {
        fault: changed(QUICK, **{"server": bad_server(fault), "scenarios": (scenario,), **options})
        for fault, (scenario, _, options) in FAULTS.items()
    }
    found = trio.run(check_all, {**faults, **OTHERS}, ("hasty", "small answers"))
    for left in Path("/dev/shm").glob(f"{SHARED_MEMORY_NAME}-*"):
        left.unlink()
    return found


def verdicts(results: list[Result] | Exception) -> dict[str, tuple[str, str]]:
    """Kind and reasons by scenario."""
    assert not isinstance(results, Exception), results
    return {r.scenario.name: (r.verdict.kind, "; ".join(r.verdict.reasons)) for r in results}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str, results: Any) -> None:
    scenario, words, _ = FAULTS[fault]
    kind, reasons = verdicts(results[fault])[scenario]
    assert kind == "wrong", reasons
    assert words in reasons
    assert not all_right(results[fault])


@pytest.mark.parametrize("name", ["right, drain", "right, finalize", "right, other APIs"])
def test_a_right_foreign_server_is_found_right_from_the_client_side_alone(
    name: str, results: Any
) -> None:
    assert all_right(results[name]), table(results[name])


def test_draining_is_no_finalizing(results: Any) -> None:
    found = verdicts(results["drains instead of finalizing"])
    assert found["chat/streaming/term"] == (
        "wrong",
        "active answer: went on to its end instead of being finalized",
    )
    assert "went on to its end" in found["chat/non-streaming/term"][1]
    kind, reasons = found["chat/prefilling/term"]
    assert kind == "wrong"
    assert "instead of a 503" in reasons


def test_finalizing_is_no_draining(results: Any) -> None:
    for kind, reasons in verdicts(results["finalizes instead of draining"]).values():
        assert kind == "wrong"
        assert "instead of" in reasons or "got HTTP 503" in reasons


def test_what_was_not_reached_never_passes(results: Any) -> None:
    found = verdicts(results["hasty"])
    need_no_time = ("idle", "loading", "chat/half-sent-body", "chat/zero-window")
    for scenario, (kind, reasons) in found.items():
        if not scenario.startswith(need_no_time):
            assert kind == "not reached", (scenario, reasons)
            assert reasons
    kind, reasons = verdicts(results["small answers"])["chat/zero-window/term"]
    assert kind == "not reached"
    assert "the kernel took the whole answer" in reasons


def test_an_api_that_is_not_served_is_no_success(results: Any) -> None:
    found = verdicts(results["chat-only"])
    assert found["chat/streaming/term"][0] == "right"
    assert found["messages/streaming/term"] == (
        "not served",
        "not served: HTTP 404 for /v1/messages",
    )
    assert not all_right(results["chat-only"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("never ready", "did not answer 200 within 0.5 s"),
        ("ends", "the server ended with 1 while starting"),
        ("not there", "the server cannot be started"),
    ],
)
def test_a_server_that_does_not_start_is_an_error(name: str, words: str, results: Any) -> None:
    assert isinstance(results[name], ServerFailed)
    assert words in str(results[name])


async def test_cancelling_a_check_ends_its_servers() -> None:
    mark = secrets.token_hex(8)
    options = changed(QUICK, server=bad_server("ignores", mark), scenarios=("idle/term",))

    def servers() -> list[psutil.Process]:
        processes = psutil.process_iter(["cmdline"])
        return [p for p in processes if mark in (p.info["cmdline"] or ())]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(check, options)
        with trio.fail_after(PATIENCE):
            while not servers():  # noqa: ASYNC110 (another process)
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert servers() == []
