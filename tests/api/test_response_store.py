"""The kept answers: bounded, apart for each owner, and gone when they are gone."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dflash_trio.api.response_store import KeptResponse, ResponseStore, bytes_held
from dflash_trio.api.responses_items import ConversationItem, read_item


def item(id_: str, text: str = "hi") -> ConversationItem:
    return read_item({"type": "message", "role": "user", "content": text, "id": id_})


def response(id_: str, *inputs: str, size: int = 100) -> KeptResponse:
    """One of ``size`` bytes; its output is an item called ``out_`` and its id."""
    body = b"x" * (size - 10)
    return KeptResponse(id_, body, tuple(map(item, inputs)), (item(f"out_{id_}"),), 10)


class UnderWay:
    readable = True
    input_items = ()

    def snapshot(self) -> dict[str, Any]:
        return {}

    def cancel(self) -> None: ...

    def forget(self) -> None: ...


def test_what_is_kept_is_found_with_all_of_its_items() -> None:
    responses = ResponseStore().of(None)
    responses.keep(response("a", "in_1"))
    found = responses.get("a")
    assert found is not None
    assert [kept.id for kept in found.input_items] == ["in_1"]
    assert responses.item("in_1") == found.input_items[0]
    assert responses.item("out_a") == found.output_items[0]
    assert responses.get("b") is None
    assert responses.item("b") is None


def test_the_oldest_make_room_when_there_are_too_many() -> None:
    store = ResponseStore(max_responses=2)
    responses = store.of(None)
    for name in ("a", "b", "c"):
        responses.keep(response(name))
    assert [responses.get(name) is not None for name in ("a", "b", "c")] == [False, True, True]
    assert responses.item("out_a") is None
    assert (len(store), store.held_bytes) == (2, 200)


def test_the_oldest_make_room_when_they_hold_too_much() -> None:
    store = ResponseStore(max_bytes=1000)
    responses = store.of(None)
    responses.keep(response("a", size=400))
    responses.keep(response("b", size=400))
    responses.keep(response("c", size=600))
    assert [responses.get(name) is not None for name in ("a", "b", "c")] == [False, True, True]
    assert store.held_bytes == 1000


def test_one_that_is_too_large_by_itself_is_not_kept_and_throws_nobody_out() -> None:
    store = ResponseStore(max_bytes=1000)
    responses = store.of(None)
    responses.keep(response("a"))
    responses.keep(response("large", size=1001))
    assert responses.get("large") is None
    assert responses.get("a") is not None
    assert store.held_bytes == 100


def test_an_item_lives_as_long_as_the_last_answer_that_brings_it_along() -> None:
    store = ResponseStore(max_responses=2)
    responses = store.of(None)
    responses.keep(response("a", "shared"))
    responses.keep(response("b", "shared"))
    responses.keep(response("c"))
    assert responses.get("a") is None
    assert responses.item("shared") is not None
    assert responses.delete("b")
    assert responses.item("shared") is None


@pytest.mark.parametrize("dropped", ["a", "b"])
def test_an_item_outlives_any_of_the_answers_that_bring_it_along_but_the_last(dropped: str) -> None:
    responses = ResponseStore().of(None)
    responses.keep(response("a", "shared"))
    responses.keep(response("b", "shared", "out_a"))
    assert responses.delete(dropped)
    assert responses.item("shared") is not None
    assert responses.item("out_a") is not None
    assert responses.delete("b" if dropped == "a" else "a")
    assert responses.item("shared") is None
    assert responses.item("out_a") is None


def test_an_item_is_as_the_newest_answer_that_is_left_has_it() -> None:
    """What a deleted answer alone held is not held any longer."""
    store = ResponseStore()
    responses = store.of(None)
    for name in ("old", "new"):
        responses.keep(KeptResponse(name, b"", (item("x", name),), (), 10))
    assert responses.item("x") == item("x", "new")
    assert responses.delete("new")
    assert responses.item("x") == item("x", "old")
    assert store.held_bytes == 10


def test_nothing_is_left_of_answers_that_made_room_or_were_deleted() -> None:
    store = ResponseStore(max_bytes=300)
    responses = store.of(None)
    for at in range(10):
        # One item comes twice in each.
        responses.keep(response(f"r{at}", "shared", "shared", f"in_{at}", f"out_r{at - 1}"))
    assert [at for at in range(10) if responses.item(f"in_{at}") is not None] == [7, 8, 9]
    assert responses.item("shared") is not None
    for at in (8, 7, 9):
        assert responses.item(f"in_{at}") is not None
        assert responses.delete(f"r{at}")
    assert (len(store), store.held_bytes, store._items) == (0, 0, {})


def test_what_is_deleted_is_gone_once() -> None:
    store = ResponseStore()
    responses = store.of(None)
    responses.keep(response("a"))
    assert responses.delete("a")
    assert not responses.delete("a")
    assert responses.get("a") is None
    assert responses.item("out_a") is None
    assert (len(store), store.held_bytes) == (0, 0)


def test_one_owner_sees_nothing_of_another_ones() -> None:
    store = ResponseStore()
    mine, other, nobody = store.of(0), store.of(1), store.of(None)
    answer = UnderWay()
    mine.keep(response("a"))
    mine.begin("b", answer)
    for stranger in (other, nobody):
        assert stranger.get("a") is None
        assert stranger.item("out_a") is None
        assert stranger.under_way("b") is None
        assert not stranger.delete("a")
        stranger.end("b")
    assert mine.get("a") is not None
    assert mine.under_way("b") is answer


def test_an_answer_under_way_is_there_until_its_request_ends() -> None:
    mine = ResponseStore().of(None)
    answer = UnderWay()
    mine.begin("a", answer)
    assert mine.under_way("a") is answer
    mine.end("a")
    mine.end("a")
    assert mine.under_way("a") is None


@pytest.mark.parametrize("text", ["x" * 1000, "😀" * 1000])
def test_items_count_for_the_memory_of_their_texts(text: str) -> None:
    assert bytes_held([item("a", text)]) > sys.getsizeof(text)


def test_the_same_text_counts_once_within_one_answer() -> None:
    one = item("a", "x" * 100_000)
    assert bytes_held([one, one]) == bytes_held([one])
