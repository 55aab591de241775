"""What waits for a draft takes the memory that it counts for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dflash_trio.engine.llama_features import PendingRows

VALUES = 8
MIB = 2**20


def fill(rows: PendingRows, position: int, count: int) -> None:
    rows.extend(position, count)[:] = np.arange(position, position + count)[:, None]


def test_rows_that_are_halved_in_turn_give_their_memory_back() -> None:
    """Eight rows, 1,024 tokens of 92 KB each: the largest loses half, as in DFlashProvider."""
    rows = [PendingRows(4 * 576 * 10) for _ in range(8)]
    for row in rows:
        for position in range(0, 1024, 256):
            row.extend(position, 256)
            while sum(each.size_bytes for each in rows) > 64 * MIB:
                largest = max(rows, key=lambda each: each.size_bytes)
                largest.drop_first(largest.count - largest.count // 2)
    assert sum(row._buffer.nbytes for row in rows) <= 64 * MIB
    assert sum(row.count for row in rows) > 300


@pytest.mark.parametrize("way", ["drop_first", "cut"])
def test_a_buffer_shrinks_with_what_is_in_it_and_is_freed_with_the_last(way: str) -> None:
    rows = PendingRows(VALUES)
    fill(rows, 100, 1000)
    while rows.count:
        first = rows.begin
        if way == "drop_first":
            rows.drop_first(1)
        else:
            rows.cut(rows.end - 1)
        expected = range(rows.begin, rows.end)
        assert first + (way == "drop_first") == rows.begin
        assert rows.features[:, 0].tolist() == list(expected)
        assert rows.size_bytes == rows._buffer.nbytes < max(1, 2 * 4 * VALUES * rows.count)
    assert rows.size_bytes == 0


def test_whatever_is_done_what_is_in_it_stays_and_the_buffer_has_less_than_twice_of_it() -> None:
    dice, rows = random.Random(1), PendingRows(VALUES)
    end = 0
    for _ in range(2000):
        what = dice.randrange(3)
        if what == 0:
            more = dice.randrange(1, 40)
            fill(rows, end, more)
            end += more
        elif what == 1:
            rows.drop_first(dice.randint(0, rows.count))
        elif rows.count:
            end = dice.randint(rows.begin, rows.end)
            rows.cut(end)
        assert rows.features[:, 0].tolist() == list(range(rows.begin, rows.begin + rows.count))
        assert rows._buffer.nbytes < max(1, 2 * 4 * VALUES * rows.count)


def test_what_does_not_go_on_from_the_rest_takes_its_place_and_no_more() -> None:
    rows = PendingRows(VALUES)
    fill(rows, 0, 1000)
    fill(rows, 5000, 1)
    assert (rows.begin, rows.count, rows.features[0, 0]) == (5000, 1, 5000)
    assert rows.size_bytes == 4 * VALUES


def test_little_by_little_few_buffers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    move = PendingRows._move

    def counted(self: PendingRows, capacity: int) -> None:
        nonlocal made
        made += 1
        move(self, capacity)

    monkeypatch.setattr(PendingRows, "_move", counted)
    rows = PendingRows(VALUES)
    for position in range(1000):
        fill(rows, position, 1)
    for _ in range(1000):
        rows.drop_first(1)
    assert made < 60
