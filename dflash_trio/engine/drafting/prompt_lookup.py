"""Guesses without a model: what followed the last few tokens when they came before.

Answers repeat their prompts: code that is changed here and there, quotations, names, lists. Costs
some microseconds of Python a sequence and step, which only a small model on a fast device feels.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from ..model_runner import BatchSlice
from .match_chances import MOST_TOLD_APART
from .provider import Wanted

KIND = "prompt-lookup"
LONGEST = 16
"""Tokens that are guessed in one go, unless said otherwise."""
_GRAMS = (4, 3, 2)
"""Tokens that have to be the same as before; the longest match is taken, of those the latest."""
_REMEMBERED = 1 << 16
"""Tokens that are looked through when a sequence is met for the first time, the latest: what a
hundred milliseconds allow."""


@define(eq=False)
class _Index:
    """Where in one sequence each run of tokens ended last."""

    indexed: int = 0
    """Tokens of the sequence that are looked through. The last one of all never is: it would find
    itself."""
    places: dict[int, dict[tuple[int, ...], int]] = field(
        factory=lambda: {length: {} for length in _GRAMS}
    )
    """By the length of a run: run -> the position behind its last token."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Look through what is new in ``tokens``; what was known of them has not changed."""
        end = len(tokens) - 1
        if end <= self.indexed:
            return
        begin = max(self.indexed, end - _REMEMBERED)
        for length, places in self.places.items():
            first = max(0, begin - length + 1)
            window = tokens[first:end]
            # At once, where there is much: a prompt's tokens cost a tenth of a microsecond each.
            runs = zip(*(window[place:] for place in range(length)), strict=False)
            places.update(zip(runs, range(first + length, end + 1), strict=False))
        self.indexed = end

    def after(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The position behind the latest of the longest matches with the end of ``tokens``, and how
        many tokens at least are the same there; 0 of them: there is none."""
        for length, places in self.places.items():
            if len(tokens) > length:
                found = places.get(tuple(tokens[-length:]))
                if found is not None:
                    return found, length
        return 0, 0


def _same_before(tokens: Sequence[int], place: int) -> int:
    """How many tokens before position ``place`` are those at the end, up to MOST_TOLD_APART."""
    most = min(place, MOST_TOLD_APART)
    theirs, ours = tuple(tokens[place - most : place]), tuple(tokens[-most:])
    if theirs == ours:
        return most
    pairs = zip(reversed(theirs), reversed(ours), strict=True)
    return next(count for count, (one, other) in enumerate(pairs) if one != other)


class PromptLookup:
    """A provider; see ``provider.DraftProvider``. ``longest``: tokens in one go."""

    kind = KIND
    caught_up_seconds = 0.0
    steady = False
    looks_at_steps = True

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        # By row. A row whose tokens may have changed has none, and is looked through again.
        self._rows: dict[int, _Index] = {}
        self.matched: list[int] = []
        """See ``provider.DraftProvider``."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.matched = []
        return [self._guess(item) for item in wanted]

    def _guess(self, wanted: Wanted) -> list[int]:
        tokens = wanted.tokens
        index = self._rows.get(wanted.row)
        if index is None:
            index = self._rows[wanted.row] = _Index()
        index.extend(tokens)
        place, matched = index.after(tokens)
        if matched == _GRAMS[0]:
            matched = _same_before(tokens, place)
        self.matched.append(matched)
        if not matched:
            return []
        limit = min(wanted.limit, self.longest)
        guess = list(tokens[place : place + limit])
        # What repeats right now goes on repeating.
        period = len(tokens) - place
        while len(guess) < limit:
            guess += guess[-period:][: limit - len(guess)]
        return guess

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        pass  # all that it needs to know comes with the next question

    def rewind(self, row: int, length: int) -> None:
        index = self._rows.get(row)
        if index is not None and length < index.indexed:
            del self._rows[row]

    def copy(self, source: int, target: int, length: int) -> None:
        self._rows.pop(target, None)

    def replaced(self, row: int) -> None:
        self._rows.pop(row, None)

    def nap(self, *, asleep: bool) -> None:
        """Nothing: what it missed it finds in the next question."""

    def rests(self, row: int) -> None:
        # Half a kilobyte a token: a later sequence is looked through again, which takes less than
        # a microsecond each.
        self._rows.pop(row, None)

    def abort(self) -> None:
        """Nothing: it is done in a moment."""

    def rearm(self) -> None:
        pass

    def close(self) -> None:
        self._rows.clear()
