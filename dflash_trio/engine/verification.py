"""A run of guesses in one sequence: as much of it as the model says itself.

Each token is chosen as without drafts, by the request's own sampler from the logits at its place;
a guess stays only if it is the token chosen there. So what a sequence says does not depend on what
was guessed, at any temperature, and neither does how often its sampler draws.

Runs on the worker's thread. Changes the sequence alone, as ``take_token`` does.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import attrs

from ..generation.constraint import ConstraintError
from ..generation.events import TextDelta
from .model_runner import ModelRunner
from .sequence import Sequence
from .token_step import Ending, take_token


@attrs.define(eq=False)
class Run:
    """What came of one sequence's outputs in a step."""

    sequence: Sequence
    deltas: list[TextDelta] = attrs.field(factory=list)
    kept: int = 0
    """Tokens of its slice that stay in the cache, and as many were chosen."""
    accepted: int = 0
    """Guesses that came."""
    judged: int = 0
    """Guesses whose turn came: those, and the first wrong one."""
    ending: Ending | None = None
    error: ConstraintError | None = None
    """Its grammar cannot be followed any further."""


def take_run(
    sequence: Sequence,
    output: int,
    proposals: AbstractSequence[int],
    runner: ModelRunner,
    *,
    room: int,
) -> Run:
    """Choose a decoding sequence's next tokens: one, and one more after each guess that was right.

    ``output``: the first of its ``1 + len(proposals)`` outputs in the last batch. ``room``: tokens
    that a sequence can have in all.
    """
    run = Run(sequence)
    for place in range(len(proposals) + 1):
        run.kept += 1
        try:
            deltas, run.ending = take_token(sequence, output + place, runner, room=room)
        except ConstraintError as error:
            run.error = error
            break
        if run.deltas:
            _merge(run.deltas, deltas)
        else:
            run.deltas = deltas
        if place < len(proposals):
            run.judged += 1
            if sequence.answer[-1] != proposals[place]:
                break
            run.accepted += 1
        if run.ending is not None:
            break
    return run


def _merge(deltas: list[TextDelta], more: list[TextDelta]) -> None:
    """Add what comes later, as one delta where both are of one channel: they are told together,
    and each would be written out for its own."""
    for new in more:
        last = deltas[-1]
        if not (new.text or new.logprobs):
            deltas[-1] = attrs.evolve(last, tokens=new.tokens)
        elif new.channel == last.channel or not (last.text or last.logprobs):
            deltas[-1] = attrs.evolve(
                new, text=last.text + new.text, logprobs=last.logprobs + new.logprobs
            )
        else:
            deltas.append(new)
