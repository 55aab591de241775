"""Drafts for tests: a provider that guesses what it is told to, and checks what it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dflash_trio.engine.drafting.acceptance import Acceptance
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.draft_tree import Ranking
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.scripted_runner import EOG

Guess = Callable[[Sequence[int], int], Sequence[int]]
"""(all tokens of a sequence, how many are wanted) -> guesses."""


ALPHABET = range(97, 123)


class CheckingProvider:
    """Guesses by a function, and keeps its own account of every row: whatever it is asked for must
    be what it was told before, else a row was changed behind its back.

    A row that was loaded from elsewhere is unknown until it is asked for.
    """

    kind = "scripted"
    caught_up_seconds = 0.0
    steady = False
    looks_at_steps = False
    matched = ()

    def __init__(self, guess: Guess, *, longest: int = 8) -> None:
        self.longest = longest
        self.guess = guess
        self.rows: dict[int, list[int] | None] = {}
        self.asked: list[list[Wanted]] = []
        self.observed = 0
        self.closed = False
        self.aborted = False
        self.rested: list[int] = []

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.asked.append(list(wanted))
        guesses = []
        for item in wanted:
            assert 1 <= item.limit <= self.longest
            tokens = list(item.tokens)
            assert len(tokens) == len(item.tokens)
            known = self.rows.get(item.row, [])
            if known is None:
                self.rows[item.row] = tokens[:-1]
            else:
                assert known == tokens[:-1], f"row {item.row} was changed behind the draft's back"
            guesses.append(list(self.guess(tokens, item.limit))[: item.limit])
        return guesses

    def rank(self, wanted: Sequence[Wanted]) -> list[Ranking | None]:
        """What is guessed, at a random rank among other tokens of random chances."""
        rankings: list[Ranking | None] = []
        for item, guess in zip(wanted, self.propose(wanted), strict=True):
            dice = random.Random(len(item.tokens) + item.row)
            assert item.nodes > 0
            places = [dice.sample([token, EOG, *ALPHABET], 6) for token in guess]
            for token, tokens in zip(guess, places, strict=True):
                tokens[dice.randrange(min(3, len(tokens)))] = token
            unique = [list(dict.fromkeys(tokens)) for tokens in places]
            chances = [[sorted((-dice.random() * 3 for _ in ts), reverse=True)] for ts in unique]
            rankings.append(Ranking(unique, chances) if guess else None)
        return rankings

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        for item, stays in zip(batch, kept, strict=True):
            assert 0 <= stays <= len(item.tokens)
        self.observe_trees(batch, [range(stays) for stays in kept])

    def observe_trees(self, batch: Sequence[BatchSlice], paths: Sequence[Sequence[int]]) -> None:
        assert len(batch) == len(paths)
        self.observed += 1
        for item, path in zip(batch, paths, strict=True):
            row = self.rows.setdefault(item.seq_id, [])
            if row is not None:
                assert len(row) == item.position
                row += [item.tokens[place] for place in path]

    def rewind(self, row: int, length: int) -> None:
        if length == 0:
            self.rows[row] = []
            return
        known = self.rows.setdefault(row, [])
        if known is not None:
            assert length <= len(known), f"row {row} holds less than it is rewound to"
            del known[length:]

    def copy(self, source: int, target: int, length: int) -> None:
        assert not self.rows.get(target), f"row {target} was not empty"
        known = self.rows.setdefault(source, [])
        if known is None:
            self.rows[target] = None
        else:
            assert length <= len(known)
            self.rows[target] = known[:length]

    def replaced(self, row: int) -> None:
        self.rows[row] = None

    def nap(self, *, asleep: bool) -> None:
        """Nothing comes of it."""

    def rests(self, row: int) -> None:
        self.rested.append(row)

    def abort(self) -> None:
        self.aborted = True

    def rearm(self) -> None:
        self.aborted = False

    def close(self) -> None:
        self.closed = True


class Always(DraftController):
    """Guesses as many as there are, whatever it costs."""

    def __init__(self, longest: int = 8) -> None:
        super().__init__(longest, verify_limit=10_000, partitioned=False)

    def choose(self, sequences: Sequence[Acceptance]) -> int:
        return self._longest

    def trim(self, lengths: Sequence[int], sequences: Sequence[Acceptance]) -> int:
        return max(lengths)
