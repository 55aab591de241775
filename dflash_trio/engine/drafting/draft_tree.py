"""Trees of guesses: several tokens for the same place, each with what may follow it. Pure.

A draft ranks tokens at each place of its block. Of all trees with so many tokens, the best is the
one whose tokens are the likeliest to come, each by the product of the chances on its way from the
root. It is grown best-first: the likeliest token that is not in the tree comes next, and brings up
what may follow it and the next best in its own place.

Theory of operation of sizes: a larger tree begins with the smaller ones, token by token. So cutting
one short leaves the best of that size, and how often its first, second, ... token came tells what
a tree of any size is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from attrs import frozen


@frozen
class Ranking:
    """What a draft thinks of the tokens that may follow."""

    tokens: Sequence[Sequence[int]]
    """At each place, the candidates."""
    logprobs: Sequence[Sequence[Sequence[float]]]
    """At each place, the candidates' logarithmic chances: for each candidate of the place before,
    should it have come, or once for all of them."""


@frozen
class DraftTree:
    """Guesses in the order in which they were found: each comes after what it follows."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each: the number of the guess that it follows, from 1; 0: the sequence's last token."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> DraftTree:
        """The best tree of no more than so many tokens."""
        if count >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:count], self.parents[:count])


NOTHING = DraftTree((), ())


def grow(ranking: Ranking, *, nodes: int, depth: int, branches: int) -> DraftTree:
    """The best tree of at most ``nodes`` tokens, none deeper than ``depth`` places.

    ``branches``: leaves beside the first one. With none left it only grows where it ends. Of equal
    chances, what was brought up first comes first.
    """
    depth = min(depth, len(ranking.tokens))
    orders: dict[tuple[int, int], list[int]] = {}
    # What may come next: its chance on the whole way (negative), when it was brought up, the number
    # of the guess that it follows, that one's chance, its place, the rank of its predecessor, and
    # how many at its place are better.
    waiting: list[tuple[float, int, int, float, int, int, int]] = []
    brought = 0

    def bring(parent: int, chance: float, place: int, before: int, nth: int) -> None:
        nonlocal brought
        if place >= depth:
            return
        table = ranking.logprobs[place]
        row = table[before if len(table) > 1 else 0]
        key = place, before if len(table) > 1 else 0
        if key not in orders:
            orders[key] = sorted(range(len(row)), key=lambda rank: -row[rank])
        if nth < len(row):
            brought += 1
            whole = chance + row[orders[key][nth]]
            heappush(waiting, (-whole, brought, parent, chance, place, before, nth))

    tokens: list[int] = []
    parents: list[int] = []
    followed: set[int] = set()
    bring(0, 0.0, 0, 0, 0)
    while waiting and len(tokens) < nodes:
        whole, _, parent, chance, place, before, nth = heappop(waiting)
        if parent in followed:
            if not branches:
                continue
            branches -= 1
        followed.add(parent)
        table = ranking.logprobs[place]
        rank = orders[place, before if len(table) > 1 else 0][nth]
        tokens.append(ranking.tokens[place][rank])
        parents.append(parent)
        bring(len(tokens), -whole, place + 1, rank, 0)
        bring(parent, chance, place, before, nth + 1)
    return DraftTree(tuple(tokens), tuple(parents))
