"""A whole small model as a draft: it goes on from the same tokens, greedily, one after the other.

Its context has a row for each of the target's, and its own keys and values in it. They follow the
target's when something is asked for: what is lacking is decoded then, what was wrong is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np
from attrs import define, field, frozen

from .context_size import microbatch
from .drafting.provider import Wanted
from .llama_draft_context import DraftBatch, DraftContext, DraftSpec
from .model_runner import BatchSlice, ModelLoadError

DEFAULT_LONGEST = 16


@define
class _Row:
    """``tokens``: those in the draft's cache. Of these, the first ``certain`` ones are known to be
    the sequence's; the others were guesses when they got there."""

    tokens: list[int] = field(factory=list)
    certain: int = 0


@frozen
class _Part:
    """Tokens that go on in a row, and whether a guess is wanted after them."""

    row: int
    tokens: Sequence[int]
    wants_output: bool


class DraftModelProvider:
    """A draft model. Belongs to the thread of its target's runner.

    A prompt that it has not seen is worked off by as many tokens as the target's prompts are, in
    each round: nobody waits for a long one, and it gets no guesses until it is done. What that
    takes is told apart from what guessing takes (``caught_up_seconds``).
    """

    def __init__(
        self,
        spec: DraftSpec,
        *,
        vocabulary_size: int,
        on_progress: Callable[[float], None] = lambda _fraction: None,
        stopped: threading.Event | None = None,
    ) -> None:
        """``vocabulary_size``: the target's. Loads; raises as DraftContext does."""
        self._context = context = DraftContext(
            spec, on_progress=on_progress, stopped=stopped or threading.Event()
        )
        try:
            model = context.model
            if llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model):
                raise ModelLoadError(
                    f"the draft {spec.file.path} cannot take tokens back: it has a recurrent state"
                )
            if llama.llama_model_has_encoder(model) or not llama.llama_model_has_decoder(model):
                raise ModelLoadError(f"the draft {spec.file.path} is an encoder model")
            slots = spec.context.slots
            capacity = spec.chunk + slots
            self._longest = spec.file.longest
            context.make_context(
                batch=capacity, microbatch=microbatch(spec.chunk, slots), outputs=slots
            )
        except BaseException:
            context.close()
            raise
        # Either may have tokens behind the other's last one that nobody uses.
        self._vocabulary = min(vocabulary_size, context.vocabulary_size)
        self._batch = DraftBatch(capacity)
        self._rows = [_Row() for _ in range(slots)]
        self._caught_up = 0.0

    matched = ()
    steady = False
    looks_at_steps = False

    @property
    def kind(self) -> str:
        return "draft-model"

    @property
    def longest(self) -> int:
        return self._longest

    @property
    def caught_up_seconds(self) -> float:
        return self._caught_up

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in wanted]
        indexes = {each.row: index for index, each in enumerate(wanted)}
        lacking = [(each.row, self._lacking(each)) for each in wanted]
        # What lacks least first: the next token of many comes before the prompt of one.
        lacking.sort(key=lambda item: len(item[1]))
        parts: list[_Part] = []
        room = self._batch.capacity
        for row, tokens in lacking:
            some = tokens[:room]
            if some and max(some) < self._context.vocabulary_size:
                parts.append(_Part(row, some, len(some) == len(tokens)))
                room -= len(some)
        found = self._catch_up(parts)
        for part in parts:
            self._rows[part.row].certain = len(self._rows[part.row].tokens)
        while found:
            parts = []
            for row, token in found.items():
                guess = guesses[indexes[row]]
                guess.append(token)
                if len(guess) < min(wanted[indexes[row]].limit, self._longest):
                    parts.append(_Part(row, (token,), True))
            found = self._decode(parts)
        return guesses

    def _catch_up(self, parts: list[_Part]) -> dict[int, int]:
        """Decode what is lacking, and measure it. What a row may lack that is asked for in every
        step belongs to guessing; the share of all other tokens is what catching up took."""
        tokens = sum(len(part.tokens) for part in parts)
        usual = sum(min(len(p.tokens), self._longest + 1) for p in parts if p.wants_output)
        more = tokens - usual
        begin = time.perf_counter()
        found = self._decode(parts)
        if more and not found:
            # Nobody has waited for it yet, and it is no part of the target's next step.
            llama.llama_synchronize(self._context.native)
        self._caught_up = (time.perf_counter() - begin) * more / tokens if more else 0.0
        return found

    def _lacking(self, wanted: Wanted) -> Sequence[int]:
        """The tokens that the draft's cache has not got, the last one at least. Drops from it what
        was guessed wrong."""
        row, tokens = self._rows[wanted.row], wanted.tokens
        most = min(len(row.tokens), len(tokens) - 1)
        same = min(row.certain, most)
        while same < most and row.tokens[same] == tokens[same]:
            same += 1
        self._cut(wanted.row, same)
        return tokens[same:]

    def _decode(self, parts: list[_Part]) -> dict[int, int]:
        """The likeliest next token of each row that wants one, in the order of rows."""
        if not parts:
            return {}
        # A partitioned cache computes a run of rows at once.
        parts = sorted(parts, key=lambda part: part.row)
        batch, at = self._batch, 0
        for part in parts:
            begin, end = len(self._rows[part.row].tokens), at + len(part.tokens)
            batch.tokens[at:end] = part.tokens
            batch.positions[at:end] = np.arange(begin, begin + end - at)
            batch.rows[at:end] = part.row
            batch.outputs[at:end] = 0
            batch.outputs[end - 1] = part.wants_output
            at = end
        if not self._context.decode(batch.of_tokens(at)):
            for part in parts:
                self._cut(part.row, 0)
                self._context.rewind(part.row, 0)  # also what an aborted batch has left there
            return {}
        for part in parts:
            self._rows[part.row].tokens.extend(part.tokens)
        rows = [part.row for part in parts if part.wants_output]
        if not rows:
            return {}
        likeliest = self._context.logits(len(rows))[:, : self._vocabulary].argmax(axis=1)
        return dict(zip(rows, likeliest.tolist(), strict=True))

    # --------------------------------------------------------------------- what rows hold

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        """Nothing: what a sequence has comes with each wish for a guess."""

    def rewind(self, row: int, length: int) -> None:
        self._cut(row, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._cut(target, 0)
        # Guesses are none of the sequence's.
        count = min(self._rows[source].certain, length)
        if count:
            self._context.copy(source, target, count)
            self._rows[target] = _Row(self._rows[source].tokens[:count], count)

    def replaced(self, row: int) -> None:
        self._cut(row, 0)

    def _cut(self, row: int, length: int) -> None:
        state = self._rows[row]
        if length < len(state.tokens):
            self._context.rewind(row, length)
            del state.tokens[length:]
        state.certain = min(state.certain, length)

    def nap(self, *, asleep: bool) -> None:
        """It looks at no step."""

    def rests(self, row: int) -> None:
        """Nothing: who goes on from what the row holds goes on from the draft's, too."""

    def abort(self) -> None:
        self._context.abort()

    def rearm(self) -> None:
        self._context.rearm()

    def close(self) -> None:
        self._context.close()
