"""Stop strings in a text that arrives in pieces.

Each stop string has its own Knuth-Morris-Pratt automaton, whose state is how many of the string's
first characters the text ends with. Two things follow:

* What must be held back, the longest end of the text that could still become a match, is as long
  as the largest state, and it *is* the first characters of that stop string. So nothing is
  buffered, and nothing is copied again when more text arrives.
* Work is linear in the text for each stop string, however long the string is. Its failure table
  is filled only as far as the text has ever matched, so that a very long stop string costs
  nothing until the text starts to look like it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class StopResult:
    """What one piece of text led to."""

    text: str
    """May be sent now; no later piece can make it part of a stop string."""
    matched: str | None = None
    """The stop string that ended the text, if one did."""


class _Automaton:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_failure", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0  # always below len(stop): a full match ends the matcher
        # _failure[n]: for the string's first n characters, the longest proper prefix which is
        # also their suffix. Filled lazily; entries 0 and 1 are by definition.
        self._failure = [0, 0]

    def feed(self, text: str, end: int) -> int:
        """Advance over ``text[:end]``; return the index of the character completing a match.

        -1 if there is none. The state is left where the scan ended.
        """
        stop = self.stop
        state = self.state
        at = 0
        if state == 0:
            at = text.find(stop[0], 0, end)
            if at < 0:
                return -1
        last = len(stop) - 1
        while at < end:
            char = text[at]
            while state and stop[state] != char:
                state = self._fall_back(state)
            if stop[state] == char:
                if state == last:
                    return at
                state += 1
                at += 1
            else:  # the state is 0: jump to where a match could begin
                at = text.find(stop[0], at + 1, end)
                if at < 0:
                    break
        self.state = state
        return -1

    def _fall_back(self, state: int) -> int:
        failure = self._failure
        stop = self.stop
        while len(failure) <= state:
            n = len(failure)
            k = failure[n - 1]
            while k and stop[k] != stop[n - 1]:
                k = failure[k]
            failure.append(k + 1 if stop[k] == stop[n - 1] else 0)
        return failure[state]


class StopMatcher:
    """Finds the first stop string in a text, without ever letting out a part of it.

    The match that completes first wins. Of several that complete at the same character the
    longest wins, which is the one that begins first.
    """

    __slots__ = ("_automata", "_held", "_matched", "_owner")

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for ``stops``, in any order; repeated ones count once.

        Raises:
            ValueError: one of them is empty, which would match everywhere.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = tuple(_Automaton(stop) for stop in dict.fromkeys(stops))
        # What is held back is self._owner[:self._held]; the owner is one of the stop strings.
        self._owner = ""
        self._held = 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; say what may be sent, and whether a stop string ended it.

        After a match there is nothing more to send: what follows the stop string is dropped, and
        so is every later piece.
        """
        if not self._automata:
            return StopResult(text)
        if self._matched is not None:
            return StopResult("", self._matched)
        end = len(text)
        winner = ""
        owner, held = "", 0
        for automaton in self._automata:
            at = automaton.feed(text, end)
            if at >= 0:
                if at + 1 < end or len(automaton.stop) > len(winner):
                    winner = automaton.stop
                end = at + 1  # later strings matter only if they complete by here
            elif automaton.state > held:
                owner, held = automaton.stop, automaton.state
        if winner:
            self._matched = winner
            result = StopResult(self._first(self._held + end - len(winner), text), winner)
            self._owner, self._held = "", 0
        else:
            result = StopResult(self._first(self._held + len(text) - held, text))
            self._owner, self._held = owner, held
        return result

    def finish(self) -> str:
        """End the text: return what was held back, which is now known to be no match.

        To be called once; a match has left nothing to return.
        """
        rest = self._owner[: self._held]
        self._owner, self._held = "", 0
        return rest

    def _first(self, count: int, text: str) -> str:
        """The first ``count`` characters of what is held followed by ``text``."""
        if count <= self._held:
            return self._owner[:count]
        if not self._held:
            return text[:count]
        return self._owner[: self._held] + text[: count - self._held]
