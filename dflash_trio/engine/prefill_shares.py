"""Who has which part of a step, and how the prompts that wait to be computed take turns."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from attrs import define, field, frozen

from .model_runner import Batching, BatchSlice
from .sequence import Sequence

MOST_STEPS = 8
"""Of prompts alone, one after the other, while others wait for their next token."""
RIDES = 8
"""So few tokens of prompts go with the others' next tokens: apart they would take longer."""

Shares = list[tuple[Sequence, int]]
"""Prompts, and how many of their tokens go into a step, none empty."""


@frozen
class Planned:
    """One sequence's share of a batch."""

    sequence: Sequence
    slice: BatchSlice


def next_token(sequence: Sequence) -> BatchSlice:
    """A decoding sequence's part of a step."""
    assert sequence.seq_id is not None
    return BatchSlice(sequence.seq_id, sequence.computed, (sequence.answer[-1],), 1)


def prompt_part(sequence: Sequence, share: int) -> BatchSlice:
    """The next ``share`` tokens that are to be prefilled."""
    assert sequence.seq_id is not None
    begin, end = sequence.computed, sequence.computed + share
    # A sequence that goes on after a pause has its next token already.
    outputs = int(end == sequence.to_prefill and not sequence.answer)
    return BatchSlice(sequence.seq_id, begin, sequence.tokens(begin, end), outputs)


@define
class PrefillTurns:
    """``chunk``: tokens of prompts between two tokens of whoever runs, at most."""

    _chunk: int
    _batching: Batching
    # Of this round: since everybody who runs had a token. While nobody runs each step is one, so
    # that what came before does not change in which portions a prompt is computed.
    _decoding: bool = field(default=False, init=False)
    _spent: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)
    _of_oldest: int = field(default=0, init=False)
    _passed_over: int = field(default=0, init=False)
    """Steps in which the oldest had no part, in a row."""

    def next(
        self, prefilling: AbstractSequence[Sequence], *, decoding: bool
    ) -> tuple[Shares, bool]:
        """What the next step has of each prompt, and whether those who run are in it too.
        ``prefilling``: oldest first; ``decoding``: somebody runs."""
        if not (decoding and self._decoding):
            self._begin_round()
        self._decoding = decoding
        if not prefilling or self._spent >= self._chunk or self._steps >= MOST_STEPS:
            self._begin_round()
            return [], True
        shares = prefill_shares(
            prefilling,
            self._chunk - self._spent,
            chunk=self._chunk,
            sure=self._chunk // 2 - self._of_oldest,
            full=self._batching.full,
            oldest_first=self._passed_over >= MOST_STEPS - 1,
        )
        of_oldest = sum(share for s, share in shares if s is prefilling[0])
        self._passed_over = 0 if of_oldest else self._passed_over + 1
        tokens = sum(share for _, share in shares)
        if not self._batching.apart or (decoding and tokens <= RIDES):
            self._begin_round()
            return shares, True
        self._spent += tokens
        self._steps += 1
        self._of_oldest += of_oldest
        return shares, False

    def _begin_round(self) -> None:
        self._spent = self._steps = self._of_oldest = 0


def prefill_shares(
    prefilling: AbstractSequence[Sequence],
    budget: int,
    *,
    chunk: int,
    sure: int,
    full: int,
    oldest_first: bool = False,
) -> Shares:
    """How many tokens of each prompt go into a step of ``budget`` prefill tokens. Keeps the order.

    Those who need least come first, whole, until the step is ``full``: their first tokens come
    early, and a long prompt cannot starve a short one. ``sure`` tokens are left to the oldest one,
    here or in a later step, and now and then it comes ``oldest_first``: so short ones cannot starve
    it either. What would fit into a ``chunk`` is not cut, but for the oldest one.
    """
    oldest = prefilling[0]
    sure = max(0, min(oldest.prefill_end - oldest.computed, sure, budget))
    shares: dict[int, int] = {}
    left = budget
    order = sorted(prefilling, key=lambda s: s.prefill_end - s.computed)
    if oldest_first:
        order.sort(key=lambda s: s is not oldest)
    for sequence in order:
        if budget - left >= full:
            break
        need = sequence.prefill_end - sequence.computed
        if sequence is oldest:
            share, sure = min(need, left), 0
        else:
            share = min(need, left - sure)
            if share < need <= chunk:
                continue
        if share > 0:
            shares[id(sequence)] = share
            left -= share
    return [(s, shares[id(s)]) for s in prefilling if id(s) in shares]
