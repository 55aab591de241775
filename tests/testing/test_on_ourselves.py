"""Every scenario is right on our own server, with scripted engines, under both policies.

On chat completions with every pattern of signals, on the other APIs with the first one: what comes
of later signals is the connection's affair, whoever speaks on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trio.testing import CheckOptions, all_right, check, scenarios, table
from tests.testing.harness import scripted

APIS = ("chat", "messages", "responses", "completions")
SCENARIOS = (
    "loading",
    "idle",
    "idle-keep-alive",
    "chat/*",
    "messages/*/term",
    "responses/*/term",
    "completions/*streaming/term",
)
MODEL = {"step_seconds": 0.01, "max_ctx": 16_384, "load_seconds": 0.3}


@pytest.mark.real
@pytest.mark.parametrize(("policy", "slots"), [("drain", 1), ("finalize", 4)])
async def test_every_scenario_is_right(policy: str, slots: int) -> None:
    options = CheckOptions(
        scripted({**MODEL, "slots": slots}),
        policy=policy,
        apis=APIS,
        scenarios=SCENARIOS,
        answer_tokens=120,
        long_answer_tokens=450,
        prefill_tokens=500,
        slack=2.0,
        timeout=60.0,
        jobs=5,
    )
    results = await check(options)
    assert [result.scenario for result in results] == scenarios(options)
    assert all_right(results), table(results)
    assert {result.scenario.api for result in results} == {None, *APIS}


@pytest.mark.real
async def test_a_unix_socket_works_as_well(tmp_path: Path) -> None:
    options = CheckOptions(
        scripted({**MODEL, "on_sigterm": "drain"}, port=0, host="unix:{socket}"),
        answer_tokens=100,
        scenarios=("idle/term", "streaming/term"),
        jobs=2,
        log_folder=tmp_path,
    )
    results = await check(options)
    assert all_right(results), table(results)
    logs = {path.name for path in tmp_path.glob("*")}  # noqa: ASYNC240 (a test may block)
    assert logs == {"chat-streaming-term.log", "idle-term.log", "reference.log"}
