"""AnswerText: from one answer's tokens to the text that its client may see, as events.

Bytes become whole characters, thinking is told from content, stop strings are looked for in the
content, and log probabilities wait until the text of their token is out. Runs on the worker's
thread, for one sequence.
"""

from __future__ import annotations

from collections import deque

from ..generation.events import CONTENT, TextDelta, ThinkingClosedBy, TokenLogprob
from ..generation.request import PreparedPrompt
from ..text.detokenizer import Detokenizer
from ..text.stop_matcher import StopMatcher
from .model_runner import Vocabulary


class AnswerText:
    """``index``: which of its generation's answers this is."""

    def __init__(self, prepared: PreparedPrompt, index: int, vocabulary: Vocabulary) -> None:
        self._index = index
        self._constrained = prepared.constraint is not None
        self._vocabulary = vocabulary
        self._shown = prepared.shown_tokens
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher((*prepared.stop, *prepared.turn_ends))
        self._turn_ends = frozenset(prepared.turn_ends) - frozenset(prepared.stop)
        plan = prepared.thinking
        self._splitter = plan.new_splitter() if plan is not None else None
        # Of tokens of the content whose text is not out yet: where it begins in the content, in
        # characters.
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._content = 0
        self._released = 0
        # Of tokens that the splitter may yet call content or drop, being of a marker, of a header
        # or of blanks: where their text begins and ends in all that was written, in characters.
        self._undecided: list[tuple[int, int, TokenLogprob]] = []
        self._written = 0
        # How much was written when content came last.
        self._content_end = -1
        self._tokens = 0
        self.stopped = False
        """A string has ended the content."""
        self.stop_sequence: str | None = None
        """Which, if it was one of the request's."""
        self.reasoning_tokens = 0
        self.thinking_closed_by: ThinkingClosedBy | None = None

    @property
    def thinking(self) -> bool:
        """The answer is inside a block of thinking."""
        return self._splitter is not None and self._splitter.thinking

    def push(
        self, token: int, logprob: TokenLogprob | None, *, closes_for: ThinkingClosedBy
    ) -> list[TextDelta]:
        """Take a token; at least one delta. ``closes_for``: who is to thank should it close the
        thinking. Sets ``stopped`` when the content ends with this token."""
        self._tokens += 1
        piece = self._shown.get(token)
        if piece is None:
            piece = self._vocabulary.piece(token)
        text = self._detokenizer.push(piece)
        if self._splitter is None:
            return [self._content_delta(text, logprob)]
        self._written += len(text)
        if logprob is not None:
            self._consider(logprob, piece, text)
        thought = self._splitter.thinking
        parts = self._splitter.push(text, token)
        thinks = self._splitter.thinking
        if thought or thinks:
            self.reasoning_tokens += 1
        if thought and not thinks:
            self.thinking_closed_by = closes_for
            if self._constrained:
                # Content in the very token that closed the thinking was not written under the
                # answer's grammar, which begins only now.
                parts = [(channel, part) for channel, part in parts if channel != CONTENT]
        deltas: list[TextDelta] = []
        for channel, part in parts:
            if channel == CONTENT:
                self._decide(part)
                deltas.append(self._content_delta(part, None))
            else:
                deltas.append(TextDelta(part, self._tokens, channel, index=self._index))
        if thinks or (parts and parts[-1][0] != CONTENT):
            self._undecided.clear()
        return deltas or [TextDelta("", self._tokens, index=self._index)]

    def _consider(self, logprob: TokenLogprob, piece: bytes, text: str) -> None:
        """A token has come whose text, the end of what was written, may turn out to be content."""
        if not text and self._written == self._content_end:
            # A part of a character in the middle of the content.
            self._waiting.append((self._content, logprob))
            return
        end = self._written
        last = text[-1:].encode()
        if not last or not (piece.endswith(last) or last.endswith(piece)):
            # It goes on into a character whose other bytes are yet to come.
            end += 1
        self._undecided.append((self._written - len(text), end, logprob))

    def _decide(self, part: str) -> None:
        """The end of what was written is content: the tokens that hold some of it are of it, and
        those before it never will be."""
        first = self._written - len(part)
        for begin, end, logprob in self._undecided:
            if end > first:
                self._waiting.append((self._content + max(begin - first, 0), logprob))
        self._undecided.clear()
        self._content_end = self._written

    def _content_delta(self, text: str, logprob: TokenLogprob | None) -> TextDelta:
        if logprob is not None:
            self._waiting.append((self._content, logprob))
        self._content += len(text)
        result = self._stops.push(text)
        self._released += len(result.text)
        if result.matched is not None:
            self.stopped = True
            if result.matched not in self._turn_ends:
                self.stop_sequence = result.matched
        return TextDelta(
            result.text, self._tokens, logprobs=self._released_logprobs(), index=self._index
        )

    def finish(self) -> list[TextDelta]:
        """What was held back, where no stop string ended the answer."""
        if self.stopped:
            return []
        text = self._detokenizer.finish()
        self._written += len(text)
        parts = [(CONTENT, text)] if text else []
        if self._splitter is not None:
            parts = self._splitter.push(text, -1) if text else []
            parts += self._splitter.finish()
        deltas: list[TextDelta] = []
        for channel, part in parts:
            if channel == CONTENT:
                self._decide(part)
                deltas.append(self._content_delta(part, None))
            else:
                deltas.append(TextDelta(part, self._tokens, channel, index=self._index))
        if not self.stopped:
            # A match that did not complete was text after all.
            held = self._stops.finish()
            self._released = self._content + 1
            logprobs = self._released_logprobs()
            if held or logprobs:
                deltas.append(TextDelta(held, self._tokens, logprobs=logprobs, index=self._index))
        return deltas

    def _released_logprobs(self) -> tuple[TokenLogprob, ...]:
        if not self._waiting:
            return ()
        released: list[TokenLogprob] = []
        while self._waiting and self._waiting[0][0] < self._released:
            released.append(self._waiting.popleft()[1])
        return tuple(released)
