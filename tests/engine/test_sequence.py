"""The lawful transitions of a sequence, all of them, and no others."""

from __future__ import annotations

import itertools

import pytest

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.sequence import LAWFUL, Sequence, SequenceState, UnlawfulTransition
from dflash_trio.generation.request import PreparedPrompt, SamplingParams

QUEUED, PREFILLING, DECODING, RETIRED = SequenceState

# Written out here on its own, so that a change of the table has to be made twice.
ALLOWED = {
    (QUEUED, PREFILLING),
    (QUEUED, RETIRED),
    (PREFILLING, DECODING),
    (PREFILLING, RETIRED),
    (DECODING, RETIRED),
}


def fresh(stop: tuple[str, ...] = ()) -> Sequence:
    prepared = PreparedPrompt((1, 2, 3), 4, SamplingParams(), stop=stop)
    hold = KVLedger(slots=1, pool=16, max_ctx=16, decode_headroom=4).try_reserve(3, 4)
    assert hold is not None
    return Sequence(7, prepared, hold)


def sequence_in(state: SequenceState) -> Sequence:
    sequence = fresh()
    sequence.state = state
    return sequence


@pytest.mark.parametrize(("before", "after"), [*itertools.product(SequenceState, repeat=2)])
def test_exactly_the_lawful_transitions_are_possible(
    before: SequenceState, after: SequenceState
) -> None:
    sequence = sequence_in(before)
    if (before, after) in ALLOWED:
        sequence.enter(after)
        assert sequence.state is after
    else:
        with pytest.raises(UnlawfulTransition, match=f"{before.value} -> {after.value}"):
            sequence.enter(after)
        assert sequence.state is before, "a refused transition changes nothing"


def test_the_table_names_every_state_and_nothing_else() -> None:
    assert set(LAWFUL) == set(SequenceState)
    assert {(a, b) for a, after in LAWFUL.items() for b in after} == ALLOWED


def test_every_state_leads_to_retirement_and_retirement_nowhere() -> None:
    assert LAWFUL[RETIRED] == frozenset()
    assert all(RETIRED in LAWFUL[state] for state in SequenceState if state is not RETIRED)


def test_it_is_born_queued_holding_nothing_of_the_engine() -> None:
    sequence = fresh()
    assert sequence.state is QUEUED
    assert sequence.seq_id is None
    assert sequence.sampler is None
    assert (sequence.computed, sequence.generated) == (0, 0)


def test_its_length_counts_prompt_and_answer() -> None:
    sequence = fresh()
    assert sequence.length == 3
    sequence.generated = 2
    assert sequence.length == 5


def test_each_sequence_matches_its_own_stop_strings() -> None:
    first, second = fresh(("ab",)), fresh(("ab",))
    assert first.stop_matcher.push("a").text == ""
    assert second.stop_matcher.push("b").text == "b"
    assert first.stop_matcher.push("b").matched == "ab"
