"""The channels of gpt-oss's output are told apart, with OpenAI's parser and without."""

from __future__ import annotations

import base64
import codecs
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.text.tool_calls.harmony import CONTROLS, HarmonySplitter, load_encoding

WEATHER = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
)
O200K = os.environ.get("O200K_BASE_FILE")
"""The file ``o200k_base.tiktoken``, which is too large to lie in the tree."""

CASES: list[tuple[str, list[tuple[str, str]]]] = [
    ("<|channel|>final<|message|>Hi <b>.<|return|>", [("content", "Hi <b>.")]),
    (
        "<|channel|>analysis<|message|>Hm 😀.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi",
        [("reasoning", "Hm 😀."), ("content", "Hi")],
    ),
    (
        f'<|channel|>analysis<|message|>I call.<|end|>{WEATHER}{{"city": "Köln"}}<|call|>',
        [("reasoning", "I call."), ("tool:weather", '{"city": "Köln"}')],
    ),
    (
        "<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        [("content", "Wait."), ("tool:f", "{}")],
    ),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", [("tool:f", "{}")]),
    ("<|channel|>analysis to=browser.search code<|message|>{}", [("tool:browser.search", "{}")]),
    ("<|channel|>commentary to=functions.f<|mess", []),
]
BROKEN: list[tuple[str, list[tuple[str, str]]]] = [
    ("No header.", [("content", "No header.")]),
    ("to", [("content", "to")]),
    (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
        [("reasoning", "a"), ("content", "b")],
    ),
    ("<|channel|><|message|>x<|message|>y<|end|>z<|end|>", [("content", "xy")]),
]

Heard = list[tuple[str, str]]


def listen(splitter: HarmonySplitter, pushes: list[tuple[str, int]]) -> Heard:
    heard: Heard = []
    for found in [*(splitter.push(*push) for push in pushes), splitter.finish()]:
        for channel, text in found:
            assert text
            if heard and heard[-1][0] == channel:
                heard[-1] = (channel, heard[-1][1] + text)
            else:
                heard.append((channel, text))
    return heard


_IDS = {literal: 1000 + at for at, literal in enumerate(sorted(CONTROLS))}
_BY_ID = {token: literal for literal, token in _IDS.items()}
_PARTS = re.compile("|".join(map(re.escape, CONTROLS)) + "|.", re.DOTALL)


def as_tokens(text: str) -> list[tuple[str, int]]:
    """A token for each literal and for each other character."""
    return [(part, _IDS.get(part, 1)) for part in _PARTS.findall(text)]


@pytest.mark.parametrize(("text", "heard"), [*CASES, *BROKEN])
def test_channels_are_told_apart_by_control_tokens(text: str, heard: Heard) -> None:
    assert listen(HarmonySplitter(), as_tokens(text)) == heard
    assert listen(HarmonySplitter(), [(text, 1)]) == heard
    assert listen(HarmonySplitter(controls=_BY_ID), as_tokens(text)) == heard


def test_an_answer_may_speak_of_control_tokens() -> None:
    pushes = [
        ("<|channel|>", _IDS["<|channel|>"]),
        ("final", 1),
        ("<|message|>", _IDS["<|message|>"]),
    ]
    pushes += [("<|end|>", 1), (" ends.", 1), ("é<|end|>", _IDS["<|end|>"])]
    heard = listen(HarmonySplitter(controls=_BY_ID), pushes)
    assert heard == [("content", "<|end|> ends.é")]
    letters = [(letter, 1) for letter in "<|end|>"]
    assert listen(HarmonySplitter(), [*pushes[:3], *letters]) == [("content", "<|end|>")]


def test_thinking_is_what_stands_in_a_message_of_analysis() -> None:
    splitter = HarmonySplitter()
    seen = []
    for text, token in as_tokens("<|channel|>analysis<|message|>a<|end|><|start|>"):
        splitter.push(text, token)
        seen.append(splitter.thinking)
    assert seen == [False] * 9 + [True, True, False, False]


def test_a_prompt_may_have_opened_the_thinking() -> None:
    splitter = HarmonySplitter(starts_open=True)
    assert splitter.thinking
    assert splitter.push("Hm", 1) == [("reasoning", "Hm")]


@given(
    st.lists(st.sampled_from([*sorted(CONTROLS), "analysis", " to=functions.f", "x", " ", "<|"]))
)
def test_no_output_makes_it_raise(parts: list[str]) -> None:
    text = "".join(parts)
    heard = listen(HarmonySplitter(controls=_BY_ID), as_tokens(text))
    assert listen(HarmonySplitter(), as_tokens(text)) == heard


def test_another_vocabulary_is_not_taken_and_nothing_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("went to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "")
    assert load_encoding([b"a", b"b"]) is None
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"]


@pytest.mark.skipif(O200K is None, reason="needs the vocabulary of gpt-oss in O200K_BASE_FILE")
def test_openais_parser_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert O200K is not None
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "")
    lines = Path(O200K).read_bytes().splitlines()
    vocabulary = [base64.b64decode(line.split()[0]) for line in lines]
    encoding: Any = load_encoding(vocabulary)
    assert encoding is not None
    controls = {encoding.encode(each, allowed_special="all")[0]: each for each in CONTROLS}

    def pushes(text: str) -> list[tuple[str, int]]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for token in encoding.encode(text, allowed_special="all"):
            piece = controls[token].encode() if token in controls else vocabulary[token]
            pieces.append((decoder.decode(piece), token))
        return pieces

    for text, heard in CASES:
        splitter = HarmonySplitter(controls=controls, encoding=encoding)
        assert listen(splitter, pushes(text)) == heard
        assert splitter._by_library is not None
    for text, heard in BROKEN:
        splitter = HarmonySplitter(controls=controls, encoding=encoding)
        assert listen(splitter, pushes(text)) == heard

    def seconds(words: int) -> float:
        long = pushes("<|channel|>final<|message|>" + "word " * words)
        best = 9.0
        for _ in range(2):
            begun = time.thread_time()
            listen(HarmonySplitter(controls=controls, encoding=encoding), long)
            best = min(best, time.thread_time() - begun)
        return best

    assert seconds(16_000) < 0.1 + 8 * seconds(2_000) * 3
