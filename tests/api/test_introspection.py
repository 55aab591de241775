"""What the server says of itself: true, complete as documented, and never waiting for an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio

from dflash_trio.api import messages_request, responses_request, token_requests
from dflash_trio.cli import parse_command_line
from dflash_trio.config import SamplingDefaults
from tests.support.http_client import request
from tests.support.running import is_idle, running
from tests.support.scripted import PLAIN_TEMPLATE, Gate, answer, scripted_config, scripted_load

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = {"status": "/status/json", "props": "/props", "models": "/v1/models"}


def schema(name: str) -> dict[str, Any]:
    return dict(json.loads((DOCS / "schemas" / f"{name}.json").read_text(encoding="utf-8")))


def two_models(**fields: Any) -> list[Any]:
    first = scripted_config(
        "first",
        aliases=("one",),
        max_concurrency=2,
        sampling=SamplingDefaults(temperature=0.0, seed=7),
        given=frozenset({"sampling.temperature", "sampling.seed", "max_concurrency"}),
    )
    return [
        (first, scripted_load(slots=2, max_ctx=512, pool=700, **fields)),
        (scripted_config("second"), scripted_load(script=answer("2"))),
    ]


@pytest.mark.parametrize("name", PAGES)
async def test_the_body_is_as_its_schema_says_idle_busy_and_with_a_dead_engine(name: str) -> None:
    validator = jsonschema.Draft202012Validator(schema(name))
    validator.check_schema(validator.schema)

    async def check(port: int) -> None:
        response = await request(port, "GET", PAGES[name])
        assert response.status == 200
        validator.validate(response.json())

    gate = Gate(open=False)

    def wait_then_fail(batch: Any) -> None:
        gate(batch)
        raise RuntimeError("gone")

    async with running(*two_models(before_decode=wait_then_fail)) as server:
        await check(server.port)
        async with server.chatting("x"):
            await trio.to_thread.run_sync(gate.reached.wait)
            await check(server.port)
            gate.open()
            await server.until(lambda s: not s["models"][0]["health"]["healthy"])
        await check(server.port)


async def test_no_page_waits_for_an_engine_step_and_each_shows_what_is_in_flight() -> None:
    gate = Gate(open=False)
    load = scripted_load(slots=3, pool=3000, before_decode=gate, headroom=100)
    async with running((scripted_config("m", max_concurrency=3), load)) as server:
        async with server.chatting("x" * 10, max_tokens=50):
            await trio.to_thread.run_sync(gate.reached.wait)
            for path in PAGES.values():
                assert (await request(server.port, "GET", path)).status == 200
            for path in ("/status/json", "/props"):
                (model,) = (await request(server.port, "GET", path)).json()["models"]
                assert model["slots"] == {"total": 3, "reserved": 1, "available": 2}
                # BOS, ten bytes, a line end, ">", and the answer.
                assert model["kv_pool"]["committed"] == 13 + 50
                assert model["kv_pool"]["available"] == 3000 - 63
                assert model["in_flight"] == {
                    "reserved": 0,
                    "prefill": 1,
                    "decode": 0,
                    "draining": 0,
                }
            gate.open()
        await server.until(is_idle)


async def test_an_unhealthy_model_shows_its_reason_and_no_capacity_and_the_other_its_own() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("the device fell off")

    async with running(*two_models(before_decode=fail)) as server:
        assert (await server.chat("x")).status == 500
        first, second = (await server.until(is_idle))["models"]
        assert "the device fell off" in first["health"]["reason"]
        assert first["slots"] == {"total": 2, "reserved": 0, "available": 0}
        assert (first["kv_pool"]["total"], first["kv_pool"]["available"]) == (700, 0)
        assert second["health"] == {"healthy": True, "reason": None}
        assert second["slots"]["available"] == 1
        assert second["kv_pool"]["available"] == second["kv_pool"]["total"]


async def test_status_shows_each_models_place_and_size_and_who_waits() -> None:
    async with running(*two_models(), routing_queue_limit=7) as server:
        status = await server.status()
    assert (status["state"], status["load_balancing"]) == ("ready", True)
    first, second = status["models"]
    assert (first["name"], first["aliases"], first["path"]) == (
        "first",
        ["one"],
        "/nowhere/first.gguf",
    )
    assert first["placement"] == {
        "target_device": "cpu:0",
        "draft_device": None,
        "threads": 1,
        "gpu_layers": 0,
    }
    assert [(m["priority"], m["primary"]) for m in (first, second)] == [(0, True), (1, False)]
    assert [m["drains"] for m in (first, second)] == [False, True]
    assert (first["max_ctx"], first["architecture"]) == (512, "scripted")
    assert set(first["draft"].values()) == {None}
    assert (first["paused"], first["chat_template"]) == (0, "model file")
    assert status["routing"] == {
        "waiting": 0,
        "waiting_limit": 7,
        "preparing": 0,
        "draining": False,
    }


async def test_props_speaks_llama_servers_words_for_the_primary() -> None:
    async with running(*two_models()) as server:
        props = (await request(server.port, "GET", "/props")).json()
        assert (await request(server.port, "GET", "/v1/props")).json() == props
    assert props["total_slots"] == 2
    assert props["model_path"] == "/nowhere/first.gguf"
    assert props["chat_template"] == PLAIN_TEMPLATE
    assert props["build_info"].startswith("dflash-trio ")
    assert (props["bos_token"], props["eos_token"]) == ("<|begin|>", "<|end|>")
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512
    assert settings["params"]["temperature"] == 0.0
    assert settings["params"]["n_predict"] == 512


async def test_props_says_of_each_default_and_limit_where_it_comes_from() -> None:
    async with running(*two_models()) as server:
        first, second = (await request(server.port, "GET", "/props")).json()["models"]
    assert first["defaults"]["temperature"] == {"value": 0.0, "source": "flag"}
    assert first["defaults"]["seed"] == {"value": 7, "source": "flag"}
    assert first["defaults"]["top_k"] == {"value": 40, "source": "built-in"}
    assert first["limits"]["max_concurrency"] == {"value": 2, "source": "flag"}
    assert first["limits"]["kv_pool_tokens"] == {"value": 700, "source": "built-in"}
    assert second["defaults"]["temperature"] == {"value": 0.8, "source": "built-in"}
    assert second["defaults"]["seed"] == {"value": None, "source": "built-in"}
    assert second["limits"]["default_max_tokens"] == {"value": 2048, "source": "built-in"}


def test_a_flag_that_repeats_the_built_in_value_is_still_the_operators_word() -> None:
    launch = parse_command_line(["m.gguf", "--temperature", "0.8", "--max-ctx", "64"], {})
    assert {"sampling.temperature", "max_ctx"} <= launch.config.models[0].given
    assert "sampling.top_k" not in launch.config.models[0].given


async def test_no_key_is_shown_on_any_page() -> None:
    async with running((scripted_config(), scripted_load()), api_keys=(b"s3cret",)) as server:
        for path in PAGES.values():
            response = await request(server.port, "GET", path, **{"x-api-key": "s3cret"})
            assert response.status == 200
            assert "s3cret" not in response.text


async def test_models_are_listed_in_priority_order_with_their_room_in_both_lists() -> None:
    async with running(*two_models()) as server:
        body = (await request(server.port, "GET", "/v1/models")).json()
    assert [entry["id"] for entry in body["data"]] == ["first", "second"]
    assert [entry["name"] for entry in body["models"]] == ["first", "second"]
    assert body["data"][0]["context_length"] == body["data"][0]["max_model_len"] == 512
    assert body["data"][0]["meta"] == {"n_ctx_train": 700, "n_vocab": 258}
    assert body["models"][0]["aliases"] == ["one"]
    assert body["models"][0]["capabilities"] == ["completion"]


# ------------------------------------------------------------------------ the pages of docs/


def keys_of(node: Any) -> Iterator[str]:
    """Every property name in a schema."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "properties":
                yield from value
            yield from keys_of(value)
    elif isinstance(node, list):
        for item in node:
            yield from keys_of(item)


@pytest.mark.parametrize("name", PAGES)
def test_every_field_of_a_schema_is_on_the_status_page(name: str) -> None:
    page = (DOCS / "status.md").read_text(encoding="utf-8")
    missing = {key for key in keys_of(schema(name)) if not re.search(rf"[`.]{key}[`.]", page)}
    assert missing == set()


def test_every_field_of_the_counting_and_tokenizing_routes_is_on_the_api_page() -> None:
    page = (DOCS / "http-api.md").read_text(encoding="utf-8")
    known = (
        messages_request.known_fields()
        | responses_request.known_fields()
        | token_requests.known_fields()
    )
    assert {name for name in known if not re.search(rf"`{name}[`.]", page)} == set()
