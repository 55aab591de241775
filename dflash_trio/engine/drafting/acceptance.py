"""How likely a guess is right, by its place in a run of guesses."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = 0.5
"""The chance of a first guess while nothing is known."""


class Acceptance:
    """Chances that guess 1, 2, ... is right, given that those before it were.

    Sums that fade: each run of guesses takes its share off the weight of all before it, so that
    what was seen ``1 / (1 - fading)`` runs ago hardly counts. Where little was seen, what is
    expected instead counts as ``weight`` guesses.
    """

    def __init__(self, places: int, *, fading: float, weight: float) -> None:
        self._fading = fading
        self._weight = weight
        # Faded sums, per place: guesses judged, and those that were right.
        self._judged = [0.0] * places
        self._right = [0.0] * places

    @property
    def evidence(self) -> float:
        """First guesses judged, faded."""
        return self._judged[0]

    def fade(self) -> None:
        """A step has gone by in which there were guesses."""
        fading = self._fading
        self._judged = [value * fading for value in self._judged]
        self._right = [value * fading for value in self._right]

    def add(self, judged: int, right: Sequence[int]) -> None:
        """Count one run: its first ``judged`` guesses had their turn, those at the places ``right``
        were."""
        for place in range(judged):
            self._judged[place] += 1.0
        for place in right:
            self._right[place] += 1.0

    def chances(self, places: int) -> list[float]:
        """Of the first ``places`` guesses. A place where little was seen is taken to be as good as
        all of them together."""
        weight, judged, right = self._weight, self._judged, self._right
        chance = (sum(right) + UNKNOWN) / (sum(judged) + 1.0)
        return [
            (right[place] + weight * chance) / (judged[place] + weight) for place in range(places)
        ]

    def reach(self, expected: Sequence[float]) -> list[float]:
        """Chances that guess 1, 2, ... comes, which takes all those before it. ``expected``: the
        chances of each by itself where little was seen here."""
        weight, reached, found = self._weight, 1.0, []
        for place, chance in enumerate(expected):
            right = self._right[place] + weight * chance
            reached *= right / (self._judged[place] + weight)
            found.append(reached)
        return found


def learn(model: Acceptance, judged: Sequence[tuple[Acceptance, int, Sequence[int]]]) -> None:
    """A step is over: of each sequence with guesses, how many had their turn, and which were right.
    ``model``: what holds for all sequences. Nothing is learned of a step without guesses."""
    if not judged:
        return
    model.fade()
    for sequence, turns, right in judged:
        model.add(turns, right)
        sequence.fade()
        sequence.add(turns, right)


LESS = 0.8
"""Of a guess's chance has the next one in a tree, while nothing is known of it."""


class TreeAcceptance(Acceptance):
    """The same for trees, whose guesses are numbered as they were found: best first. Each has its
    turn in every run, and what is told is the chance that it comes, not one on condition."""

    def chances(self, places: int) -> list[float]:
        weight, expected = self._weight, UNKNOWN
        found: list[float] = []
        for place in range(places):
            right = self._right[place] + weight * expected
            found.append(right / (self._judged[place] + weight))
            expected = LESS * found[-1]
        return found

    def reach(self, expected: Sequence[float]) -> list[float]:
        weight = self._weight
        return [
            (self._right[place] + weight * chance) / (self._judged[place] + weight)
            for place, chance in enumerate(expected)
        ]
