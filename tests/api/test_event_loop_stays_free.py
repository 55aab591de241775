"""What takes long is done on threads: told by who did it, and not by how long it took."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dflash_trio.api import tools as tools_module
from dflash_trio.api.response_store import ResponseStore
from tests.support.http_client import request
from tests.support.running import CHAT, RunningServer, chat_body, running
from tests.support.scripted import scripted_config, scripted_load

LARGEST_ON_THE_LOOP = 128 * 1024
"""Characters of JSON that the event loop may encode at once: about a millisecond."""
LARGEST_AT_ALL = 256 * 1024
"""Characters that a thread may encode at once, as nothing else runs meanwhile."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    load = scripted_load(slots=2, max_ctx=60_000, pool=60_000, chunk=4096)
    async with running((scripted_config(), load)) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (CHAT, {"json_schema": SCHEMA}),
        (CHAT, {"grammar": 'root ::= "a"'}),
        (CHAT, {"guided_json": SCHEMA}),
        (CHAT, {"guided_regex": "a"}),
        (CHAT, {"guided_choice": ["a"]}),
        (CHAT, {"guided_grammar": 'root ::= "a"'}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"structured_outputs": {"regex": "a"}}),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}),
        (CHAT, {"tools": [CALL], "tool_choice": "required"}),
        ("/v1/completions", {"grammar": 'root ::= "a"'}),
        ("/v1/completions", {"structured_outputs": {"regex": "a"}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        ),
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
async def test_a_schema_or_grammar_is_checked_on_a_thread_however_its_name_is_written(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    hidden: bool,
) -> None:
    checked_on: list[int] = []
    check = tools_module.check_constraint

    def watched(*arguments: Any) -> None:
        checked_on.append(threading.get_ident())
        check(*arguments)

    monkeypatch.setattr(tools_module, "check_constraint", watched)
    # Each route reads its own of these.
    said = {**chat_body("hi"), "input": "hi", "max_tokens": 1, "max_output_tokens": 1}
    if path.endswith("/completions"):
        said["prompt"] = "hi"
    raw = json.dumps({**said, **fields}).encode()
    if hidden:
        # JSON may write any letter of a key by its number: {"gramm\u0061r": ...} is a grammar.
        raw = b"".join(b"\\u0061" if byte == ord("a") else bytes([byte]) for byte in raw)
    answer = await request(server.port, "POST", path, raw)
    assert answer.status == 200, answer.text
    assert checked_on
    assert threading.get_ident() not in checked_on


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Every value that is encoded: whether on the event loop's thread, and its size."""
    sizes: list[tuple[bool, int]] = []
    encode = json.JSONEncoder.encode
    here = threading.get_ident()

    def watched(self: json.JSONEncoder, value: Any) -> str:
        text = encode(self, value)
        sizes.append((threading.get_ident() == here, len(text)))
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", watched)
    return sizes


def check_sizes(encoded: list[tuple[bool, int]]) -> None:
    assert max((size for on_loop, size in encoded if on_loop), default=0) < LARGEST_ON_THE_LOOP
    assert 0 < max(size for _, size in encoded) < LARGEST_AT_ALL


CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**chat_body("hi"), "max_tokens": 600, "ignore_eos": True, **CHAT_LOGPROBS}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 900, "logprobs": 5}),
        (
            "/v1/responses",
            {"input": "hi", "max_output_tokens": 600, "ignore_eos": True, "top_logprobs": 20},
        ),
    ],
)
async def test_a_long_answer_with_log_probabilities_is_encoded_in_parts_and_not_on_the_loop(
    server: RunningServer,
    encoded: list[tuple[bool, int]],
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    answer = await request(server.port, "POST", path, {**body, "stream": stream})
    assert answer.status == 200
    assert len(answer.body) > 2 * LARGEST_AT_ALL or path.endswith("/completions")
    check_sizes(encoded)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_given_back_with_its_answer_is_encoded_on_a_thread(
    server: RunningServer, encoded: list[tuple[bool, int]], stream: bool
) -> None:
    tools = [{"type": "web_search", "note": "n" * 2000} for _ in range(400)]
    raw = json.dumps({"input": "hi", "max_output_tokens": 2, "tools": tools, "stream": stream})
    encoded.clear()
    answer = await request(server.port, "POST", "/v1/responses", raw.encode())
    assert answer.status == 200
    assert len(answer.body) > 400 * 2000
    assert max((size for on_loop, size in encoded if on_loop), default=0) < LARGEST_ON_THE_LOOP


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_conversation_is_kept_by_a_thread(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    kept_on: list[int] = []
    keep = ResponseStore.keep

    def watched(*arguments: Any) -> None:
        kept_on.append(threading.get_ident())
        keep(*arguments)

    monkeypatch.setattr(ResponseStore, "keep", watched)
    items = [{"role": "user", "content": "x"}] * 3000
    body = {"input": items, "max_output_tokens": 2, "stream": stream}
    answer = await request(server.port, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.text
    assert len(kept_on) == 1
    assert threading.get_ident() not in kept_on


async def test_many_tokens_with_their_pieces_are_encoded_in_parts_and_not_on_the_loop(
    server: RunningServer, encoded: list[tuple[bool, int]]
) -> None:
    raw = json.dumps({"content": "ab" * 40_000, "with_pieces": True}).encode()
    encoded.clear()
    answer = await request(server.port, "POST", "/tokenize", raw)
    assert len(answer.json()["tokens"]) == 80_000
    assert len(answer.body) > 2_000_000
    check_sizes(encoded)
