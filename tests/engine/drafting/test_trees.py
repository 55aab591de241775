"""Whatever trees are guessed, what is told is what would be told without drafts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.drafting.acceptance import TreeAcceptance
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.scripted_runner import VOCAB_SIZE, ScriptedRunner
from dflash_trio.engine.token_tree import paths_of
from dflash_trio.generation.request import SamplingParams
from tests.engine.drafting.drafted import Engine, at_random, crowd_of, right, wrong_at
from tests.engine.drafting.scripted_provider import Always
from tests.engine.drafting.test_drafted_answers import CASES, drafts
from tests.engine.engine_helpers import prompt

# A cache of cells of their own takes no trees.
SHARED = [name for name in CASES if name != "cells of their own"]


@pytest.mark.parametrize("budget", [1, 4, 16])
@pytest.mark.parametrize("name", SHARED)
def test_what_is_told_does_not_depend_on_the_trees_that_are_guessed(name: str, budget: int) -> None:
    requests, changes = CASES[name]
    plain = Engine(**changes)
    expected = plain.run(*requests)
    for kind, guess in drafts(plain.said).items():
        engine = Engine(guess, tree=budget, **changes)
        assert engine.run(*requests) == expected, kind
        assert engine.provider is not None
        assert engine.provider.observed == engine.scheduler.statistics().steps
        assert engine.runner.paths_held == 0


@pytest.mark.parametrize("name", SHARED)
def test_trees_with_the_right_token_in_them_save_steps(name: str) -> None:
    requests, changes = CASES[name]
    plain = Engine(**changes)
    plain.run(*requests)
    engine = Engine(right(plain.said), tree=16, **changes)
    engine.run(*requests)
    few = plain.scheduler.statistics().completion_tokens < 4
    # Of few cells promised ahead, a tree has no room for the right token beside others.
    if few or name in ("one cell at a time", "paused and resumed"):
        assert len(engine.batches) <= len(plain.batches)
    else:
        assert len(engine.batches) < len(plain.batches)
        assert any(item.parents is not None for batch in engine.batches for item in batch)


@given(
    texts=st.lists(st.text("abc>", min_size=1, max_size=20), min_size=1, max_size=5),
    tokens=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    heats=st.lists(st.sampled_from([0.0, 0.9]), min_size=5, max_size=5),
    answers=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    pool=st.integers(90, 240),
    headroom=st.integers(1, 20),
    prefixes=st.integers(0, 3),
    budget=st.integers(1, 12),
    paths=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_any_trees_at_any_pressure_change_nothing_and_leave_nothing(
    texts: list[str],
    tokens: list[int],
    heats: list[float],
    answers: list[int],
    pool: int,
    headroom: int,
    prefixes: int,
    budget: int,
    paths: int,
    seed: int,
) -> None:
    requests = crowd_of(texts, tokens, heats, answers)
    changes: dict[str, Any] = {
        "slots": 4,
        "max_ctx": 70,
        "pool": pool,
        "headroom": headroom,
        "prefixes": prefixes,
        "chunk": 9,
    }
    plain = Engine(**changes)
    expected = plain.run(*requests)
    engine = Engine(at_random(right(plain.said), seed), tree=budget, paths=paths, **changes)
    told = engine.run(*requests)
    for key, theirs in expected.items():
        ours = told[key]
        if "no_free_cells" in (ours.finished.detail, theirs.finished.detail):
            # As with chains: the draft decides who of several answers is how far then.
            shorter, longer = sorted((ours.text, theirs.text), key=len)
            assert longer.startswith(shorter)
            assert requests[key[0] - 1].n > 1
        else:
            assert ours.text == theirs.text
            assert ours.finished.reason == theirs.finished.reason


def test_sampled_tokens_have_the_models_own_distribution_in_a_tree() -> None:
    """Over many seeds the tokens at each place come as often as the model's chances say, whether
    they stand in the tree or not."""
    heat = 0.6
    likeliest = Engine()
    likeliest.run(prompt("dice", 6))
    greedy = likeliest.said[0]
    drawn = {place: Counter[int]() for place in (5, 6)}
    for seed in range(600):
        engine = Engine(right([greedy]), tree=12)
        engine.run(prompt("dice", 6, sampling=SamplingParams(temperature=heat, seed=seed)))
        assert any(item.parents is not None for batch in engine.batches for item in batch)
        for place, counter in drawn.items():
            if engine.said[0][:place] == greedy[:place]:
                counter[engine.said[0][place]] += 1
    for place, counter in drawn.items():
        model = ScriptedRunner()
        model.decode([BatchSlice(0, 0, greedy[:place], 1)])
        weights = [math.exp(logit / heat) for logit in model.logits(0)]
        number = counter.total()
        assert number > 200
        expected = [number * weight / sum(weights) for weight in weights]
        likely = [token for token in range(VOCAB_SIZE) if expected[token] > 5]
        rest = number - sum(expected[token] for token in likely)
        squares = [(counter[token] - expected[token]) ** 2 / expected[token] for token in likely]
        squares.append((number - sum(counter[token] for token in likely) - rest) ** 2 / rest)
        assert sum(squares) < 24


# ------------------------------------------------------------------------ between the steps


def test_a_client_that_leaves_during_a_tree_leaves_nothing_and_disturbs_nobody() -> None:
    requests = [prompt("stays", 40), prompt("leaves", 40)]
    plain = Engine()
    expected = plain.run(*requests)
    engine = Engine(wrong_at(right(plain.said), 3), tree=8)
    stays, leaves = map(engine.add, requests)
    while len(engine.told[leaves, 0].text) < 10:
        engine.step()
    engine.scheduler.cancel(leaves)
    while not engine.scheduler.idle:
        engine.step()
    engine.listen()
    engine.check_empty()
    assert engine.told[stays, 0] == expected[1, 0]
    assert expected[2, 0].text.startswith(engine.told[leaves, 0].text)


def test_a_tree_that_was_aborted_has_told_and_kept_nothing() -> None:
    engine = Engine(lambda tokens, limit: [7] * limit, tree=8)
    generation_id = engine.add(prompt("abc", 30))
    for _ in range(4):
        engine.step()
    before = list(engine.told[generation_id, 0].deltas)
    engine.before_decode = engine.runner.abort
    engine.step()
    assert engine.batches[-1][0].parents is not None
    assert engine.told[generation_id, 0].deltas == before
    engine.scheduler.cancel(generation_id)
    engine.listen()
    engine.check_empty()


def test_trees_stay_within_promised_cells_max_tokens_the_context_and_the_ids() -> None:
    engine = Engine(
        lambda tokens, limit: [7] * limit, max_ctx=40, headroom=9, slots=2, tree=16, paths=5
    )
    engine.add(prompt("abcde", 20))
    engine.add(prompt("abcdefgh", 100))

    def check() -> None:
        leaves = 0
        for item in engine.batches[-1]:
            if item.parents is not None:
                leaves += len(paths_of(item.parents)[0]) - 1
            hold = next(
                s.hold for s in engine.scheduler._sequences.values() if s.seq_id == item.seq_id
            )
            assert item.position + len(item.tokens) <= hold.cells
        assert leaves <= 5

    engine.before_decode = check
    while not engine.scheduler.idle:
        engine.step()
        assert engine.runner.cells_used <= engine.ledger.pool
    engine.listen()
    engine.check_empty()
    assert any(item.parents is not None for batch in engine.batches for item in batch)


def test_usage_counts_all_guesses_of_a_tree() -> None:
    plain = Engine()
    plain.run(prompt("count", 20))
    engine = Engine(right(plain.said), tree=6)
    engine.run(prompt("count", 20))
    proposed = sum(item.outputs - 1 for batch in engine.batches for item in batch if item.outputs)
    accepted, rejected = engine.usage[1, 0]
    assert accepted
    assert rejected
    assert accepted + rejected == proposed
    drafts_ = engine.scheduler.statistics().drafts
    assert drafts_ is not None
    assert (drafts_.proposed, drafts_.accepted, drafts_.tree_budget) == (proposed, accepted, 6)


def test_an_answer_that_ends_within_a_tree_teaches_nothing_of_it() -> None:
    plain = Engine()
    plain.run(prompt("count", 20))
    judged: list[tuple[int, tuple[int, ...]]] = []

    class Listening(Always):
        def observe(self, lengths: Any, each: Any, **figures: Any) -> None:
            judged.extend((turns, tuple(came)) for _, turns, came in each)
            super().observe(lengths, each, **figures)

    engine = Engine(right(plain.said), tree=6, controller=Listening(6))
    engine.run(*[prompt("count", length) for length in range(2, 20)])
    assert any(came for _, came in judged)
    assert not [came for turns, came in judged if came and max(came) >= turns]


# -------------------------------------------------------------------------------- how large


class Model:
    """A device whose steps take ``base`` and ``each`` for a token, and a draft of whose best-first
    trees guess 1, 2, ... comes with ``chances``, each only if those before it did not or did, as
    it falls: only how often counts here."""

    def __init__(self, chances: list[float], *, base: float, each: float, asking: float) -> None:
        self.chances = chances
        self.base, self.each, self.asking = base, each, asking

    def run(self, steps: int) -> tuple[float, Counter[int]]:
        """How many times as fast as plain steps, and the sizes that were tried."""
        controller = DraftController(
            len(self.chances), verify_limit=256, partitioned=False, acceptance=TreeAcceptance
        )
        known = controller.new_acceptance()
        debts = [0.0] * len(self.chances)
        sizes = Counter[int]()
        seconds = tokens = 0.0
        for _ in range(steps):
            nodes = controller.choose([known])
            if nodes:
                nodes = controller.trim([nodes], [known])
            came = []
            for place in range(nodes):
                debts[place] += self.chances[place]
                if debts[place] >= 1:
                    debts[place] -= 1
                    came.append(place)
            step = self.base + self.each * (1 + nodes)
            draft = self.asking if nodes else 0.0
            controller.observe(
                [1 + nodes],
                [(known, nodes, came)] if nodes else [],
                committed=1 + len(came),
                asked=nodes,
                draft_seconds=draft,
                step_seconds=step,
            )
            sizes[nodes] += 1
            seconds += step + draft
            tokens += 1 + len(came)
        return tokens / seconds * (self.base + self.each), sizes


LIKELY = [0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.09, 0.07, 0.05, 0.035, 0.025, 0.018, 0.01, 0.01]


def test_trees_grow_as_long_as_another_guess_pays() -> None:
    faster, sizes = Model(LIKELY, base=0.010, each=0.0001, asking=0.001).run(2000)
    assert faster > 2.2
    (most, _), *_ = sizes.most_common(1)
    assert 7 <= most <= 11  # the tenth comes with one in thirty, and costs one in a hundred
    faster, sizes = Model(LIKELY, base=0.010, each=0.002, asking=0.001).run(2000)
    assert faster > 1.25
    (most, _), *_ = sizes.most_common(1)
    assert 2 <= most <= 6


def test_where_trees_do_not_pay_there_are_next_to_none() -> None:
    faster, sizes = Model([0.2, 0.1, 0.05, 0.02], base=0.004, each=0.004, asking=0.004).run(2000)
    assert faster > 0.985
    assert sizes[0] > 1900
