"""Trees of guesses: the likeliest tokens first, each by all the chances on its way."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.engine.drafting.draft_tree import DraftTree, Ranking, grow
from dflash_trio.engine.llama_top_tokens import top_tokens
from dflash_trio.engine.token_tree import paths_of


def ranking(*chances: list[float]) -> Ranking:
    """Tokens 10, 11, ... at the first place, 20, 21, ... at the second."""
    return Ranking(
        [[10 * place + nth for nth in range(len(row))] for place, row in enumerate(chances, 1)],
        [[[math.log(chance) for chance in row]] for row in chances],
    )


def words(tree: DraftTree) -> list[tuple[int, ...]]:
    """The way to each guess."""
    ways: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        ways.append((*ways[parent], token))
    return ways[1:]


TWO = ranking([0.6, 0.3], [0.7, 0.2])


def test_the_likeliest_guess_comes_first_by_the_product_of_the_chances() -> None:
    tree = grow(TWO, nodes=6, depth=2, branches=9)
    # 0.6, 0.42, 0.3, 0.21, 0.12, 0.06
    assert words(tree) == [(10,), (10, 20), (11,), (11, 20), (10, 21), (11, 21)]
    assert tree.parents == (0, 1, 0, 3, 1, 3)


@pytest.mark.parametrize("nodes", range(1, 8))
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(nodes: int) -> None:
    whole = grow(TWO, nodes=6, depth=2, branches=9)
    assert grow(TWO, nodes=nodes, depth=2, branches=9) == whole.first(nodes)
    assert len(whole.first(nodes)) == min(nodes, 6)


def test_no_guess_is_deeper_than_it_may_be() -> None:
    assert words(grow(TWO, nodes=6, depth=1, branches=9)) == [(10,), (11,)]
    assert len(grow(TWO, nodes=6, depth=0, branches=9)) == 0


def test_of_equal_chances_what_goes_on_comes_before_what_stands_beside() -> None:
    even = ranking([0.5, 0.5], [1.0], [1.0])
    tree = grow(even, nodes=6, depth=3, branches=9)
    assert words(tree) == [(10,), (10, 20), (11,), (10, 20, 30), (11, 20), (11, 20, 30)]
    assert tree == grow(even, nodes=6, depth=3, branches=9)
    sure = ranking([1.0], [1.0], [1.0])
    assert words(grow(sure, nodes=3, depth=3, branches=0)) == [(10,), (10, 20), (10, 20, 30)]


@pytest.mark.parametrize("branches", range(4))
def test_a_tree_has_no_more_leaves_than_it_may_have(branches: int) -> None:
    tree = grow(TWO, nodes=6, depth=2, branches=branches)
    assert len(paths_of((-1, *tree.parents))[0]) == min(4, 1 + branches)
    assert words(tree)[:2] == [(10,), (10, 20)]


def test_chances_may_depend_on_the_guess_before() -> None:
    lattice = Ranking(
        [[1, 2], [3, 4]],
        [[[math.log(0.6), math.log(0.4)]], [[math.log(0.5)] * 2, [math.log(0.1), math.log(0.9)]]],
    )
    tree = grow(lattice, nodes=4, depth=2, branches=9)
    # 0.6, 0.4, 0.36 by the second, 0.3
    assert words(tree) == [(1,), (2,), (2, 4), (1, 3)]


@given(seed=st.integers(0, 1 << 30), nodes=st.integers(1, 12))
def test_no_other_tree_of_that_size_is_better(seed: int, nodes: int) -> None:
    dice = random.Random(seed)
    rows = [sorted((dice.random() for _ in range(3)), reverse=True) for _ in range(3)]
    known = ranking(*rows)
    worth = {}
    for depth in (1, 2, 3):
        for ranks in itertools.product(range(3), repeat=depth):
            way = tuple(10 * place + rank for place, rank in enumerate(ranks, 1))
            worth[way] = math.prod(rows[place][rank] for place, rank in enumerate(ranks))
    best = sum(sorted(worth.values(), reverse=True)[:nodes])
    tree = grow(known, nodes=nodes, depth=3, branches=99)
    assert sum(worth[way] for way in words(tree)) == pytest.approx(best)


# ------------------------------------------------------------------------------- top tokens


@pytest.mark.parametrize("size", [5, 64, 700, 3000, 49152])
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("spread", [0.01, 1.0, 2.5])
def test_the_top_tokens_are_those_that_sorting_finds(count: int, spread: float, size: int) -> None:
    rows = np.random.default_rng(count).normal(0, spread, (3, size)).astype(np.float32)
    # The first tokens of a vocabulary are the frequent ones.
    rows[1, : size // 10] += 2 * spread
    for row, (tokens, chances) in zip(rows, top_tokens(rows, count), strict=True):
        assert tokens == np.argsort(-row, kind="stable")[:count].tolist()
        exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert np.abs(np.array(chances) - exact[tokens]).max() < 0.1


@pytest.mark.parametrize("size", [3, 100, 5000])
def test_of_equal_logits_the_smaller_token_comes_first_and_few_are_few(size: int) -> None:
    rows = np.full((2, size), -50.0, dtype=np.float32)
    rows[0, [size // 2, 0]] = 1.0
    rows[1, size - 1] = 1.0
    first, second = top_tokens(rows, 8)
    assert first == ([0, size // 2], [pytest.approx(math.log(0.5))] * 2)
    assert second == ([size - 1], [pytest.approx(0.0)])
    (equal,) = top_tokens(np.zeros((1, size), dtype=np.float32), 8)
    assert equal[0] == list(range(size))[:8]
    assert equal[1] == pytest.approx([-math.log(size)] * min(8, size))
