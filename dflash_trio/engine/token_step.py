"""One token of one sequence: chosen by its sampler, its grammar or the engine, and what it leads
to.

Runs on the worker's thread. Changes the sequence alone; that it has come to its end is returned,
and is the scheduler's to carry out.
"""

from __future__ import annotations

from attrs import frozen

from ..generation.events import FinishReason, TextDelta
from .model_runner import ModelRunner
from .sequence import Sequence


@frozen
class Ending:
    """How a sequence has come to its end; see ``generation.events.Finished``."""

    reason: FinishReason
    stop_sequence: str | None = None
    detail: str | None = None


def take_token(
    sequence: Sequence, output: int, runner: ModelRunner, *, room: int
) -> tuple[list[TextDelta], Ending | None]:
    """Choose a decoding sequence's next token from slice ``output`` of the last batch.

    ``room``: tokens that a sequence can have in all. Raises ConstraintError when the answer's
    grammar cannot be followed any further.
    """
    text, matcher, prepared = sequence.text, sequence.matcher, sequence.prepared
    assert text is not None
    thinking = text.thinking
    token, was_forced = _choose(sequence, output, runner)
    sequence.answer.append(token)
    ends = token in runner.vocabulary.eog_tokens and not was_forced
    if ends and (matcher is not None or not prepared.ignore_eos):
        # A control token that shows ends a part of the output as well.
        shows = token in prepared.shown_tokens
        deltas = text.push(token, None, closes_for="model") if shows else []
        return deltas, Ending("stop")
    logprob = None
    if prepared.logprobs is not None and not thinking:
        logprob = runner.logprobs(output, token, prepared.logprobs)
    deltas = text.push(token, logprob, closes_for=sequence.closes_for if was_forced else "model")
    if matcher is not None and not was_forced:
        if not thinking:
            matcher.accept(token)
        elif not text.thinking:
            assert prepared.thinking is not None
            sequence.forced.extend(prepared.thinking.resume_tokens)
    return deltas, _ending(sequence, room)


def _choose(sequence: Sequence, output: int, runner: ModelRunner) -> tuple[int, bool]:
    """The token, and whether the engine said it in the model's place."""
    sampler, text, matcher = sequence.sampler, sequence.text, sequence.matcher
    assert sampler is not None
    assert text is not None
    plan = sequence.prepared.thinking
    token = -1
    if text.thinking and not sequence.forced:
        assert plan is not None
        if text.reasoning_tokens >= plan.limit:
            sequence.close_thinking(plan.close_tokens, plan.limited_by)
    if not sequence.forced:
        mask = matcher.mask() if matcher is not None and not text.thinking else None
        token = sampler.sample(output, mask)
        ends = token in runner.vocabulary.eog_tokens
        if ends and matcher is not None and text.thinking:
            # It would end without the answer that it owes.
            assert plan is not None
            sequence.close_thinking(plan.close_tokens, "model")
    if not sequence.forced:
        return token, False
    token = sequence.forced.popleft()
    sampler.accept(token)
    return token, True


def _ending(sequence: Sequence, room: int) -> Ending | None:
    """Whether the answer is over with the token that it has just got."""
    assert sequence.text is not None
    if sequence.text.stopped:
        return Ending("stop", sequence.text.stop_sequence)
    if sequence.matcher is not None and sequence.matcher.finished:
        return Ending("stop")
    if sequence.generated >= sequence.prepared.max_tokens:
        return Ending("length")
    if sequence.length >= room:
        return Ending("length", detail="context_full")
    return None
