"""How likely a guess from earlier text is right, by how much of that text has matched so far."""

from __future__ import annotations

from collections.abc import Sequence

_STEPS = (3, 4, 7, 16)
"""Matched tokens from which guesses are counted apart: two, three, four to six, and so on."""
MOST_TOLD_APART = _STEPS[-1]
"""Longer matches than this are as good."""
_RANKS = len(_STEPS) + 1
_RANK = [sum(length >= step for step in _STEPS) for length in range(MOST_TOLD_APART + 1)]
EXPECTED = (0.5, 0.6, 0.75, 0.85, 0.92)
"""Chances while nothing is known, somewhat lower than they mostly are."""


def rank(matched: int) -> int:
    """How sure what follows a match of so many tokens is: 0 and up."""
    return _RANK[matched] if matched < MOST_TOLD_APART else _RANKS - 1


class MatchChances:
    """Chances that the next guess is right, for each rank.

    Guesses of one match are taken one after the other: where the first came, what has matched is
    longer by one for the second. Sums that fade, each with what is counted in it; where little was
    counted, what is expected instead weighs ``weight`` guesses.
    """

    def __init__(self, *, fading: float, weight: float) -> None:
        self._fading = fading
        self._weight = weight
        self._judged = [0.0] * _RANKS
        self._right = [0.0] * _RANKS

    def add(self, matched: int, judged: int, right: int) -> None:
        """Of guesses that follow a match of ``matched`` tokens, the first ``judged`` had their
        turn, and ``right`` of them came."""
        for place in range(judged):
            kind = rank(matched + place)
            self._judged[kind] = self._judged[kind] * self._fading + 1.0
            self._right[kind] = self._right[kind] * self._fading + (place < right)

    def chances(self, expected: Sequence[float]) -> list[float]:
        """By rank. ``expected``: the same, where nothing was seen here."""
        weight = self._weight
        return [
            (right + weight * chance) / (judged + weight)
            for right, judged, chance in zip(self._right, self._judged, expected, strict=True)
        ]

    def reach(self, expected: Sequence[float], matched: int, guesses: int) -> list[float]:
        """Chances that guess 1, 2, ... comes, which takes all those before it."""
        chances = self.chances(expected)
        reached, found = 1.0, []
        for place in range(guesses):
            reached *= chances[rank(matched + place)]
            found.append(reached)
        return found
