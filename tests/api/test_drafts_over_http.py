"""What clients and operators see of speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from tests.api.test_introspection import schema
from tests.engine.drafting.scripted_provider import CheckingProvider
from tests.support.http_client import request
from tests.support.running import is_idle, running
from tests.support.scripted import answer, scripted_config, scripted_load

TEXT = "a long answer, of which half is guessed and the other half comes by itself. " * 2


def half_right() -> CheckingProvider:
    """Guesses the next token rightly and the one after it wrongly."""

    def guess(tokens: Sequence[int], limit: int) -> list[int]:
        said = bytes(t for t in tokens if t < 256).rpartition(b">")[2].decode()
        return [*TEXT[len(said) : len(said) + 1].encode(), 7][:limit]

    return CheckingProvider(guess, longest=2)


def drafted_model() -> Any:
    load = scripted_load(script=answer(TEXT), drafts=half_right)
    return scripted_config("drafted"), load


CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}]},
        "completion_tokens_details",
    ),
    "completions": ("/v1/completions", {"prompt": "x>"}, "completion_tokens_details"),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300},
        "output_tokens_details",
    ),
    "responses": ("/v1/responses", {"input": "x"}, "output_tokens_details"),
}


@pytest.mark.parametrize("api", CALLS)
async def test_usage_says_how_many_guesses_came_and_how_many_did_not(api: str) -> None:
    path, body, details = CALLS[api]
    async with running(drafted_model(), scripted_plain()) as server:
        response = await request(server.port, "POST", path, body)
        assert response.status == 200
        answered = response.json()
        assert "comes by itself" in json.dumps(answered)
        usage = answered["usage"]
        # Two tries at least, however fast or slow the machine is.
        assert usage[details]["accepted_prediction_tokens"] >= 2
        assert usage[details]["rejected_prediction_tokens"] >= 0
        draft = (await server.until(is_idle))["models"][0]["draft"]
    assert draft["accepted"] == usage[details]["accepted_prediction_tokens"]
    assert draft["proposed"] - draft["accepted"] == usage[details]["rejected_prediction_tokens"]


def scripted_plain() -> Any:
    return scripted_config("plain"), scripted_load(script=answer("2"))


@pytest.mark.parametrize("api", CALLS)
async def test_usage_says_nothing_of_guesses_where_there_is_no_draft(api: str) -> None:
    path, body, details = CALLS[api]
    async with running(scripted_plain()) as server:
        usage = (await request(server.port, "POST", path, body)).json()["usage"]
    assert not [name for name in usage[details] if "prediction" in name]


@pytest.mark.parametrize(("name", "path"), [("status", "/status/json"), ("props", "/props")])
async def test_the_status_pages_show_what_a_draft_is_worth(name: str, path: str) -> None:
    validator = jsonschema.Draft202012Validator(schema(name))
    async with running(drafted_model(), scripted_plain()) as server:
        before = (await request(server.port, "GET", path)).json()
        validator.validate(before)
        assert (await server.chat("x", max_tokens=300)).status == 200
        await server.until(is_idle)
        after = (await request(server.port, "GET", path)).json()
        validator.validate(after)
    draft = before["models"][0]["draft"]
    assert (draft["kind"], draft["acceptance"], draft["proposed"]) == ("scripted", None, 0)
    assert draft["state"] == "awake"
    draft = after["models"][0]["draft"]
    assert draft["acceptance"] == pytest.approx(draft["accepted"] / draft["proposed"])
    assert 1.5 <= draft["committed_per_step"] <= 2.0
    assert draft["draft_seconds"] > 0
    assert draft["verify_seconds"] > 0
    assert set(after["models"][1]["draft"].values()) == {None}
