"""The strict eye of scripts/soak: which streams of each route it lets through, and which not."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest

from tests.scripts.test_soak import ROOT

APIS = ("chat", "completions", "messages", "responses")
TOKENS = {"completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 0}}
NEW_TOKENS = {"output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("soak_lib.streams")


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + data({"type": kind, **fields})


def chunk(choice: dict[str, Any] | None, reason: str | None = None, **fields: Any) -> bytes:
    choices = [] if choice is None else [{"index": 0, **choice, "finish_reason": reason}]
    return data({"id": "i", "model": "m", "created": 1, "choices": choices, **fields})


def numbered(*events: tuple[str, dict[str, Any]]) -> list[bytes]:
    return [
        named(kind, sequence_number=number, **fields)
        for number, (kind, fields) in enumerate(events)
    ]


def response(status: str, text: str = "", **fields: Any) -> dict[str, Any]:
    output = [{"type": "message", "content": [{"text": text}]}]
    fields = {"id": "r", "model": "m", "status": status, "output": output, **fields}
    return {"response": fields}


WHOLE: dict[str, list[bytes]] = {
    "chat": [
        chunk({"delta": {"role": "assistant", "content": None}}),
        chunk({"delta": {"content": "ab"}}),
        chunk({"delta": {}}, "length"),
        chunk(None, usage=TOKENS),
        DONE,
    ],
    "completions": [
        chunk({"text": "a"}),
        chunk({"text": "b"}),
        chunk({"text": ""}, "length"),
        chunk(None, usage=TOKENS),
        DONE,
    ],
    "messages": [
        named("message_start", message={"model": "m", "usage": {"input_tokens": 3}}),
        named("content_block_start", index=0),
        named("content_block_delta", index=0, delta={"text": "ab"}),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "max_tokens"}, usage=NEW_TOKENS),
        named("message_stop"),
    ],
    "responses": numbered(
        ("response.created", response("in_progress")),
        ("response.in_progress", response("in_progress")),
        ("response.output_text.delta", {"delta": "ab"}),
        ("response.output_text.done", {"text": "ab"}),
        ("response.incomplete", response("incomplete", "ab", usage=NEW_TOKENS)),
    ),
}
SIGNS = {"messages": named("ping"), "responses": None}
ERRORS = {
    "messages": named("error", error={"type": "api_error", "message": "m"}),
    "responses": named("response.failed", sequence_number=2, response={"status": "failed"}),
}


def judge(
    streams: ModuleType, api: str, parts: list[bytes], *, complete: bool = True, max_tokens: int = 2
) -> None:
    question = streams.Question("q", max_tokens, api=api)
    goldens = streams.Goldens({("m", question.golden): "ab"})
    stream = streams.STREAMS[api](question, "m", True)
    for byte in b"".join(parts):
        stream.feed(bytes([byte]))
    assert stream.end(complete=complete, goldens=goldens) == "m"


@pytest.mark.parametrize("api", APIS)
def test_a_whole_stream_is_let_through_with_signs_of_life_anywhere(
    streams: ModuleType, api: str
) -> None:
    judge(streams, api, WHOLE[api])
    sign = SIGNS.get(api, b": keep-alive\n\n")
    if sign is None:  # a response's is one of its numbered events, and stands among them above
        return
    for at in range(1, len(WHOLE[api])):
        judge(streams, api, [*WHOLE[api][:at], sign, *WHOLE[api][at:]])


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_lacks_anything_or_has_it_twice_is_a_violation(
    streams: ModuleType, api: str
) -> None:
    whole = WHOLE[api]
    for at in range(len(whole)):
        for parts in (
            whole[:at],
            [*whole[:at], *whole[at + 1 :]],
            [*whole[: at + 1], whole[at], *whole[at + 1 :]],
        ):
            with pytest.raises(streams.Violation):
                judge(streams, api, parts)


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_is_cut_or_ends_in_an_error_or_in_nonsense_is_a_violation(
    streams: ModuleType, api: str
) -> None:
    whole = WHOLE[api]
    error = ERRORS.get(api, data({"error": {"message": "m"}}))
    with pytest.raises(streams.Violation):
        judge(streams, api, whole, complete=False)
    for parts in (
        [*whole[:2], error],
        [*whole[:2], b"<html>\n\n"],
        [*whole[:2], b"event: x\ndata: {}\n\n", *whole[2:]],
        [*whole, b"data: half"],
    ):
        with pytest.raises(streams.Violation):
            judge(streams, api, parts)


@pytest.mark.parametrize("api", APIS)
def test_other_texts_and_other_counts_than_the_known_ones_are_violations(
    streams: ModuleType, api: str
) -> None:
    other = [part.replace(b'"ab"', b'"xy"').replace(b'"b"', b'"c"') for part in WHOLE[api]]
    for parts, limit in ((other, 2), (WHOLE[api], 3)):
        with pytest.raises(streams.Violation):
            judge(streams, api, parts, max_tokens=limit)


def test_a_chunk_of_another_answer_is_a_violation(streams: ModuleType) -> None:
    for api in ("chat", "completions"):
        parts = [part.replace(b'"i"', b'"j"') for part in WHOLE[api][1:2]]
        with pytest.raises(streams.Violation):
            judge(streams, api, [WHOLE[api][0], *parts, *WHOLE[api][2:]])
    parts = [*WHOLE["responses"][:4], WHOLE["responses"][4].replace(b'"r"', b'"s"')]
    with pytest.raises(streams.Violation):
        judge(streams, "responses", parts)


def test_a_response_that_says_another_text_at_its_end_is_a_violation(streams: ModuleType) -> None:
    *events, last = WHOLE["responses"]
    with pytest.raises(streams.Violation):
        judge(streams, "responses", [*events, last.replace(b'"ab"', b'"a"')])
