"""The ledger promises what there is, to the cell, and gets it back exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from dflash_trio.engine.admission import Fit, Hold, KVLedger
from tests.support.http_client import PATIENCE


def ledger(
    *, slots: int = 2, pool: int = 100, max_ctx: int = 60, decode_headroom: int = 10
) -> KVLedger:
    return KVLedger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=decode_headroom)


def reserve(books: KVLedger, prompt: int, max_tokens: int, n: int = 1) -> Hold:
    hold = books.try_reserve(prompt, max_tokens, n)
    assert hold is not None
    return hold


def taken(books: KVLedger) -> tuple[int, int]:
    statistics = books.statistics()
    return statistics.slots_reserved, statistics.committed


# ----------------------------------------------------------------------------- the charge


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "charged", "decided_by"),
    [
        (20, 5, 1, 25, "max_tokens"),
        (20, 500, 1, 30, "decode_headroom"),
        (55, 500, 1, 60, "max_ctx - prompt"),
        (59, 500, 1, 60, "max_ctx - prompt, one token left"),
        (20, 5, 2, 30, "max_tokens, for two"),
        (20, 500, 2, 40, "decode_headroom, for two"),
        (55, 500, 2, 65, "max_ctx - prompt, for two: the prompt is charged once"),
    ],
)
def test_the_charge_is_the_prompt_and_a_headroom_for_each_answer(
    prompt: int, max_tokens: int, n: int, charged: int, decided_by: str
) -> None:
    books = ledger()
    hold = reserve(books, prompt, max_tokens, n)
    assert (hold.slots, hold.cells) == (n, charged), decided_by
    assert taken(books) == (n, charged)


@pytest.mark.parametrize(
    ("prompt", "n", "charged"),
    [(95, 1, 100), (99, 1, 100), (95, 2, 99), (98, 2, 100), (94, 4, 98)],
)
def test_the_headroom_is_cut_to_an_even_share_of_what_the_pool_has_left(
    prompt: int, n: int, charged: int
) -> None:
    books = ledger(slots=4, pool=100, max_ctx=1000)
    assert reserve(books, prompt, 500, n).cells == charged


@settings(deadline=None)
@given(
    slots=st.integers(1, 5),
    pool=st.integers(1, 60),
    max_ctx=st.integers(1, 60),
    decode_headroom=st.integers(1, 20),
    prompt=st.integers(0, 70),
    max_tokens=st.integers(1, 70),
    n=st.integers(1, 6),
)
def test_an_empty_ledger_admits_exactly_what_fits_and_charges_by_the_formula(
    slots: int, pool: int, max_ctx: int, decode_headroom: int, prompt: int, max_tokens: int, n: int
) -> None:
    books = ledger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=decode_headroom)
    fits = prompt + 1 <= max_ctx and prompt + n <= pool and n <= slots
    assert (books.fit(prompt, max_tokens, n) is not Fit.NONE) == fits
    assert books.could_reserve(prompt, max_tokens, n) == fits
    hold = books.try_reserve(prompt, max_tokens, n)
    assert (hold is not None) == fits
    if hold is not None:
        h = min(max_tokens, decode_headroom, max_ctx - prompt, (pool - prompt) // n)
        assert h >= 1, "whoever is admitted can say something"
        assert hold.cells == prompt + n * h
        full = h == min(max_tokens, decode_headroom)
        assert books.fit(prompt, max_tokens, n) is (Fit.FULL if full else Fit.TIGHT)
        books.release(hold)
    assert taken(books) == (0, 0)


# ------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "fit"),
    [
        (50, 500, 1, Fit.FULL),  # the whole headroom just fits the context
        (51, 500, 1, Fit.TIGHT),
        (51, 9, 1, Fit.FULL),  # nine are all that is asked for
        (59, 500, 1, Fit.TIGHT),  # prompt + 1 == max_ctx
        (59, 1, 1, Fit.FULL),
        (60, 1, 1, Fit.NONE),
        (10, 1, 3, Fit.NONE),  # more answers than slots
        (0, 1, 1, Fit.FULL),
    ],
)
def test_the_fit_at_the_edge_of_the_context(prompt: int, max_tokens: int, n: int, fit: Fit) -> None:
    assert ledger().fit(prompt, max_tokens, n) is fit


@pytest.mark.parametrize(
    ("prompt", "n", "fit"),
    [
        (90, 1, Fit.FULL),
        (91, 1, Fit.TIGHT),
        (99, 1, Fit.TIGHT),
        (100, 1, Fit.NONE),
        (80, 2, Fit.FULL),
        (81, 2, Fit.TIGHT),
        (98, 2, Fit.TIGHT),
        (99, 2, Fit.NONE),
    ],
)
def test_the_fit_at_the_edge_of_the_pool(prompt: int, n: int, fit: Fit) -> None:
    assert ledger(max_ctx=1000).fit(prompt, 500, n) is fit


def test_the_fit_does_not_depend_on_what_is_taken_now() -> None:
    books = ledger(slots=1)
    reserve(books, 50, 10)
    assert books.fit(50, 10) is Fit.FULL
    assert not books.could_reserve(50, 10)


@pytest.mark.parametrize(("pool", "max_ctx", "room"), [(100, 60, 60), (40, 60, 40), (60, 60, 60)])
def test_the_room_is_the_smaller_of_context_and_pool(pool: int, max_ctx: int, room: int) -> None:
    assert ledger(pool=pool, max_ctx=max_ctx).room == room


# --------------------------------------------------------------------- all or nothing, once


def test_without_a_free_slot_no_cells_are_taken_either() -> None:
    books = ledger(slots=1, pool=1000)
    reserve(books, 10, 10)
    assert books.try_reserve(10, 10) is None
    assert taken(books) == (1, 20)


def test_without_enough_cells_no_slot_is_taken_either() -> None:
    books = ledger(slots=4)
    reserve(books, 50, 10)
    assert books.try_reserve(31, 10) is None
    assert taken(books) == (1, 60)
    reserve(books, 30, 10)  # to the last cell
    assert taken(books) == (2, 100)


def test_several_answers_get_all_their_slots_or_none() -> None:
    books = ledger(slots=3)
    reserve(books, 10, 5, 2)
    assert books.try_reserve(10, 5, 2) is None
    assert taken(books) == (2, 20)


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    books = ledger()
    hold, other = reserve(books, 10, 10), reserve(books, 10, 10)
    books.release(hold)
    with pytest.raises(ValueError, match="twice"):
        books.release(hold)
    assert taken(books) == (1, 20)
    books.release(other)
    assert taken(books) == (0, 0)


def test_a_released_hold_cannot_grow() -> None:
    books = ledger()
    hold = reserve(books, 10, 10)
    books.release(hold)
    with pytest.raises(ValueError, match="released"):
        books.extend(hold, 1)
    assert taken(books) == (0, 0)


# --------------------------------------------------------------------------- the extension


def test_an_extension_is_granted_in_full_while_the_pool_has_it() -> None:
    books = ledger()
    hold = reserve(books, 10, 100)
    assert books.extend(hold, 30) == 30
    assert hold.cells == 50
    assert taken(books) == (1, 50)


def test_an_extension_is_granted_in_part_when_the_pool_runs_low_and_not_at_all_when_it_is_out() -> (
    None
):
    books = ledger()
    hold, other = reserve(books, 50, 10), reserve(books, 25, 10)
    assert books.extend(hold, 30) == 5
    assert books.extend(hold, 30) == 0
    assert books.extend(other, 1) == 0
    assert (hold.cells, other.cells) == (65, 35)
    books.release(other)
    assert books.extend(hold, 30) == 30


def test_an_extension_never_takes_cells_away() -> None:
    books = ledger()
    hold = reserve(books, 50, 10)
    assert books.extend(hold, 0) == 0
    assert books.extend(hold, -5) == 0
    assert taken(books) == (1, 60)


def test_a_release_gives_back_what_extensions_added() -> None:
    books = ledger()
    hold = reserve(books, 50, 10)
    books.extend(hold, 40)
    books.release(hold)
    assert taken(books) == (0, 0)


# ------------------------------------------------------------------------ any order of events


class LedgerMachine(RuleBasedStateMachine):
    """Reserve, extend and release in any order, beside a model that only adds up."""

    holds = Bundle("holds")

    @initialize(
        slots=st.integers(1, 4),
        pool=st.integers(4, 80),
        max_ctx=st.integers(4, 60),
        decode_headroom=st.integers(1, 20),
    )
    def build(self, slots: int, pool: int, max_ctx: int, decode_headroom: int) -> None:
        self.slots, self.pool = slots, pool
        self.books = ledger(
            slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=decode_headroom
        )
        self.living: list[Hold] = []

    @rule(
        target=holds,
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        n=st.integers(1, 4),
    )
    def reserve(self, prompt: int, max_tokens: int, n: int) -> object:
        could = self.books.could_reserve(prompt, max_tokens, n)
        hold = self.books.try_reserve(prompt, max_tokens, n)
        assert could == (hold is not None)
        if hold is None:
            return multiple()
        self.living.append(hold)
        return hold

    @rule(hold=holds, cells=st.integers(0, 100))
    def extend(self, hold: Hold, cells: int) -> None:
        before, free = hold.cells, self.pool - self.books.statistics().committed
        granted = self.books.extend(hold, cells)
        assert granted == min(cells, free)
        assert hold.cells == before + granted

    @rule(hold=consumes(holds))
    def release(self, hold: Hold) -> None:
        self.books.release(hold)
        self.living.remove(hold)
        with pytest.raises(ValueError, match="twice"):
            self.books.release(hold)

    @invariant()
    def never_promises_more_than_there_is(self) -> None:
        if not hasattr(self, "books"):
            return
        reserved, committed = taken(self.books)
        assert reserved == sum(hold.slots for hold in self.living) <= self.slots
        assert committed == sum(hold.cells for hold in self.living) <= self.pool
        assert reserved >= 0
        assert committed >= 0

    def teardown(self) -> None:
        for hold in getattr(self, "living", ()):
            self.books.release(hold)
        if hasattr(self, "books"):
            assert taken(self.books) == (0, 0)


TestAnyOrderOfEvents = LedgerMachine.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_many_threads_at_once_never_overdraw_and_leave_nothing_behind() -> None:
    books = ledger(slots=3, pool=120, max_ctx=60)
    failures: list[BaseException] = []
    start = threading.Barrier(6)

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait(PATIENCE)
            work()
        except BaseException as error:
            failures.append(error)

    def hammer(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(400):
            hold = books.try_reserve(dice.randint(1, 50), dice.randint(1, 50))
            if hold is not None:
                cells = hold.cells
                cells += books.extend(hold, dice.randint(0, 30))
                assert hold.cells == cells
                books.release(hold)

    def watch() -> None:
        for _ in range(2000):
            reserved, committed = taken(books)
            assert 0 <= reserved <= 3
            assert 0 <= committed <= 120

    threads = [
        threading.Thread(target=guarded, args=(lambda seed=seed: hammer(seed),))
        for seed in range(5)
    ] + [threading.Thread(target=guarded, args=(watch,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert taken(books) == (0, 0)
