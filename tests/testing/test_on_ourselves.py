"""Every scenario is right on our own server, with scripted engines, under both policies.

On chat completions every phase with every pattern of signals. On the other APIs what their own code
answers, and the first pattern: slow readers, half a body and later signals are the connection's
affair, whoever speaks on it. What has no answer under way is the same under both policies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trio.testing import CheckOptions, all_right, check, scenarios, table
from tests.testing.harness import scripted

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


@pytest.mark.real
@pytest.mark.parametrize(("policy", "slots"), [("drain", 1), ("finalize", 4)])
async def test_every_scenario_is_right(policy: str, slots: int) -> None:
    options = CheckOptions(
        scripted({**MODEL, "slots": slots}),
        policy=policy,
        apis=APIS,
        scenarios=SCENARIOS,
        answer_tokens=120,
        long_answer_tokens=650,
        prefill_tokens=500,
        slack=4.0,
        timeout=60.0,
        jobs=5,
    )
    results = await check(options)
    assert [result.scenario for result in results] == scenarios(options)
    assert all_right(results), table(results)
    assert {result.scenario.api for result in results} == set(APIS)


@pytest.mark.real
async def test_nobody_keeps_a_server_that_makes_no_answer() -> None:
    options = CheckOptions(
        scripted({**MODEL, "load_seconds": 1.0}),
        scenarios=("loading", "idle", "idle-keep-alive"),
        slack=4.0,
        timeout=60.0,
        jobs=5,
    )
    results = await check(options)
    assert len(results) == 5
    assert all_right(results), table(results)


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
