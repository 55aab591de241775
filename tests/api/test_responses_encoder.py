"""The words of the Responses API for the events of an answer, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_trio.api.answer import (
    AnswerEvent,
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
from dflash_trio.api.response_store import ResponseStore
from dflash_trio.api.responses import Keeping, ResponsesEncoder
from dflash_trio.api.responses_call import parse_responses_call
from dflash_trio.generation.errors import EngineFailed
from dflash_trio.generation.events import TokenAlternative, TokenLogprob, Usage
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.api.responses_checks import check_response, check_stream, stream_events

USAGE = Usage(5, 7, cached_tokens=2, reasoning_tokens=3, thinking_closed_by="model")
ODD_TEXT = "歪😀👩\u200d👩\u200d👧 é — π\u2028\u2029\x85\r\nשלום"


def logprob(piece: bytes, *others: bytes) -> TokenLogprob:
    top = tuple(TokenAlternative(1, other, -1.5) for other in others)
    return TokenLogprob(TokenAlternative(0, piece, -0.5), top)


def settings(body: str = '{"input": "hi"}') -> Any:
    return parse_responses_call(body.encode()).settings


def encoder(keeping: Keeping | None = None, **context: Any) -> ResponsesEncoder:
    prepared = PreparedPrompt(tokens=(1,) * 5, max_tokens=9, sampling=SamplingParams())
    fields = {
        "model": "m",
        "prepared": prepared,
        "cancel": lambda: None,
        "request_id": "r",
        **context,
    }
    return ResponsesEncoder(AnswerContext(**fields), settings(), keeping)


def ended(reason: EndReason = "stop", **fields: Any) -> ChoiceEnded:
    return ChoiceEnded(0, reason, USAGE, **fields)


def stream(*batches: list[AnswerEvent]) -> list[dict[str, Any]]:
    """All events of an answer that comes in these pieces."""
    encoding = encoder()
    data = encoding.opening() + b"".join(map(encoding.encode, batches)) + encoding.closing()
    return check_stream(data.decode())


def whole(*events: AnswerEvent) -> dict[str, Any]:
    answer = WholeAnswer(1)
    answer.add(events)
    return check_response(encoder().whole(answer))


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in output]


A_CALL: list[AnswerEvent] = [
    CallBegun(0, 0, "call_1", "weather"),
    CallArguments(0, 0, '{"city"'),
    CallArguments(0, 0, ': "Bonn"}'),
    CallEnded(0, 0),
]


def test_a_plain_answer_is_told_in_the_order_that_clients_rely_on() -> None:
    events = stream([ContentDelta(0, "Hel")], [ContentDelta(0, "lo")], [ended()])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[4]["logprobs"] == []
    response = check_response(events[-1]["response"])
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["completed_at"] >= response["created_at"]


def test_before_anything_is_said_the_response_has_no_output_and_no_usage() -> None:
    created, in_progress = stream_events(encoder().opening().decode())
    assert created["response"] == in_progress["response"]
    response = check_response(created["response"])
    assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)


def test_thinking_words_and_calls_are_items_of_their_own_in_the_order_they_came() -> None:
    events = stream(
        [ReasoningDelta(0, "hm"), ContentDelta(0, "I look.")], A_CALL, [ended("tool_calls")]
    )
    reasoning, message, call = events[-1]["response"]["output"]
    assert reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I look."
    assert (call["call_id"], call["name"]) == ("call_1", "weather")
    assert call["arguments"] == '{"city": "Bonn"}'
    assert {item["status"] for item in (reasoning, message, call)} == {"completed"}
    assert events[-1]["type"] == "response.completed"


def test_words_after_a_call_and_thinking_after_words_begin_items_of_their_own() -> None:
    events = stream(
        [ContentDelta(0, "a"), *A_CALL, ContentDelta(0, "b"), ReasoningDelta(0, "c"), ended()]
    )
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["message", "function_call", "message", "reasoning", "message"]


@pytest.mark.parametrize(
    "events",
    [
        [ContentDelta(0, ODD_TEXT), ended()],
        [ReasoningDelta(0, "hm"), ContentDelta(0, "x"), *A_CALL, ended("tool_calls")],
        [*A_CALL, CallBegun(0, 1, "call_2", "f"), CallEnded(0, 1), ended("tool_calls")],
        [ReasoningDelta(0, "hm"), ended("length")],
        [*A_CALL[:2], CallEnded(0, 0, cut=True), ended("length")],
        [*A_CALL[:2], CallEnded(0, 0), ended("length")],
        [*A_CALL[:2], CallEnded(0, 0, cut=True), ended("stop", stop_sequence="x")],
        [ContentDelta(0, "x"), ContentDelta(0, "", (logprob(b""),)), ended()],
        [ContentDelta(0, "x", (logprob(b"x", b"y"),)), ended()],
        [ended()],
    ],
)
def test_a_stream_and_a_whole_answer_have_the_same_output(events: list[AnswerEvent]) -> None:
    given = whole(*events)
    for pieces in ([events], [*([e] for e in events[:-2]), events[-2:]], [[e] for e in events]):
        streamed = stream(*pieces)[-1]["response"]
        assert without_ids(streamed["output"]) == without_ids(given["output"])
        for key in ("status", "incomplete_details", "usage", "error"):
            assert streamed[key] == given[key]


@pytest.mark.parametrize("said", [[], [ReasoningDelta(0, "hm")]])
def test_an_answer_that_ended_without_a_word_still_has_a_message(said: list[Any]) -> None:
    last = whole(*said, ended())["output"][-1]
    assert (last["type"], last["content"][0]["text"]) == ("message", "")


def test_a_limit_makes_the_response_and_what_it_cut_incomplete() -> None:
    events = stream([ReasoningDelta(0, "hm"), ContentDelta(0, "Hel"), ended("length")])
    assert events[-1]["type"] == "response.incomplete"
    response = check_response(events[-1]["response"])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("arguments", "status"), [('{"city"', "incomplete"), ("{}", "completed"), ("", "incomplete")]
)
def test_a_call_that_a_limit_cut_is_closed_as_it_stands(arguments: str, status: str) -> None:
    call: list[AnswerEvent] = [CallBegun(0, 0, "call_1", "f")]
    if arguments:
        call.append(CallArguments(0, 0, arguments))
    call.append(CallEnded(0, 0, cut=True))
    (item,) = stream(call, [ended("length")])[-1]["response"]["output"]
    assert (item["arguments"], item["status"]) == (arguments, status)


def test_a_call_that_a_stop_string_cut_is_incomplete_though_the_response_is_not() -> None:
    response = stream([*A_CALL[:2], CallEnded(0, 0, cut=True)], [ended("stop", stop_sequence="x")])[
        -1
    ]["response"]
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["status"] == "completed"


def test_a_call_that_the_model_broke_off_is_its_own_affair_whatever_ends_the_answer() -> None:
    (item,) = stream([*A_CALL[:2], CallEnded(0, 0), ended("length")])[-1]["response"]["output"]
    assert item["status"] == "completed"


def test_log_probabilities_at_the_very_end_of_a_message_are_its_own() -> None:
    x, last = logprob(b"x"), logprob(b"")
    events = stream([ContentDelta(0, "x", (x,))], [ContentDelta(0, "", (last,))], [ended()])
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 2


def test_a_shutdown_ends_the_answer_as_a_limit_does_and_the_usage_says_why() -> None:
    events = stream([ContentDelta(0, "x")], [ended("length", detail="server_shutdown")])
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["response"]["usage"]["output_tokens_details"]["ended_by"] == "server_shutdown"


def test_usage_counts_what_was_cached_and_what_was_thought() -> None:
    assert whole(ContentDelta(0, "x"), ended())["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3, "thinking_closed_by": "model"},
        "total_tokens": 12,
    }


def test_log_probabilities_come_with_the_deltas_and_all_of_them_at_the_end() -> None:
    x, y = logprob(b"x", b"u", b"v"), logprob(b"\xff")
    events = stream([ContentDelta(0, "x", (x,))], [ContentDelta(0, "y", (y,))], [ended()])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta["logprobs"]] for delta in deltas] == [["x"], ["�"]]
    entry = events[-1]["response"]["output"][0]["content"][0]["logprobs"][0]
    assert (entry["bytes"], entry["logprob"]) == ([120], -0.5)
    assert [top["token"] for top in entry["top_logprobs"]] == ["u", "v"]


def test_log_probabilities_of_text_that_is_held_back_begin_no_message() -> None:
    early = ContentDelta(0, "", (logprob(b"<"),))
    events = stream([early, ContentDelta(0, "<b", (logprob(b"b"),)), ended()])
    (item,) = events[-1]["response"]["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["<", "b"]
    (call,) = stream([early, *A_CALL, ended("tool_calls")])[-1]["response"]["output"]
    assert call["type"] == "function_call"


def test_a_failure_says_so_with_what_was_there_and_nothing_comes_after() -> None:
    encoding = encoder()
    data = encoding.opening() + encoding.encode([ReasoningDelta(0, "hm"), ContentDelta(0, "Hel")])
    data += encoding.failure(EngineFailed("the engine ended"))
    events = check_stream(data.decode())
    assert events[-1]["type"] == "response.failed"
    response = check_response(events[-1]["response"])
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine ended"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_a_sign_of_life_is_another_in_progress_with_what_there_is_so_far() -> None:
    encoding = encoder()
    data = encoding.opening() + encoding.keep_alive()
    data += encoding.encode([ContentDelta(0, "Hel")])
    alive = encoding.keep_alive()
    data += alive + encoding.encode([ContentDelta(0, "lo"), ended()]) + encoding.closing()
    (event,) = stream_events(alive.decode())
    assert event["type"] == "response.in_progress"
    assert event["response"]["output"][0]["content"][0]["text"] == "Hel"
    check_response(event["response"])
    events = stream_events(data.decode())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_every_event_is_one_line_however_it_is_split() -> None:
    encoding = encoder()
    data = (encoding.opening() + encoding.encode([ContentDelta(0, ODD_TEXT), ended()])).decode()
    assert all(line == "" or line.startswith(("event: ", "data: ")) for line in data.splitlines())
    deltas = [event["delta"] for event in stream_events(data) if "delta" in event]
    assert "".join(deltas) == ODD_TEXT


def test_what_the_request_left_open_is_told_as_the_model_filled_it_in() -> None:
    response = whole(ContentDelta(0, "x"), ended())
    assert (response["temperature"], response["top_p"]) == (0.8, 0.95)
    assert (response["model"], response["service_tier"]) == ("m", "default")


def test_a_cancelled_answer_ends_its_stream_and_says_that_it_was_cancelled() -> None:
    cancels: list[None] = []
    responses = ResponseStore().of(None)
    encoding = encoder(Keeping(responses, (), 0, True), cancel=lambda: cancels.append(None))
    data = encoding.opening() + encoding.encode([ContentDelta(0, "Hel")])
    under_way = responses.under_way(encoding.id)
    assert under_way is encoding
    under_way.cancel()
    assert cancels == [None]
    assert encoding.snapshot()["status"] == "cancelled"
    data += encoding.encode([ended("cancelled")]) + encoding.closing()
    events = check_stream(data.decode())
    assert events[-1]["type"] == "response.incomplete"
    response = check_response(events[-1]["response"])
    assert (response["status"], response["incomplete_details"]) == ("cancelled", None)
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_that_is_over_is_kept_and_no_longer_under_way() -> None:
    responses = ResponseStore().of(None)
    encoding = encoder(Keeping(responses, (), 0, True))
    encoding.encode([ReasoningDelta(0, "hm"), *A_CALL, ended("tool_calls")])
    encoding.closing()
    assert responses.under_way(encoding.id) is None
    kept = responses.get(encoding.id)
    assert kept is not None
    assert [item.shown["type"] for item in kept.output_items] == ["reasoning", "function_call"]


@pytest.mark.parametrize("forget", [True, False])
def test_an_answer_that_is_not_to_be_kept_leaves_nothing_behind(forget: bool) -> None:
    store = ResponseStore()
    encoding = encoder(Keeping(store.of(None), (), 0, kept=forget))
    if forget:
        encoding.forget()
    assert not encoding.readable
    encoding.encode([ContentDelta(0, "x"), ended()])
    encoding.closing()
    assert len(store) == 0
    assert store.of(None).under_way(encoding.id) is None


def test_an_answer_that_is_looked_at_while_a_thread_completes_an_item_has_that_item() -> None:
    encoding = encoder()
    encoding.opening()
    encoding.encode([ContentDelta(0, "words")])

    class Completing(list[dict[str, Any]]):
        """Is read while, on the other thread, a call ends the message."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from super().__iter__()
            encoding._output = []
            encoding.encode([CallBegun(0, 0, "call_1", "weather")])

    encoding._output = Completing()
    shown = encoding.snapshot()["output"]
    assert [item["content"][0]["text"] for item in shown] == ["words"]
