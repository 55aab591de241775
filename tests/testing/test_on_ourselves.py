"""Every scenario is right on our own server, with scripted engines, under both policies.

On chat completions every phase with every pattern of signals. On the other APIs what their own code
answers, and the first pattern: slow readers, half a body and later signals are the connection's
affair, whoever speaks on it. What has no answer under way is the same under both policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from dflash_trio.testing import CheckOptions, Result, all_right, scenarios, table
from dflash_trio.testing.options import Policy
from tests.testing.harness import check_all, scripted, settled

# The first test waits for the servers of most.
pytestmark = pytest.mark.timeout(900)

APIS = ("chat", "messages", "responses", "completions")
SCENARIOS = (
    "chat/*",
    *(
        f"{api}/{phase}/term"
        for api in ("messages", "responses")
        for phase in ("queued", "prefilling", "streaming", "non-streaming")
    ),
    "completions/*streaming/term",
)
MODEL = {"step_seconds": 0.01, "max_ctx": 16_384}
POLICIES: tuple[tuple[Policy, int], ...] = (("drain", 1), ("finalize", 4))
"""With the slots of the server's model."""


OPTIONS = {
    **{
        policy: CheckOptions(
            scripted({**MODEL, "slots": slots}),
            policy=policy,
            apis=APIS,
            scenarios=SCENARIOS,
            answer_tokens=250,
            long_answer_tokens=850,
            prefill_tokens=1700,
            slack=4.0,
            timeout=60.0,
            jobs=4 if policy == "drain" else 3,
        )
        for policy, slots in POLICIES
    },
    "no answer": CheckOptions(
        scripted({**MODEL, "load_seconds": 3.0}),
        scenarios=("loading", "idle", "idle-keep-alive"),
        slack=4.0,
        timeout=60.0,
        jobs=2,
    ),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result] | Exception]:
    """Side by side: the golden runs, each one answer after the other, are half of the time."""
    return trio.run(check_all, OPTIONS)


@pytest.mark.real
@pytest.mark.parametrize("policy", ["drain", "finalize"])
def test_every_scenario_is_right(policy: str, results: Any) -> None:
    found = results[policy]
    assert not isinstance(found, Exception), found
    assert [result.scenario for result in found] == scenarios(OPTIONS[policy])
    assert all_right(found), table(found)
    assert {result.scenario.api for result in found} == set(APIS)


@pytest.mark.real
def test_nobody_keeps_a_server_that_makes_no_answer(results: Any) -> None:
    found = results["no answer"]
    assert not isinstance(found, Exception), found
    assert len(found) == 5
    assert all_right(found), table(found)


@pytest.mark.real
async def test_a_unix_socket_works_as_well(tmp_path: Path) -> None:
    options = CheckOptions(
        scripted({**MODEL, "on_sigterm": "drain"}, port=0, host="unix:{socket}"),
        answer_tokens=100,
        scenarios=("idle/term", "streaming/term"),
        jobs=2,
        log_folder=tmp_path,
    )
    results = await settled(options)
    assert all_right(results), table(results)
    logs = {path.name for path in tmp_path.glob("*")}  # noqa: ASYNC240 (a test may block)
    assert logs == {"chat-streaming-term.log", "idle-term.log", "reference.log"}
