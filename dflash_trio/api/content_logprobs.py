"""Log probabilities of the content alone, where calls of tools are read from the same text.

Whether a token is content is known only when the parser has made up its mind: what it holds back
may turn out to be a call, and then its tokens are nobody's. Here they wait for it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from attrs import frozen

from ..generation.events import TokenLogprob
from ..text.tool_calls.pieces import CallArguments, CallBegun, Piece, Text, ToolCallParser

_CLOSING = frozenset(">)]}")
"""What calls end with: two in a row may be a call's last character and text."""


@frozen
class ScoredText(Text):
    """Words to the user, and their tokens: each comes with the first of its characters that is
    content. Either may be empty, not both."""

    logprobs: tuple[TokenLogprob, ...] = ()


class LogprobReader:
    """Gives one answer's text to ``parser`` and says which tokens are of the text that comes out.

    A parser gives text out in order and tells not from where. So it gets single characters here:
    then what it gives out ends with the last one, or where something that it holds back begins.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0
        """Where the next token's text begins. All places count the characters of the answer."""
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        """Tokens whose text is not known to be content, each with where that begins and ends."""
        self._held: list[str] = []
        """The characters that the parser has got and not given out."""
        self._held_from = 0
        self._gave_out = False
        """The last character that was settled is content."""
        self._after_call = False
        """A call has come since text was given out: what is held may begin with a part of it."""
        self._calls = False

    def push(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Piece]:
        """``logprobs``: of the tokens whose text begins in this one."""
        begins = self._held_from + len(self._held)
        self._place(logprobs, begins, begins + len(text))
        found: list[Piece] = []
        if not text and not self._held and self._gave_out:
            # They show nothing, so they belong to the text before them.
            found += self._scored("", begins + 1)
        for character in text:
            self._held.append(character)
            pieces = self._parser.push(character)
            found += [self._read(piece) for piece in pieces]
            if pieces and isinstance(pieces[-1], CallBegun | CallArguments):
                # All before this character was the call's. At a call's end it may not have been:
                # what cannot be a part of the call is read again, as text.
                self._drop(len(self._held) - 1)
        return found

    def finish(self) -> list[Piece]:
        found = [self._read(piece) for piece in self._parser.finish()]
        if not self._calls and self._waiting:
            # All of it was content: these show nothing.
            found += self._scored("", self._waiting[-1][1])
        return found

    def _place(self, logprobs: Sequence[TokenLogprob], begins: int, ends: int) -> None:
        for entry in logprobs:
            # Else it follows a hidden token, whose bytes are no text.
            start = self._next if begins <= self._next < ends else begins
            self._next = start + len(self._decoder.decode(entry.chosen.piece))
            # Bytes of an incomplete character belong to that character.
            self._waiting.append((start, max(self._next, start + 1), entry))

    def _read(self, piece: Piece) -> Piece:
        if not isinstance(piece, Text):
            self._after_call = True
            self._gave_out = False
            self._calls = self._calls or isinstance(piece, CallBegun)
            return piece
        self._drop(self._start_of(piece.text))
        self._after_call, self._gave_out = False, True
        length = len(piece.text)
        (scored,) = self._scored(piece.text, self._held_from + length) or (piece,)
        self._held_from += length
        del self._held[:length]
        return scored

    def _start_of(self, text: str) -> int:
        """Where in what is held the text is that was given out."""
        length = len(text)
        wanted = list(text)
        if not self._after_call and self._held[:length] == wanted:
            return 0
        last = len(self._held) - length
        if wanted[0] not in _CLOSING and self._held[last - 1 : -1] == wanted:
            # Of several characters that may begin a call, the last one is held back.
            return last - 1
        for start in range(last, -1, -1):
            if self._held[start : start + length] == wanted:
                return start
        return 0

    def _drop(self, characters: int) -> None:
        """The first of those held are no content, and neither are tokens that have only them."""
        del self._held[:characters]
        self._held_from += characters
        while self._waiting and self._waiting[0][1] <= self._held_from:
            self._waiting.popleft()

    def _scored(self, text: str, end: int) -> list[Piece]:
        """The text with the tokens that begin before ``end``. Nothing, if it is without both."""
        logprobs: list[TokenLogprob] = []
        while self._waiting and self._waiting[0][0] < end:
            logprobs.append(self._waiting.popleft()[2])
        return [ScoredText(text, tuple(logprobs))] if text or logprobs else []
