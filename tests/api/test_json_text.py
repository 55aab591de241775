"""JSON that is made in parts is the same JSON, and never in parts too large for others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.api import sse
from dflash_trio.api.json_body import MAX_ARRAYS, parse_json_object
from dflash_trio.api.json_text import SLICE, LongArray, dump_in_parts
from dflash_trio.generation.errors import InvalidRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(VALUES)
def test_parts_join_to_what_pythons_own_encoder_writes(value: Any) -> None:
    assert dump_in_parts(value) == json.dumps(value, ensure_ascii=False)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert dump_in_parts(value, compact=True) == compact


@pytest.mark.parametrize("length", [0, 1, SLICE - 1, SLICE, SLICE + 1, 5 * SLICE + 3])
def test_an_array_of_any_length_is_the_same_whether_it_is_there_or_made(length: int) -> None:
    items = [{"id": i, "piece": "é"} for i in range(length)]
    expected = json.dumps({"tokens": items, "after": 1}, ensure_ascii=False)
    assert dump_in_parts({"tokens": items, "after": 1}) == expected
    assert dump_in_parts({"tokens": LongArray(iter(items)), "after": 1}) == expected
    assert dump_in_parts({"tokens": tuple(items), "after": 1}) == expected


def test_of_an_array_that_is_made_only_a_few_items_are_there_at_a_time() -> None:
    class Item(dict[str, int]):
        alive = 0

        def __init__(self) -> None:
            super().__init__(a=1)
            Item.alive += 1

        def __del__(self) -> None:
            Item.alive -= 1

    most = 0

    def items() -> Iterator[Item]:
        nonlocal most
        for _ in range(20 * SLICE):
            most = max(most, Item.alive)
            yield Item()

    dump_in_parts(LongArray(items()))
    assert most <= 2 * SLICE


@given(st.text(alphabet="a\u2028\u2029\x85é\n"))
def test_a_line_is_one_line_to_every_client_and_says_the_same(text: str) -> None:
    for large in (False, True):
        line = sse.json_line({"text": text}, large=large)
        assert len(line.splitlines()) == 1
        assert json.loads(line) == {"text": text}


def test_more_arrays_than_the_parser_can_take_at_once_are_refused() -> None:
    most = b'{"x":[' + b"[]," * (MAX_ARRAYS - 2) + b"[]]}"
    assert len(parse_json_object(most)["x"]) == MAX_ARRAYS - 1
    with pytest.raises(InvalidRequest, match="more than 100000 arrays"):
        parse_json_object(most.replace(b"[[]", b"[[],[]"))


@pytest.mark.parametrize("text", ["[", '"[', "\\[", '[\\"', "\\\\[["])
def test_brackets_within_a_text_are_no_arrays(text: str) -> None:
    body = {"content": text * (MAX_ARRAYS + 1)}
    assert parse_json_object(json.dumps(body).encode()) == body


def test_a_text_without_its_end_is_told_soon_however_many_quotes_it_has() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_json_object(b'{"x":"' + rb"\"[" * 300_000)
