"""A draft that sleeps and wakes at any moment changes nothing, and guesses by what is true."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine.drafting.naps import Naps
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from tests.engine.drafting.drafted import Engine, Told, at_random, crowd_of, right
from tests.engine.drafting.scripted_provider import CheckingProvider
from tests.engine.drafting.test_drafted_answers import CASES
from tests.engine.engine_helpers import prompt


class AtRandom:
    """Stands for ``Naps``: falls asleep and wakes in a third of the steps."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.asleep = False
        self.flips = 0

    def step(self, *_: object, **__: object) -> None:
        if self._dice.random() < 0.3:
            self.asleep = not self.asleep
            self.flips += 1

    @property
    def untold(self) -> int:
        return self._dice.choice((0, 0, 1, 3))

    def begins(self) -> None:
        if self.asleep:
            self.step()


class Forgetful(CheckingProvider):
    """Knows of each row the tokens that it was told of without a gap, and only guesses where these
    go up to the last one. They have to be the sequence's."""

    steady = False
    looks_at_steps = True

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.known: dict[int, tuple[int, list[int]]] = {}
        self.asleep = False
        self.answered = 0

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        assert not self.asleep
        guesses: list[list[int]] = []
        for item in wanted:
            tokens = list(item.tokens)
            begin, known = self.known.get(item.row, (0, []))
            if not known or begin + len(known) != len(tokens) - 1:
                guesses.append([])
                continue
            assert tokens[begin:-1] == known, f"row {item.row} was changed behind the draft's back"
            self.answered += 1
            guesses.append(list(self.guess(tokens, item.limit))[: item.limit])
        return guesses

    def observe_trees(self, batch: Sequence[BatchSlice], paths: Sequence[Sequence[int]]) -> None:
        assert not self.asleep
        for item, path in zip(batch, paths, strict=True):
            begin, known = self.known.get(item.seq_id, (0, []))
            if begin + len(known) != item.position:
                begin, known = item.position, []
            if path:
                self.known[item.seq_id] = begin, [*known, *(item.tokens[at] for at in path)]

    def rewind(self, row: int, length: int) -> None:
        begin, known = self.known.get(row, (0, []))
        if begin + len(known) > length:
            self.known[row] = begin, known[: max(0, length - begin)]

    def copy(self, source: int, target: int, length: int) -> None:
        begin, known = self.known.get(source, (0, []))
        reaches = begin < length <= begin + len(known)
        self.known[target] = (begin, known[: length - begin]) if reaches else (0, [])

    def replaced(self, row: int) -> None:
        self.known[row] = 0, []

    def nap(self, *, asleep: bool) -> None:
        assert asleep is not self.asleep
        self.asleep = asleep


def napping(seed: int, said: Sequence[tuple[int, ...]], **more: Any) -> Engine:
    engine = Engine(at_random(right(said), seed), drafting=Forgetful, **more)
    drafter = engine.scheduler._drafter
    assert drafter is not None
    drafter._naps = cast(Naps, AtRandom(seed))
    return engine


def napped(engine: Engine) -> tuple[int, int]:
    """How often it fell asleep or woke, and guesses that were asked for and known."""
    assert isinstance(engine.provider, Forgetful)
    assert engine.scheduler._drafter is not None
    return cast(AtRandom, engine.scheduler._drafter._naps).flips, engine.provider.answered


def same(told: dict[tuple[int, int], Told], expected: dict[tuple[int, int], Told]) -> bool:
    """But for who had to end for want of cells."""
    for key, ours in told.items():
        theirs = expected[key]
        if "no_free_cells" in (ours.finished.detail, theirs.finished.detail):
            continue
        if (ours.text, ours.finished.reason) != (theirs.text, theirs.finished.reason):
            return False
    return True


@pytest.mark.parametrize("tree", [None, 6])
@pytest.mark.parametrize("name", CASES)
def test_what_is_told_does_not_depend_on_naps(name: str, tree: int | None) -> None:
    requests, changes = CASES[name]
    plain = Engine(**changes)
    expected = plain.run(*requests)
    # A cache of cells of their own takes no trees.
    more = {} if tree is None or changes.get("shares_cells") is False else {"tree": tree}
    for seed in range(4):
        engine = napping(seed, plain.said, **changes, **more)
        assert engine.run(*requests) == expected


def test_the_cases_are_napped_through_and_guessed_for() -> None:
    flips = answered = 0
    for requests, changes in CASES.values():
        plain = Engine(**changes)
        plain.run(*requests)
        engine = napping(1, plain.said, **changes)
        engine.run(*requests)
        more_flips, more_answered = napped(engine)
        flips, answered = flips + more_flips, answered + more_answered
    assert flips > 50
    assert answered > 50


@given(
    texts=st.lists(st.text("abc>", min_size=1, max_size=20), min_size=1, max_size=5),
    tokens=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    temperatures=st.lists(st.sampled_from([0.0, 0.9]), min_size=5, max_size=5),
    answers=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    pool=st.integers(90, 240),
    headroom=st.integers(1, 20),
    prefixes=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(2, 30)),
    tree=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_naps_at_any_pressure_change_nothing(
    texts: list[str],
    tokens: list[int],
    temperatures: list[float],
    answers: list[int],
    pool: int,
    headroom: int,
    prefixes: int,
    window: int | None,
    tree: int | None,
    seed: int,
) -> None:
    requests = crowd_of(texts, tokens, temperatures, answers)
    crowd: dict[str, Any] = {
        "slots": 4,
        "max_ctx": 70,
        "pool": pool,
        "headroom": headroom,
        "prefixes": prefixes,
        "window": window,
        "chunk": 9,
    }
    plain = Engine(**crowd)
    expected = plain.run(*requests)
    engine = napping(seed, plain.said, tree=tree, **crowd)
    assert same(engine.run(*requests), expected)


@pytest.mark.parametrize("tree", [None, 6])
def test_whoever_leaves_while_a_draft_naps_takes_nothing_of_the_others(tree: int | None) -> None:
    requests = [attrs.evolve(prompt("abc>" * n, 30, ignore_eos=True), n=n) for n in (1, 2, 1, 3, 1)]
    plain = Engine(slots=4, pool=200, prefixes=2)
    expected = plain.run(*requests)
    for seed in range(30):
        dice = random.Random(seed)
        engine = napping(seed, plain.said, slots=4, pool=200, prefixes=2, tree=tree)
        waiting = list(requests)
        while waiting or not engine.scheduler.idle:
            while waiting and engine.try_add(waiting[0]) is not None:
                waiting.pop(0)
            if engine.holds and dice.random() < 0.05:
                engine.scheduler.cancel(dice.choice(list(engine.holds)))
            engine.step()
        engine.check_empty()
        for key, told in engine.told.items():
            whole = expected[key].text
            assert whole.startswith(told.text)
            assert told.finished.reason == "cancelled" or told.text == whole
