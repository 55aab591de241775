"""The lawful transitions of a sequence, all of them, and no others."""

from __future__ import annotations

import itertools

import pytest

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.answer_text import AnswerText
from dflash_trio.engine.scripted_runner import ScriptedVocabulary
from dflash_trio.engine.sequence import LAWFUL, Sequence, SequenceState, UnlawfulTransition
from dflash_trio.generation.request import PreparedPrompt, SamplingParams

QUEUED, PREFILLING, DECODING, PAUSED, RETIRED = SequenceState

# Written out here on its own, so that a change of the table has to be made twice.
ALLOWED = {
    (QUEUED, PREFILLING),
    (QUEUED, DECODING),  # of several answers, all but the first
    (QUEUED, RETIRED),
    (PREFILLING, DECODING),
    (PREFILLING, RETIRED),
    (DECODING, RETIRED),
    (QUEUED, PAUSED),
    (PREFILLING, PAUSED),
    (DECODING, PAUSED),
    (PAUSED, PREFILLING),
    (PAUSED, RETIRED),
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
    sequence.answer += [7, 8]
    assert sequence.length == 5


def test_each_answer_matches_its_own_stop_strings() -> None:
    prepared = fresh(("ab",)).prepared
    first, second = (AnswerText(prepared, index, ScriptedVocabulary()) for index in range(2))
    a, b = b"ab"
    assert [d.text for d in first.push(a, None, closes_for="model")] == [""]
    assert [d.text for d in second.push(b, None, closes_for="model")] == ["b"]
    assert [d.text for d in first.push(b, None, closes_for="model")] == [""]
    assert (first.stop_sequence, second.stop_sequence) == ("ab", None)


def test_what_is_to_be_prefilled_after_a_pause_is_all_but_the_token_that_comes_next() -> None:
    sequence = fresh()
    assert (sequence.to_prefill, sequence.tokens(1, 3)) == (3, (2, 3))
    sequence.answer += [7]
    assert sequence.to_prefill == 3
    sequence.answer += [8, 9]
    assert sequence.to_prefill == 5
    assert sequence.tokens(0, 5) == (1, 2, 3, 7, 8)
    assert sequence.tokens(2, 4) == (3, 7)
    assert sequence.tokens(4, 6) == (8, 9)
