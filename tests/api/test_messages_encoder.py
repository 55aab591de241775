"""How answers are put into Anthropic's words, event by event, as its own client reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message, MessageDeltaUsage, RawMessageStreamEvent, Usage
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dflash_trio.api.answer import (
    AnswerEvent,
    Call,
    CallArguments,
    CallBegun,
    CallEnded,
    ChoiceEnded,
    ContentDelta,
    EndReason,
    ReasoningDelta,
    WholeAnswer,
)
from dflash_trio.api.generating import AnswerContext
from dflash_trio.api.messages import SIGNATURE, MessagesEncoder, call_input
from dflash_trio.generation import events as engine
from dflash_trio.generation.errors import EngineFailed, QueueFull
from dflash_trio.generation.request import PreparedPrompt, SamplingParams

_STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ODD_TEXT = 'é — 歪😀\u2028\u2029\x85\r\n"\\'
LOGPROB = engine.TokenLogprob(engine.TokenAlternative(1, b"x", -0.5))


def new_encoder() -> MessagesEncoder:
    prepared = PreparedPrompt(tokens=(1,) * 7, max_tokens=100, sampling=SamplingParams())
    context = AnswerContext("m", prepared, lambda: None, "req_1")
    return MessagesEncoder(context)


def ended(
    reason: EndReason = "stop",
    *,
    stop_sequence: str | None = None,
    detail: str | None = None,
    **usage: Any,
) -> ChoiceEnded:
    counts = engine.Usage(**{"prompt_tokens": 7, "completion_tokens": 5, **usage})
    return ChoiceEnded(0, reason, counts, stop_sequence, detail)


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each held against the official client's classes, with no lenience."""
    found = []
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            _STREAM_EVENT.validate_json(data.removeprefix("data: "), strict=True)
        found.append(event)
    return found


def stream(*wakes: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    encoder = new_encoder()
    raw = encoder.opening() + b"".join(map(encoder.encode, wakes)) + encoder.closing()
    return parsed(raw)


def whole(*events: AnswerEvent) -> dict[str, Any]:
    answer = WholeAnswer(1)
    answer.add(events)
    body = json.loads(json.dumps(new_encoder().whole(answer), ensure_ascii=False).encode())
    Message.model_validate(body, strict=True)
    return dict(body)


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events come to, with what holds for any stream checked."""
    assert [events[0]["type"], *(e["type"] for e in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    keys = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            pieces, is_open = [], True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        kind, key = keys[block["type"]]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads("".join(pieces))
            else:
                block[key] += "".join(pieces)
        elif event["delta"]["type"] == "signature_delta":
            block["signature"] += event["delta"]["signature"]
        else:
            assert event["delta"]["type"] == kind
            # Once signed, a block is complete.
            assert not block.get("signature")
            pieces.append(event["delta"][key])
    assert not is_open
    return blocks


def test_a_plain_answer_is_one_block_of_text_between_start_and_stop() -> None:
    events = stream([ContentDelta(0, "Hel")], [], [ContentDelta(0, "lo"), ended()])
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start.pop("id").startswith("msg_")
    assert start == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    assert put_together(events) == [{"type": "text", "text": "Hello"}]
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


FULL: list[AnswerEvent] = [
    ReasoningDelta(0, "Hm, "),
    ReasoningDelta(0, ODD_TEXT),
    ContentDelta(0, "Let me "),
    ContentDelta(0, ODD_TEXT),
    CallBegun(0, 0, "toolu_a", "f"),
    CallArguments(0, 0, '{"q": '),
    CallArguments(0, 0, '"歪"}'),
    CallEnded(0, 0),
    CallBegun(0, 1, "toolu_b", "g"),
    CallEnded(0, 1),
    ended("tool_calls", reasoning_tokens=3, thinking_closed_by="model"),
]


def test_thinking_text_and_calls_are_blocks_of_their_own_and_the_same_whole_and_streamed() -> None:
    events = stream(FULL)
    assert put_together(events) == [
        {"type": "thinking", "thinking": "Hm, " + ODD_TEXT, "signature": SIGNATURE},
        {"type": "text", "text": "Let me " + ODD_TEXT},
        {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"q": "歪"}},
        {"type": "tool_use", "id": "toolu_b", "name": "g", "input": {}},
    ]
    body = whole(*FULL)
    assert body["content"] == put_together(events)
    assert body["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    assert body["usage"] == events[-2]["usage"]


def test_however_an_answer_is_cut_into_wake_ups_its_stream_is_the_same() -> None:
    together = stream(FULL)
    apart = stream(*([event] for event in FULL))
    assert apart[1:] == together[1:]


def test_a_signature_is_there_comes_last_and_does_not_look_like_one() -> None:
    deltas = [e["delta"]["type"] for e in stream(FULL) if e["type"] == "content_block_delta"]
    assert deltas.index("signature_delta") == 2
    assert deltas.count("signature_delta") == 1
    assert "unsigned" in SIGNATURE


def test_text_after_a_call_and_thinking_after_text_begin_new_blocks() -> None:
    events = stream(
        [
            ContentDelta(0, "a"),
            ReasoningDelta(0, "b"),
            ContentDelta(0, "c"),
            CallBegun(0, 0, "toolu_a", "f"),
            CallArguments(0, 0, "{}"),
            CallEnded(0, 0),
            ContentDelta(0, "d"),
            ended("tool_calls"),
        ]
    )
    kinds = [block["type"] for block in put_together(events)]
    assert kinds == ["text", "thinking", "text", "tool_use", "text"]


def test_log_probabilities_alone_open_no_block_and_cut_no_call_in_two() -> None:
    alone = ContentDelta(0, "", (LOGPROB,))
    begun, arguments = CallBegun(0, 0, "toolu_a", "f"), CallArguments(0, 0, "{}")
    events = stream([alone, begun, alone, arguments, alone, CallEnded(0, 0), ended("tool_calls")])
    assert [block["type"] for block in put_together(events)] == ["tool_use"]


def test_an_answer_without_any_content_is_one_empty_text_streamed_and_whole() -> None:
    empty = [{"type": "text", "text": ""}]
    assert put_together(stream([ended()])) == empty
    assert whole(ended())["content"] == empty
    thought = [ReasoningDelta(0, "hm"), ended("length")]
    assert [block["type"] for block in put_together(stream(thought))] == ["thinking"]
    assert [block["type"] for block in whole(*thought)["content"]] == ["thinking"]


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (ended("stop"), "end_turn", None),
        (ended("stop", stop_sequence="END"), "stop_sequence", "END"),
        (ended("length"), "max_tokens", None),
        (ended("length", detail="context_full"), "max_tokens", None),
        (ended("cancelled", detail="server_shutdown"), "max_tokens", None),
        (ended("tool_calls"), "tool_use", None),
    ],
)
def test_each_end_has_its_reason(ending: ChoiceEnded, reason: str, sequence: str | None) -> None:
    delta = stream([ContentDelta(0, "x"), ending])[-2]["delta"]
    body = whole(ContentDelta(0, "x"), ending)
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_usage_counts_no_prompt_token_twice_and_says_what_anthropics_fields_cannot() -> None:
    ending = ended(
        "cancelled",
        detail="server_shutdown",
        cached_tokens=4,
        reasoning_tokens=2,
        thinking_closed_by="budget",
    )
    usage = stream([ReasoningDelta(0, "x"), ending])[-2]["usage"]
    assert usage == whole(ReasoningDelta(0, "x"), ending)["usage"]
    assert usage == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
        "output_tokens_details": {
            "thinking_tokens": 2,
            "thinking_closed_by": "budget",
            "ended_by": "server_shutdown",
        },
    }
    for reads in (MessageDeltaUsage, Usage):
        reads.model_validate(usage, strict=True)


def test_a_call_that_a_shutdown_cuts_is_closed_as_it_stands() -> None:
    cut = [
        CallBegun(0, 0, "toolu_a", "f"),
        CallArguments(0, 0, '{"a": [1, 2'),
        CallEnded(0, 0, cut=True),
        ended("cancelled", detail="server_shutdown"),
    ]
    events = stream(cut)
    assert [event["type"] for event in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-4]["delta"]["partial_json"] == '{"a": [1, 2'
    assert whole(*cut)["content"][0]["input"] == {"a": [1]}


def test_only_a_call_that_was_cut_is_given_as_far_as_it_is_complete() -> None:
    events: list[AnswerEvent] = []
    for call in (0, 1):
        arguments = CallArguments(0, call, '{"a": 1, "b')
        ending = CallEnded(0, call, cut=call == 1)
        events += [CallBegun(0, call, f"toolu_{call}", "f"), arguments, ending]
    first, second = whole(*events, ended("length"))["content"]
    assert first["input"] == {"INVALID_JSON": '{"a": 1, "b'}
    assert second["input"] == {"a": 1}
    # The limit came in the words behind it.
    first, _ = whole(*events[:3], ContentDelta(0, "x"), ended("length"))["content"]
    assert first["input"] == {"INVALID_JSON": '{"a": 1, "b'}


@pytest.mark.parametrize(
    ("arguments", "complete"),
    [
        ("", {}),
        ("  ", {}),
        ("{", {}),
        ('{"a"', {}),
        ('{"a": ', {}),
        ('{"a": "foo, {bar', {}),
        ('{"a": "b\\', {}),
        ('{"a": "b\\"c"', {"a": 'b"c'}),
        ('{"a": 12', {}),
        ('{"a": 12,', {"a": 12}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": [1, "x"', {"a": [1, "x"]}),
        ('{"a": {"b": tr', {"a": {}}),
        ('{"a": {"b": true}, "c": [{"d": null}, {"e', {"a": {"b": True}, "c": [{"d": None}, {}]}),
        ('{"a" : "x","b"', {"a": "x"}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1} and so', {"a": 1}),
    ],
)
def test_arguments_that_were_cut_are_what_of_them_is_complete(
    arguments: str, complete: dict[str, Any]
) -> None:
    assert call_input(Call("id", "f", arguments), cut=True) == complete


@pytest.mark.parametrize(
    "arguments",
    [
        "[1]",
        '"a"',
        "null",
        "not JSON",
        "}",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud83d"}',
        '{"a": 1, "a": 2}',
        '{"a": ' * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_arguments_that_are_no_object_come_as_text_or_as_their_sound_part_and_never_fail(
    arguments: str, cut: bool
) -> None:
    given = call_input(Call("id", "f", arguments), cut=cut)
    assert json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    if not cut:
        assert given == {"INVALID_JSON": arguments}


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON, max_size=3), st.data(), st.booleans())
def test_a_cut_anywhere_leaves_an_object_and_only_what_was_there(
    arguments: dict[str, Any], data: st.DataObject, ascii_only: bool
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    at = data.draw(st.integers(0, len(text)))
    given = call_input(Call("id", "f", text[:at]), cut=True)
    assert "INVALID_JSON" not in given or "INVALID_JSON" in arguments
    assert given.items() <= arguments.items() or _within(given, arguments)
    assert call_input(Call("id", "f", text), cut=False) == arguments


def _within(part: Any, full: Any) -> bool:
    """Whether a value is another one with its end missing."""
    if isinstance(part, dict) and isinstance(full, dict):
        return all(key in full and _within(value, full[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(full, list):
        return len(part) <= len(full) and all(map(_within, part, full))
    return bool(part == full)


def test_a_failure_is_the_last_event_and_nothing_pretends_a_normal_end() -> None:
    encoder = new_encoder()
    raw = encoder.opening() + encoder.encode([ContentDelta(0, "x")])
    events = parsed(raw + encoder.failure(EngineFailed("it fell off")))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "it fell off" in events[-1]["error"]["message"]
    assert [event["type"] for event in events[:-1]] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]
    (overloaded,) = parsed(new_encoder().failure(QueueFull(1)))
    assert overloaded["error"]["type"] == "overloaded_error"
    assert overloaded["request_id"] == "req_1"


def test_a_sign_of_life_is_a_ping() -> None:
    assert new_encoder().keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_every_event_is_two_lines_for_clients_that_split_at_any_line_end() -> None:
    encoder = new_encoder()
    raw = encoder.opening() + encoder.encode(FULL) + encoder.closing()
    lines = raw.decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["event", "data", ""] * (len(lines) // 3)
    assert lines[2::3] == [""] * (len(lines) // 3)


def test_each_answer_has_an_id_of_its_own() -> None:
    assert new_encoder().id != new_encoder().id
    assert MessagesEncoder.call_prefix == "toolu_"
