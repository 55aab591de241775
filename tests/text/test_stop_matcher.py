"""Nothing of a stop string gets out, everything before it does, and the chunking never shows."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.text.stop_matcher import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All text that was sent, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        result = matcher.push(piece)
        sent += result.text
        if result.matched is not None:
            assert matcher.matched == result.matched
            assert matcher.finish() == ""
            return sent, result.matched
    return sent + matcher.finish(), None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def held_by_reference(stops: list[str], text: str) -> str:
    for start in range(len(text)):
        if any(len(text) - start < len(s) and s.startswith(text[start:]) for s in stops):
            return text[start:]
    return ""


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "sent", "matched"),
    [
        ("alphaSTOPPEDbeta", "alpha", "STOPPED"),
        ("alphaSTOPPERbeta", "alphaSTOPPERbeta", None),
        ("alphaSTOP", "alphaSTOP", None),
        ("STOPPED", "", "STOPPED"),
        ("STOSTOSTOPPED", "STOSTO", "STOPPED"),
    ],
)
def test_a_stop_string_over_several_tokens(
    text: str, sent: str, matched: str | None, size: int
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(["STOPPED"], pieces) == (sent, matched)


def test_the_match_that_completes_first_wins() -> None:
    assert run(["bcdef", "cd"], ["abcdef"]) == ("ab", "cd")
    assert run(["cd", "bcdef"], ["abcdef"]) == ("ab", "cd")


def test_of_matches_completing_together_the_longest_wins() -> None:
    for stops in (["cd", "abcd", "bcd"], ["abcd", "cd", "bcd"]):
        assert run(stops, ["x", "ab", "cd"]) == ("x", "abcd")


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("a\nb\nc").text == "a"
    after = matcher.push("more")
    assert (after.text, after.matched) == ("", "\n")


def test_without_stop_strings_the_text_passes_as_it_is() -> None:
    assert StopMatcher([]).push("abc").text == "abc"


@pytest.mark.parametrize("stops", [[""], ["", "\n"]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(stops)


letters = st.text(alphabet="ab", max_size=60)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=4)


@given(stop_lists, letters, st.lists(st.integers(0, 10_000), max_size=20))
def test_any_chunking_gives_what_the_whole_text_gives(
    stops: list[str], text: str, places: list[int]
) -> None:
    assert run(stops, cut(text, places)) == reference(stops, text)


@given(stop_lists, letters)
def test_what_is_held_is_the_longest_end_that_could_become_a_match(
    stops: list[str], text: str
) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for end, char in enumerate(text, 1):
        result = matcher.push(char)
        sent += result.text
        if result.matched:
            break
        assert sent + held_by_reference(stops, text[:end]) == text[:end]


def test_a_very_long_stop_string_costs_linear_time() -> None:
    stop = "a" * 100_000 + "b"
    text = "a" * 300_000  # every character could begin the match
    began = time.process_time()
    sent, matched = run([stop], [text[i : i + 4] for i in range(0, len(text), 4)])
    assert (sent, matched) == (text, None)
    sent, matched = run([stop], [text, "b"])
    assert (len(sent), matched) == (200_000, stop)
    assert time.process_time() - began < 5  # quadratic work would take minutes
