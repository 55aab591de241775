"""Which tokens an answer's log probabilities are of: those of its content, however it was cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.engine.answer_text import AnswerText
from dflash_trio.engine.scripted_runner import ScriptedVocabulary
from dflash_trio.generation.channels import ChannelSplitter
from dflash_trio.generation.events import CONTENT, TextDelta, TokenAlternative, TokenLogprob
from dflash_trio.generation.request import ThinkingPlan
from dflash_trio.text.reasoning import THINK, ThinkSplitter
from dflash_trio.text.tool_calls.harmony import CONTROLS, HarmonySplitter
from tests.engine.engine_helpers import prompt


class Written(ScriptedVocabulary):
    """Whose tokens are the pieces of one answer, in their order."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def piece(self, token: int) -> bytes:
        return self._pieces[token]


@attrs.frozen
class Heard:
    content: str
    listed: list[int]
    """The places of the pieces that have a likelihood in the content."""
    asked: list[int]
    """Of those whose likelihood was handed over."""


def hear(
    splitter: ChannelSplitter, pieces: Sequence[bytes], *, stop: tuple[str, ...] = ()
) -> Heard:
    plan = ThinkingPlan(lambda: splitter, limit=99, limited_by="budget", close_tokens=())
    prepared = attrs.evolve(prompt("why>", 99, stop=stop), thinking=plan)
    text = AnswerText(prepared, 0, Written(pieces))
    deltas: list[TextDelta] = []
    asked: list[int] = []
    for token, piece in enumerate(pieces):
        logprob = None
        if not text.thinking:  # as the engine does
            asked.append(token)
            logprob = TokenLogprob(TokenAlternative(token, piece, -1.0))
        deltas += text.push(token, logprob, closes_for="model")
        if text.stopped:
            break
    deltas += text.finish()
    content = "".join(delta.text for delta in deltas if delta.channel == CONTENT)
    listed = [entry.chosen.token for delta in deltas for entry in delta.logprobs]
    return Heard(content, listed, asked)


def think(
    *pieces: bytes, starts_open: bool = False, stop: tuple[str, ...] = ()
) -> tuple[str, list[bytes]]:
    """The content, and the pieces that have a likelihood in it."""
    heard = hear(ThinkSplitter(THINK, starts_open=starts_open), pieces, stop=stop)
    return heard.content, [pieces[token] for token in heard.listed]


SMILE = "😀".encode()


@pytest.mark.parametrize(
    ("pieces", "content", "listed"),
    [
        # Markers of several tokens, and of one.
        ([b"<th", b"ink>", b"a", b"</th", b"ink>", b"hi"], "hi", [b"hi"]),
        ([b" ", b"<think>", b"a", b"</think>", b"hi"], "hi", [b"hi"]),
        # Blanks behind the marker, and beside content in one token.
        ([b"<think>", b"a", b"</think>", b"\n\n", b"\n", b"hi"], "hi", [b"hi"]),
        ([b"<think>", b"a", b"</think>", b"\n", b"\n h", b"i"], "hi", [b"\n h", b"i"]),
        ([b"<think>", b"</think>", b"\n\n"], "", []),
        # All in one token, which holds content too.
        ([b" ", b"<think>a</think>\nh", b"i"], "hi", [b"<think>a</think>\nh", b"i"]),
        # A character that begins in the same token as the blanks end.
        (
            [b"<think>", b"</think>", b"\n" + SMILE[:2], SMILE[2:]],
            "😀",
            [b"\n" + SMILE[:2], SMILE[2:]],
        ),
        # What looked like a marker, and blanks that are of the content.
        ([b" ", b"<th", b"x"], " <thx", [b" ", b"<th", b"x"]),
        ([b"\n", b"<th"], "\n<th", [b"\n", b"<th"]),
        # A marker or blanks in the content are text; so is a character that was cut.
        ([b"a", b"\n", b"<think>", SMILE[:2]], "a\n<think>", [b"a", b"\n", b"<think>", SMILE[:2]]),
    ],
)
def test_markers_and_the_blanks_beside_them_have_no_likelihoods(
    pieces: list[bytes], content: str, listed: list[bytes]
) -> None:
    assert think(*pieces) == (content, listed)


def test_blanks_behind_a_block_that_the_prompt_opened_have_no_likelihoods() -> None:
    heard = think(b"a", b"</think>", b"\n\n", b"hi", starts_open=True)
    assert heard == ("hi", [b"hi"])


def test_what_a_stop_string_takes_away_has_no_likelihood_though_it_waited_for_a_marker() -> None:
    assert think(b"<", b"t", b"h", b"x", stop=("hx",)) == ("<t", [b"<", b"t"])


BITS = st.sampled_from(["<think>", "</think>", "\n", " ", "\u3000", "a", "<", "é", "😀"])


@given(st.lists(BITS, max_size=8), st.lists(st.integers(1, 4), min_size=60), st.booleans())
def test_likelihoods_are_of_exactly_the_tokens_that_hold_content(
    bits: list[str], lengths: list[int], starts_open: bool
) -> None:
    whole = "".join(bits).encode()
    cuts = [0, *(at for at in accumulate(lengths) if at < len(whole)), len(whole)]
    pieces = [whole[begin:end] for begin, end in pairwise(cuts) if begin < end]
    heard = hear(ThinkSplitter(THINK, starts_open=starts_open), pieces)
    # Content is the end of the answer.
    first = len(whole) - len(heard.content.encode())
    holding = [token for token, end in enumerate(accumulate(map(len, pieces))) if end > first]
    assert heard.listed == [token for token in holding if token in heard.asked]


_CONTROLS = re.compile("(" + "|".join(map(re.escape, sorted(CONTROLS))) + ")")


@pytest.mark.parametrize(
    ("said", "content", "listed"),
    [
        ("<|channel|>final<|message|>Hi", "Hi", ["Hi"]),
        (
            "<|channel|>analysis<|message|>Hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hi<|end|>",
            "Hi",
            ["Hi"],
        ),
        # A call's arguments are none of the content, whatever comes before and behind.
        (
            "<|channel|>commentary<|message|>Wait<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final<|message|>Hi",
            "WaitHi",
            ["Wait", "Hi"],
        ),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", []),
        # An answer without a header, which looked like one for a while.
        ("\nto<|end|>", "", []),
        ("\n", "\n", ["\n"]),
        ("Hi", "Hi", ["Hi"]),
    ],
)
def test_headers_of_gpt_oss_have_no_likelihoods(said: str, content: str, listed: list[str]) -> None:
    pieces = [part for part in _CONTROLS.split(said) if part]
    controls = {token: part for token, part in enumerate(pieces) if part in CONTROLS}
    splitter = HarmonySplitter(controls=controls)
    heard = hear(splitter, [part.encode() for part in pieces])
    assert (heard.content, [pieces[token] for token in heard.listed]) == (content, listed)
