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
    """Guesses whose turn came: those, and the first wrong one; in a tree all of them."""
    path: list[int] | None = None
    """Of a tree: the places of what is kept in the slice."""
    right: AbstractSequence[int] = ()
    """Of those whose turn came, the numbers of the guesses that came, from 0."""
    ending: Ending | None = None
    error: ConstraintError | None = None
    """Its grammar cannot be followed any further."""


def take_run(
    sequence: Sequence,
    output: int,
    runner: ModelRunner,
    proposals: AbstractSequence[int] | None = None,
    parents: AbstractSequence[int] | None = None,
    *,
    room: int,
) -> Run:
    """Choose a decoding sequence's next tokens: one, and one more after each guess that was right.

    ``output``: the first of its ``1 + len(proposals)`` outputs in the last batch. ``parents``:
    those of its slice, if that is a tree. ``room``: tokens that a sequence can have in all.
    """
    run = Run(sequence)
    proposals = proposals or ()
    if parents is not None:
        _climb(run, output, proposals, parents, runner, room)
        return run
    for place in range(len(proposals) + 1):
        if not _take(run, output + place, runner, room):
            break
        if place < len(proposals):
            run.judged += 1
            if sequence.answer[-1] != proposals[place]:
                break
            run.accepted += 1
        if run.ending is not None:
            break
    run.right = range(run.accepted)
    return run


def _climb(
    run: Run,
    output: int,
    proposals: AbstractSequence[int],
    parents: AbstractSequence[int],
    runner: ModelRunner,
    room: int,
) -> None:
    """The same along a tree: from each token to the one that was chosen there, if it is guessed."""
    following = {
        (parent, token): place
        for place, (parent, token) in enumerate(zip(parents[1:], proposals, strict=True), 1)
    }
    run.path = []
    came: list[int] = []
    place: int | None = 0
    while place is not None:
        run.path.append(place)
        if not _take(run, output + place, runner, room):
            return
        place = following.get((place, run.sequence.answer[-1]))
        if place is not None:
            run.accepted += 1
            came.append(place - 1)
        if run.ending is not None:
            return  # what lies above had no turn: nothing is learned of this tree
    run.judged, run.right = len(proposals), came


def _take(run: Run, output: int, runner: ModelRunner, room: int) -> bool:
    """One token of a run. False: there is none, and no other."""
    run.kept += 1
    try:
        deltas, run.ending = take_token(run.sequence, output, runner, room=room)
    except ConstraintError as error:
        run.error = error
        return False
    if run.deltas:
        _merge(run.deltas, deltas)
    else:
        run.deltas = deltas
    return True


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
