"""Text comes out in whole characters, however the bytes were cut into tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.text.detokenizer import Detokenizer


def decode(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [*map(detokenizer.push, pieces), detokenizer.finish()]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


VALUE = "歪😀👩‍👩‍👧 é — π"


def test_byte_by_byte_equals_the_text_and_never_shows_a_replacement_character() -> None:
    pieces = decode([bytes([byte]) for byte in VALUE.encode()])
    assert "".join(pieces) == VALUE
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte() -> None:
    assert decode([b"a\xf0\x9f", b"\x98", b"\x80b"]) == ["a", "", "😀b", ""]


@pytest.mark.parametrize("tail", [b"\xc3", b"\xe6\xad", b"\xf0\x9f\x98"])
def test_an_incomplete_character_at_the_end_is_dropped(tail: bytes) -> None:
    assert decode([b"ok", tail]) == ["ok", "", ""]


def test_ill_formed_bytes_in_the_middle_become_replacement_characters() -> None:
    assert "".join(decode([b"a\xff", b"b\xe6", b"\xadc", b"\xed\xa0\x80"])) == (
        b"a\xffb\xe6\xadc\xed\xa0\x80".decode("utf-8", "replace")
    )


def test_it_is_as_new_after_finish() -> None:
    detokenizer = Detokenizer()
    detokenizer.push(b"\xf0\x9f")
    detokenizer.finish()
    assert detokenizer.push(b"x") == "x"


fragments = st.one_of(st.text().map(str.encode), st.binary(max_size=6))


@given(st.lists(fragments).map(b"".join), st.lists(st.integers(0, 10_000)))
def test_streaming_equals_one_shot_for_any_cut(data: bytes, places: list[int]) -> None:
    assert "".join(decode(cut(data, places))) == "".join(decode([data]))


@given(st.text(), st.lists(st.integers(0, 10_000)))
def test_well_formed_text_comes_back_as_it_was(text: str, places: list[int]) -> None:
    pieces = decode(cut(text.encode(), places))
    assert "".join(pieces) == text
