"""Reading answers of the APIs: whole, streamed, cut anywhere, malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.testing.dialects import DIALECTS, Answer
from tests.testing.bad_servers import encode

APIS = list(DIALECTS)
ENDS = {
    "chat": {"length": "length", "stop": "stop"},
    "messages": {"length": "max_tokens", "stop": "end_turn"},
    "responses": {"length": "incomplete: max_output_tokens", "stop": "completed"},
    "completions": {"length": "length", "stop": "stop"},
}


def streamed(api: str, finish: str = "length") -> bytes:
    texts = ["Once ", "upon ", "a time"]
    deltas = b"".join(encode(api, "delta", text) for text in texts)
    return b": keep-alive\n\n" + deltas + encode(api, "end", "", finish)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_stream_and_the_same_answer_whole_say_the_same(api: str, finish: str) -> None:
    dialect = DIALECTS[api]
    expected = Answer("Once upon a time", ENDS[api][finish], terminal=True)
    assert dialect.read(streamed(api, finish), stream=True) == expected
    whole = encode(api, "whole", "Once upon a time", finish)
    assert dialect.read(whole, stream=False) == expected


@pytest.mark.parametrize("api", APIS)
def test_the_word_for_an_early_end_is_the_one_that_is_read(api: str) -> None:
    assert DIALECTS[api].finalized == ENDS[api]["length"]


@pytest.mark.parametrize("api", APIS)
def test_a_stream_cut_anywhere_is_a_beginning_and_never_terminal(api: str) -> None:
    body = streamed(api)
    for end in range(len(body.rstrip())):
        answer = DIALECTS[api].read(body[:end], stream=True)
        assert "Once upon a time".startswith(answer.text)
        assert not answer.terminal


@pytest.mark.parametrize("api", APIS)
def test_a_whole_answer_cut_anywhere_is_a_problem(api: str) -> None:
    body = encode(api, "whole", "Once", "length")
    for end in range(len(body)):
        answer = DIALECTS[api].read(body[:end], stream=False)
        assert answer.problem is not None
        assert not answer.terminal


@pytest.mark.parametrize("api", APIS)
def test_something_after_the_terminal_event_is_a_problem(api: str) -> None:
    answer = DIALECTS[api].read(streamed(api) + encode(api, "delta", "more"), stream=True)
    assert answer.problem == "something follows the terminal event"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("data", ["{", "[]", "null", '{"choices": 1, "type": 1}'])
def test_an_event_that_is_no_object_of_the_api_is_a_problem_or_nothing(api: str, data: str) -> None:
    answer = DIALECTS[api].read(f"data: {data}\n\n".encode(), stream=True)
    assert answer.text == ""
    assert not answer.terminal


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("chat", {"error": {"message": "no"}}),
        ("messages", {"type": "error", "error": {"type": "api_error"}}),
        ("responses", {"type": "response.failed", "response": {"status": "failed"}}),
        ("completions", {"error": {"message": "no"}}),
    ],
)
def test_an_error_inside_a_stream_is_a_problem(api: str, event: dict) -> None:
    answer = DIALECTS[api].read(f"data: {json.dumps(event)}\n\n".encode(), stream=True)
    assert answer.problem is not None
    assert answer.problem.startswith("an error inside the stream")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_done_without_a_finish_reason_is_no_end(api: str) -> None:
    answer = DIALECTS[api].read(b"data: [DONE]\n\n", stream=True)
    assert not answer.terminal
    assert answer.problem == "[DONE] without a finish_reason"


def test_thinking_counts_as_text_and_tokens_are_read() -> None:
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "hm "}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "yes"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks) + "data: [DONE]\n\n"
    answer = DIALECTS["chat"].read(body.encode(), stream=True)
    assert answer == Answer("hm yes", "stop", terminal=True, tokens=2)


IN_BETWEEN: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1"}]}}]},
        {"choices": [], "usage": None},
    ],
    "messages": [
        {"type": "ping"},
        {"type": "message_start", "message": {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": "x"},
        },
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": "{}"},
        },
        {"type": "content_block_stop", "index": 0},
    ],
    "responses": [
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.in_progress", "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "item": {"type": "function_call"}},
        {"type": "response.function_call_arguments.delta", "delta": "{}"},
        {"type": "response.output_text.done", "text": "Once upon a time"},
    ],
    "completions": [{"choices": [{"index": 0, "text": "", "logprobs": None}]}],
}


@pytest.mark.parametrize("api", APIS)
def test_signs_of_life_and_what_is_no_text_change_nothing_wherever_they_come(api: str) -> None:
    dialect = DIALECTS[api]
    expected = dialect.read(streamed(api), stream=True)
    deltas = [encode(api, "delta", text) for text in ("Once ", "upon ", "a time")]
    for event in IN_BETWEEN[api]:
        name = f"event: {event['type']}\n" if "type" in event else ""
        between = f"{name}data: {json.dumps(event)}\n\n".encode()
        body = b"".join(between + delta for delta in deltas) + between
        answer = dialect.read(body + encode(api, "end", "", "length"), stream=True)
        assert answer == expected, event


@pytest.mark.parametrize("api", APIS)
def test_a_request_is_greedy_and_bounded(api: str) -> None:
    body = json.loads(DIALECTS[api].request("m", "hi", 7, stream=True, extra={"ignore_eos": True}))
    assert body["temperature"] == 0
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert 7 in (body.get("max_tokens"), body.get("max_output_tokens"))
