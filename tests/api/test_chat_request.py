"""What a chat completion's body may say, and what each wrong one is told."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.api.chat_request import known_fields, parse_chat_call
from dflash_trio.api.sampling_fields import MAX_STOPS
from dflash_trio.generation.errors import InvalidRequest

HI = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> Any:
    return parse_chat_call(json.dumps({"messages": HI, **fields}).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(**fields)
    return error.value


def test_fields_that_nobody_knows_are_ignored() -> None:
    call = parse(banana=1, user="me", metadata={"a": "b"}, store=True, service_tier="auto")
    assert call == parse(banana=2, user="me", metadata={"a": "b"}, store=True, service_tier="auto")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "valid JSON"),
        (b"[]", "an array"),
        (b'"x"', "a string"),
        (b"null", "null"),
        (b"5", "a number"),
        (b"\xef\xbb\xbf{}", "valid JSON"),
        ('{"messages":[]}'.encode("utf-16"), "UTF-8"),
        (b'{"messages":"\xff"}', "UTF-8"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "too large"),
        (b'{"max_tokens":' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", "levels deep"),
        (b'{"a":' + b"[" * 100_000 + b"}", "levels deep"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"messages":[{"role":"user","content":"x \\ud83d y"}]}', "surrogate"),
        (b'{"\\ud83d":1}', "surrogate"),
    ],
)
def test_a_body_that_is_no_clean_json_object_is_refused_in_words_that_can_be_sent(
    raw: bytes, says: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_chat_call(raw)
    assert says in str(error.value)
    str(error.value).encode()


def test_a_pair_of_surrogates_is_one_whole_character() -> None:
    call = parse_chat_call(b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}')
    assert call.request.messages[0]["content"] == "😀"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "hi"}, "messages", "an array, not a string"),
        ({"messages": None}, "messages", "an array, not null"),
        ({"messages": [None]}, "messages[0]", "an object, not null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role", "banana"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "no text"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "a number"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]", "an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "a string",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "no text"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "an integer, not 1.5"),
        ({"max_tokens": "5"}, "max_tokens", "an integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "an integer, not a boolean"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"temperature": -0.1}, "temperature", "from 0 to 100"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": 10**400 - 1}, "temperature", "too large"),
        ({"top_p": 1.1}, "top_p", "from 0 to 1"),
        ({"top_k": -1}, "top_k", "from 0"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"repeat_penalty": 0}, "repeat_penalty", "from 0.01"),
        ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"seed": -2}, "seed", "from -1"),
        ({"seed": 2**64}, "seed", "from -1"),
        ({"seed": 1.0}, "seed", "an integer"),
        ({"n": 0}, "n", "from 1"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "an object"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or"),
        ({"model": 5}, "model", "a string"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": ["", "\n"]}, "stop[0]", "must not be empty"),
        ({"stop": [1]}, "stop[0]", "a string"),
        ({"stop": 7}, "stop", "a string, an array"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop", f"at most {MAX_STOPS}"),
        ({"stop": "x" * 100_000}, "stop", "longer than"),
        ({"logit_bias": []}, "logit_bias", "an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "a number"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"top_logprobs": 5}, "top_logprobs", "only possible with logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "only possible with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"cache_prompt": "no"}, "cache_prompt", "true or false"),
        ({"functions": [{"name": "f"}]}, "functions", "not available"),
        ({"function_call": {"name": "f"}}, "function_call", "not available"),
        ({"audio": {}}, "audio", "not available"),
        ({"modalities": ["text", "audio"]}, "modalities", "not available"),
        ({"web_search_options": {}}, "web_search_options", "not available"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "an object"),
    ],
)
def test_a_known_field_of_a_wrong_type_or_range_is_named(
    fields: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert says in str(error)


@pytest.mark.parametrize(
    "fields",
    [{name: None} for name in sorted(known_fields() - {"messages"})]
    + [
        {"tools": []},
        {"tool_choice": "none"},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"functions": []},
        {"function_call": "auto"},
        {"modalities": ["text"]},
        {"grammar": ""},
        {"parallel_tool_calls": True},
        {"n": 1},
        {"stop": []},
        {"cache_prompt": True},
    ],
)
def test_null_and_values_that_ask_for_nothing_mean_the_same_as_leaving_the_field_out(
    fields: dict[str, Any],
) -> None:
    left_out, given = parse().request, parse(**fields).request
    assert attrs.evolve(given, body_bytes=0, tool_choice=left_out.tool_choice) == attrs.evolve(
        left_out, body_bytes=0
    )


def test_the_newer_name_of_the_limit_wins() -> None:
    assert parse(max_tokens=5).request.max_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=7).request.max_tokens == 7
    assert parse(max_completion_tokens=10**12).request.max_tokens == 10**12


def test_what_concerns_the_whole_generation_reaches_the_request() -> None:
    request = parse(n=3, ignore_eos=True, cache_prompt=False, stop=["a", "b"]).request
    assert (request.n, request.ignore_eos, request.cache_prompt) == (3, True, False)
    assert request.stop == ("a", "b")
    assert parse(chat_template_kwargs={"x": 1}).request.template_arguments == {"x": 1}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_asked_for_with_a_number_of_alternatives(
    fields: dict[str, Any], wanted: int | None
) -> None:
    assert parse(**fields).request.logprobs == wanted


def test_every_sampling_field_reaches_the_request() -> None:
    sampling = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repeat_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repeat_last_n=-1,
        seed=2**63,
        logit_bias={"5": -100, "6": 1.5},
    ).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repeat_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.repeat_last_n, sampling.seed) == (-1, 2**63)
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_true_asks_for_a_usage_chunk(options: Any, wanted: bool) -> None:
    assert parse(stream=True, stream_options=options).include_usage is wanted


def test_one_final_assistant_turn_is_continued_and_two_in_a_row_are_refused() -> None:
    turn = {"role": "assistant", "content": "I am"}
    assert parse(messages=[*HI, turn]).request.continue_final
    assert not parse(messages=[*HI, turn, *HI]).request.continue_final
    assert refusal(messages=[*HI, turn, turn]).param == "messages[2]"
    # A system turn moves to the front, and is not between them.
    system = {"role": "system", "content": "Be brief."}
    assert refusal(messages=[*HI, turn, system, turn]).param == "messages[3]"


def test_text_parts_are_joined_into_one_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse(messages=[{"role": "user", "content": parts}])
    assert call.request.messages[0]["content"] == "a\nb"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(known_fields())), json_values, max_size=4),
    st.booleans(),
)
def test_no_body_gets_anything_but_a_request_or_a_refusal(
    fields: dict[str, Any], with_messages: bool
) -> None:
    body = {**({"messages": HI} if with_messages else {}), **fields}
    try:
        parse_chat_call(json.dumps(body).encode("utf-8", "surrogatepass"))
    except InvalidRequest as error:
        str(error).encode()
