"""Guesses from what was said before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.prompt_lookup import PromptLookup
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.sequence import Sequence as EngineSequence
from dflash_trio.engine.sequence import TokenView
from tests.engine.drafting.scripted_provider import Always
from tests.engine.engine_helpers import prompt


def guess(provider: PromptLookup, text: str | Sequence[int], limit: int = 4, row: int = 0) -> str:
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    (guessed,) = provider.propose([Wanted(row, tokens, limit)])
    return bytes(guessed).decode()


def by_hand(tokens: Sequence[int], limit: int) -> list[int]:
    """The same, looked for from the start each time."""
    for length in (4, 3, 2):
        if len(tokens) <= length:
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[-length:]):
                found = list(tokens)
                while len(found) < len(tokens) + limit:
                    found.append(found[end + len(found) - len(tokens)])
                return found[len(tokens) :]
    return []


def test_what_followed_the_last_tokens_before_is_guessed() -> None:
    assert guess(PromptLookup(), "the cat sat. the cat") == " sat"


def test_nothing_is_guessed_where_nothing_came_before() -> None:
    assert guess(PromptLookup(), "abcdefgh") == ""
    assert guess(PromptLookup(), "a") == ""
    assert guess(PromptLookup(), "ab") == ""


def test_a_longer_match_is_better_than_a_later_one_and_a_later_one_than_an_earlier_one() -> None:
    assert guess(PromptLookup(), "abcdX cdY abcd", 1) == "X"
    assert guess(PromptLookup(), "abcX abcY abc", 1) == "Y"


def test_what_repeats_right_now_goes_on_repeating() -> None:
    assert guess(PromptLookup(), "x: ababab", 5) == "ababa"
    assert guess(PromptLookup(), "aaaa", 3) == "aaa"


def test_the_limit_is_kept_and_the_longest_that_was_said_at_the_start() -> None:
    assert guess(PromptLookup(), "abcdefgh abc", 2) == "de"
    assert guess(PromptLookup(3), "abcdefgh abc", 8) == "def"
    assert PromptLookup(3).longest == 3


@pytest.mark.parametrize(
    ("text", "matched"),
    [("abXcab", 2), ("abcXabc", 3), ("abcdeXabcde", 5), ("abcdefgh", 0), ("ab" * 30, 16)],
)
def test_how_long_a_match_is_is_told_up_to_where_it_makes_no_difference(
    text: str, matched: int
) -> None:
    provider = PromptLookup()
    prompt, answer = text.encode()[:3], text.encode()[3:]
    sequence = SimpleNamespace(prompt=tuple(prompt), answer=list(answer))
    provider.propose([Wanted(0, TokenView(sequence), 4)])  # type: ignore[arg-type]
    assert provider.matched == [matched]


def test_rows_know_nothing_of_each_other() -> None:
    provider = PromptLookup()
    guess(provider, "secret words. secret", row=0)
    assert guess(provider, "new secret", row=1) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda provider: provider.rewind(0, 0),
        lambda provider: provider.rewind(0, 3),
        lambda provider: provider.replaced(0),
        lambda provider: provider.rests(0),
        lambda provider: provider.copy(1, 0, 5),
    ],
    ids=["freed", "cut", "loaded", "at rest", "copied into"],
)
def test_a_row_that_changed_hands_tells_nothing_of_what_it_held(change: object) -> None:
    provider = PromptLookup()
    assert guess(provider, "the secret is 42. the secret is") == " 42."
    change(provider)  # type: ignore[operator]
    assert guess(provider, "a public one; the secret is") == ""


def test_guesses_that_are_taken_back_leave_the_row_as_it_was() -> None:
    provider = PromptLookup()
    text = "one two three. one two"
    assert guess(provider, text) == " thr"
    provider.rewind(0, len(text))
    index = provider._rows[0]
    assert guess(provider, text + " f") == ""
    assert provider._rows[0] is index


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
    st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_looking_through_a_growing_text_bit_by_bit_is_looking_through_all_of_it(
    tokens: list[int], steps: list[int], limit: int
) -> None:
    provider, at = PromptLookup(), 0
    for step in steps:
        at = min(at + step, len(tokens))
        (found,) = provider.propose([Wanted(0, tokens[:at], limit)])
        assert found == by_hand(tokens[:at], limit)


def test_a_token_costs_the_same_however_long_the_text_has_become() -> None:
    """Counted, not timed: how many tokens are read of the sequence."""

    class Counting(list[int]):
        read = 0

        def __getitem__(self, place: object) -> object:  # type: ignore[override]
            found = super().__getitem__(place)  # type: ignore[index]
            Counting.read += len(found) if isinstance(found, list) else 1
            return found

    provider = PromptLookup()
    tokens = Counting(i * 7919 % 50_021 for i in range(20_000))
    provider.propose([Wanted(0, tokens, 4)])
    most = 0
    for token in range(100):
        tokens.append(token + 60_000)
        Counting.read = 0
        provider.propose([Wanted(0, tokens, 4)])
        most = max(most, Counting.read)
    assert most < 40


def test_rows_that_are_kept_for_later_prompts_take_no_memory_of_the_lookup() -> None:
    runner = ScriptedRunner(slots=3, cells=600, shares_cells=False)
    ledger = KVLedger(slots=2, pool=400, max_ctx=200, decode_headroom=24)
    provider = PromptLookup()
    scheduler = Scheduler(
        runner, ledger, chunk=64, prefixes=1, drafter=Drafter(provider, Always(16), verify_limit=63)
    )
    for number in range(3):
        prepared = prompt(f"one two one two {number}", 20)
        hold = ledger.try_reserve(prepared.prompt_tokens, 20)
        assert hold is not None
        scheduler.add(EngineSequence(number, prepared, hold))
        held = False
        while not scheduler.idle:
            scheduler.step()
            held = held or bool(provider._rows)
        assert held
        ledger.release(hold)
    assert scheduler.statistics().prefixes_cached
    assert not provider._rows
