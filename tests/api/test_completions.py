"""Completions: what a body may say, and how an answer is told whole and in a stream."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from dflash_trio.api.answer import AnswerEvent, ChoiceEnded, ContentDelta, WholeAnswer
from dflash_trio.api.completions import CompletionEncoder, LegacyLogprobs
from dflash_trio.api.completions_request import known_fields, parse_completion_call
from dflash_trio.api.generating import AnswerContext
from dflash_trio.generation.errors import EngineFailed, InvalidRequest
from dflash_trio.generation.events import TokenAlternative, TokenLogprob, Usage
from dflash_trio.generation.request import OutputConstraint, PreparedPrompt, SamplingParams
from tests.support.running import sse_events


def parse(**fields: Any) -> Any:
    return parse_completion_call(json.dumps({"prompt": "Once", **fields}).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(**fields)
    return error.value


# ----------------------------------------------------------------------------- the body


@pytest.mark.parametrize(
    ("prompt", "raw"),
    [
        ("Once", "Once"),
        ("", ""),
        (["Once"], "Once"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
        ("<|im_end|>", "<|im_end|>"),
    ],
)
def test_one_prompt_may_be_written_in_four_ways(prompt: Any, raw: Any) -> None:
    request = parse(prompt=prompt).request
    assert (request.raw_prompt, request.messages) == (raw, ())


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": None}, "prompt", "a string or an array"),
        ({"prompt": 5}, "prompt", "a string or an array"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt[0]", "must not be empty"),
        ({"prompt": ["a", "b"]}, "prompt", "one is the limit"),
        ({"prompt": [[1], [2]]}, "prompt", "one is the limit"),
        ({"prompt": [1, "a"]}, "prompt[1]", "a token id"),
        ({"prompt": [[1, 1.5]]}, "prompt[0][1]", "a token id"),
        ({"prompt": [True]}, "prompt[0]", "a token id"),
        ({"prompt": [-1]}, "prompt[0]", "from 0"),
        ({"prompt": [2**31]}, "prompt[0]", "from 0"),
        ({"prompt": [None]}, "prompt[0]", "a token id"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"best_of": 2}, "best_of", "equal to n (1)"),
        ({"n": 3, "best_of": 4}, "best_of", "equal to n (3)"),
        ({"suffix": "end"}, "suffix", "not available"),
        ({"suffix": 5}, "suffix", "a string"),
        ({"logprobs": 6}, "logprobs", "from 0 to 5"),
        ({"logprobs": True}, "logprobs", "an integer"),
        ({"echo": True, "logprobs": 0}, "echo", "not possible with logprobs"),
        ({"echo": True, "prompt": [1]}, "echo", "a prompt of text"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"temperature": -1}, "temperature", "from 0"),
    ],
)
def test_a_known_field_of_a_wrong_type_or_range_is_named(
    fields: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert says in str(error)


def test_a_prompt_is_required() -> None:
    with pytest.raises(InvalidRequest, match="prompt: is required"):
        parse_completion_call(b"{}")


@pytest.mark.parametrize("name", sorted(known_fields() - {"prompt"}))
def test_null_means_the_same_as_leaving_the_field_out(name: str) -> None:
    left_out, given = parse(), parse(**{name: None})
    assert given.request.body_bytes > left_out.request.body_bytes
    assert (given.stream, given.include_usage, given.echoed) == (False, False, "")
    assert given.request.sampling == left_out.request.sampling
    assert (given.request.max_tokens, given.request.n) == (None, 1)


def test_everything_that_is_said_reaches_the_request() -> None:
    call = parse(
        max_tokens=7,
        n=2,
        best_of=2,
        stop=["x"],
        logprobs=3,
        ignore_eos=True,
        cache_prompt=False,
        grammar='root ::= "a"',
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        tools="what is not known here is ignored",
    )
    request = call.request
    assert (request.max_tokens, request.n, request.stop, request.logprobs) == (7, 2, ("x",), 3)
    assert (request.ignore_eos, request.cache_prompt, request.sampling.seed) == (True, False, 5)
    assert request.constraint == OutputConstraint("gbnf", 'root ::= "a"')
    assert (call.stream, call.include_usage) == (True, True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(known_fields())), json_values, max_size=4))
def test_no_body_gets_anything_but_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        parse_completion_call(json.dumps({"prompt": "x", **fields}).encode())
    except InvalidRequest as error:
        str(error).encode()


def test_every_field_is_on_the_api_page() -> None:
    page = Path(__file__).parent.parent.parent.joinpath("docs", "http-api.md").read_text("utf-8")
    assert {name for name in known_fields() if not re.search(rf"`{name}[`.]", page)} == set()


# --------------------------------------------------------------------------- the answer

USAGE = Usage(prompt_tokens=4, completion_tokens=3)


def encoder(
    *, n: int = 1, logprobs: int | None = None, include_usage: bool = False, echoed: str = ""
) -> CompletionEncoder:
    prepared = PreparedPrompt((1, 2, 3, 4), 16, SamplingParams(), n=n, logprobs=logprobs)
    context = AnswerContext("m", prepared, lambda: None, "req_1")
    return CompletionEncoder(context, include_usage=include_usage, echoed=echoed)


def ended(index: int = 0, reason: Any = "stop", **more: Any) -> ChoiceEnded:
    return ChoiceEnded(index, reason, USAGE, **more)


def token(piece: bytes, logprob: float = -1.0, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(
        TokenAlternative(0, piece, logprob),
        tuple(TokenAlternative(1, other, likely) for other, likely in top),
    )


def streamed(encoder: CompletionEncoder, *events: AnswerEvent) -> list[Any]:
    data = encoder.opening() + b"".join(encoder.encode([event]) for event in events)
    return sse_events((data + encoder.closing()).decode())


def whole(encoder: CompletionEncoder, *events: AnswerEvent, n: int = 1) -> dict[str, Any]:
    answer = WholeAnswer(n)
    answer.add(events)
    body = encoder.whole(answer)
    Completion.model_validate(json.loads(json.dumps(body)), strict=True)
    return body


def test_a_whole_answer_is_a_text_completion() -> None:
    body = whole(encoder(), ContentDelta(0, "upon"), ContentDelta(0, " a time"), ended())
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["system_fingerprint"].startswith("dflash-trio-")
    assert body["choices"] == [
        {"index": 0, "text": "upon a time", "logprobs": None, "finish_reason": "stop"}
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (4, 7)


def test_the_usage_of_several_answers_does_not_depend_on_which_ended_first() -> None:
    first = ChoiceEnded(0, "length", Usage(4, 3, thinking_closed_by="budget"), None, "context_full")
    second = ChoiceEnded(1, "stop", Usage(4, 5, thinking_closed_by="model"))
    told = whole(encoder(n=2), second, first, n=2)["usage"]
    assert told["completion_tokens_details"]["thinking_closed_by"] == "budget"
    assert told["completion_tokens_details"]["ended_by"] == "context_full"
    for order in ((first, second), (second, first)):
        *_, last, _ = streamed(encoder(n=2, include_usage=True), *order)
        assert last["usage"] == told


def test_a_stream_is_texts_then_a_finish_then_done_with_one_identity() -> None:
    *chunks, done = streamed(
        encoder(), ContentDelta(0, "upon\u2028"), ContentDelta(0, " a"), ended(reason="length")
    )
    assert done == "[DONE]"
    for chunk in chunks:
        Completion.model_validate({**chunk, "choices": []}, strict=True)
        assert "usage" not in chunk
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["upon\u2028", " a", ""]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, "length"]
    for name in ("id", "object", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("cmpl-")


def test_usage_comes_once_right_before_done() -> None:
    *chunks, last, done = streamed(
        encoder(include_usage=True), ContentDelta(0, "x"), ended(detail="context_full")
    )
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["completion_tokens_details"]["ended_by"] == "context_full"


def test_several_answers_are_told_apart_by_their_index() -> None:
    events = [ContentDelta(1, "b"), ContentDelta(0, "a"), ended(1, "length"), ended(0)]
    body = whole(encoder(n=2), *events, n=2)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert body["usage"]["completion_tokens"] == 6
    *chunks, _ = streamed(encoder(n=2), *events)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 0, 1, 0]


def test_an_echo_is_the_prompt_before_each_answer() -> None:
    events = [ContentDelta(0, "a"), ContentDelta(1, "b"), ended(0), ended(1)]
    body = whole(encoder(n=2, echoed="Once "), *events, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["Once a", "Once b"]
    *chunks, _ = streamed(encoder(n=2, echoed="Once "), *events)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Once a", "Once b"]


def test_a_failure_is_an_error_event_and_nothing_more() -> None:
    (event,) = sse_events(encoder().failure(EngineFailed("gone")).decode())
    assert event["error"]["message"] == "gone"


def test_log_probabilities_are_four_lists_of_one_length() -> None:
    entries = (token(b"ab", -0.5, (b"ab", -0.5), (b"x", -2.0)), token(b"c", -3.0, (b"y", -0.1)))
    body = whole(encoder(logprobs=2), ContentDelta(0, "abc", entries), ended())
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"ab": -0.5, "x": -2.0}, {"y": -0.1, "c": -3.0}],
        "text_offset": [0, 2],
    }


def test_without_alternatives_there_are_no_top_log_probabilities() -> None:
    body = whole(encoder(logprobs=0), ContentDelta(0, "a", (token(b"a"),)), ended())
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert body["choices"][0]["logprobs"]["tokens"] == ["a"]


def test_an_answer_without_tokens_still_has_the_lists_that_were_asked_for() -> None:
    body = whole(encoder(logprobs=0), ended())
    assert body["choices"][0]["logprobs"]["tokens"] == []


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    *chunks, _ = streamed(
        encoder(logprobs=0),
        ContentDelta(0, "ab", (token(b"ab"),)),
        ContentDelta(0, "c", (token(b"c"),)),
        ended(),
    )
    offsets = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert offsets[0]["text_offset"] == [0]
    assert offsets[1]["text_offset"] == [2]
    assert offsets[2] is None


@given(st.text(max_size=20), st.data())
def test_however_tokens_cut_a_text_each_offset_is_that_of_its_character(
    text: str, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)) | {0, len(raw)})
    pieces = [raw[a:b] for a, b in pairwise(cuts)]
    layout = LegacyLogprobs(0).of([token(piece) for piece in pieces])
    starts = [len(raw[:cut].decode("utf-8", "ignore")) for cut in cuts[:-1]]
    assert layout["text_offset"] == starts
