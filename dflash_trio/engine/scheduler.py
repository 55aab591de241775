"""The scheduler: what goes into the next batch, and what comes out of it.

A step is three calls: :meth:`Scheduler.plan` chooses slices, the runner decodes them, and
``_take_outputs`` samples, detokenizes and decides who is done. Every running sequence gets one
token a step, and prompts share the rest of the batch chunk by chunk (continuous batching), so
a long prompt delays its neighbours by one chunk at most.

Runs on the worker's thread only. Touches no clock, no channel and no event loop: events are
returned as data, which is what makes it testable without threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import attrs
from attrs import frozen

from ..generation.constraint import ConstraintError
from ..generation.events import (
    SERVER_SHUTDOWN,
    Event,
    Failed,
    Finished,
    FinishReason,
    Retired,
    TextDelta,
    Usage,
)
from ..generation.request import MAX_SEED
from ..generation.status import EngineStatistics
from .admission import KVLedger
from .answer_text import AnswerText
from .model_runner import BatchSlice, DecodeOutcome, EngineError, ModelRunner
from .sequence import Sequence, SequenceState

Delivery = list[tuple[int, Event]]
"""(generation id, event) pairs, oldest first."""


@frozen
class Planned:
    """One sequence's share of a batch."""

    sequence: Sequence
    slice: BatchSlice


class Scheduler:
    """Runs one model's sequences.

    ``chunk``: prefill tokens in one step, shared by all prompts. ``on_batch`` is told the
    generations of each batch and its tokens right before it is decoded, and the empty set right
    after: while it names a generation, that one's tokens are on the device.
    """

    def __init__(
        self,
        runner: ModelRunner,
        ledger: KVLedger,
        *,
        chunk: int,
        on_batch: Callable[[frozenset[int], int], None] = lambda _generations, _tokens: None,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._chunk = chunk
        self._on_batch = on_batch
        self._free_rows = deque(range(ledger.slots))
        # By generation and the answer's index. Insertion order is arrival order: oldest first
        # everywhere below.
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._events: Delivery = []
        self._finalizing = False
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0

    @property
    def idle(self) -> bool:
        return not self._sequences

    # ------------------------------------------------------------------ messages between steps

    def add(self, sequence: Sequence) -> None:
        """Take a submitted generation by its first answer; its others are made here. During a
        shutdown it is finished at once."""
        prepared = sequence.prepared
        siblings = [
            Sequence(sequence.generation_id, prepared, sequence.hold, index)
            for index in range(1, prepared.n)
        ]
        for answer in (sequence, *siblings):
            self._sequences[answer.generation_id, answer.index] = answer
        if not sequence.prompt:
            # There would be nothing to take logits from. Its own failure, not the engine's.
            self._fail(sequence.generation_id, "the prompt has no tokens")
        elif self._finalizing:
            for answer in (sequence, *siblings):
                self._finish(answer, "length", detail=SERVER_SHUTDOWN)

    def cancel(self, generation_id: int) -> None:
        """Retire a generation whose client is gone. Unknown ids are already retired: no-op."""
        for sequence in self._answers(generation_id):
            self._finish(sequence, "cancelled")

    def finalize_all(self) -> None:
        """End every generation now, properly, and each later one at once."""
        self._finalizing = True
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "length", detail=SERVER_SHUTDOWN)

    def fail_all(self, message: str) -> None:
        """The engine is lost: fail and retire everybody. Frees nothing on the device."""
        for generation_id in dict.fromkeys(generation for generation, _ in self._sequences):
            self._fail(generation_id, message, device_is_lost=True)

    def _answers(self, generation_id: int) -> list[Sequence]:
        """A generation's answers that are not retired."""
        return [s for (owner, _), s in self._sequences.items() if owner == generation_id]

    def take_events(self) -> Delivery:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ----------------------------------------------------------------------------- one step

    def step(self) -> None:
        """Plan, decode, take the outputs. Raises EngineError when the engine is lost."""
        planned = self.plan()
        while planned:
            self._on_batch(
                frozenset(item.sequence.generation_id for item in planned),
                sum(len(item.slice.tokens) for item in planned),
            )
            try:
                outcome = self._runner.decode([item.slice for item in planned])
            finally:
                self._on_batch(frozenset(), 0)
            self._steps += 1
            if outcome is DecodeOutcome.DONE:
                self._take_outputs(planned)
                return
            if outcome is DecodeOutcome.ABORTED:
                # Aborting is asked for only when everybody in the batch is to go: that is in the
                # inbox already, and their cells are freed whatever they hold.
                return
            # No cells although the ledger promised them: the newest one gives way.
            victim = max(planned, key=lambda item: item.sequence.generation_id)
            planned.remove(victim)
            self._finish(victim.sequence, "length", detail="no_free_cells")

    def plan(self) -> list[Planned]:
        """The next batch: one token of every decoding sequence, then prompts by chunks."""
        planned: list[Planned] = []
        prefilling: list[Sequence] = []
        for sequence in list(self._sequences.values()):
            if sequence.state is SequenceState.QUEUED:
                if sequence.index:
                    continue  # its first answer prefills for it
                self._start(sequence)
            if sequence.state is SequenceState.PREFILLING:
                prefilling.append(sequence)
            elif self._has_next_cell(sequence):
                assert sequence.seq_id is not None
                assert sequence.last_token is not None
                planned.append(
                    Planned(
                        sequence,
                        BatchSlice(
                            sequence.seq_id, sequence.computed, (sequence.last_token,), True
                        ),
                    )
                )
        for sequence, share in _shares(prefilling, self._chunk):
            assert sequence.seq_id is not None
            begin = sequence.computed
            end = begin + share
            planned.append(
                Planned(
                    sequence,
                    BatchSlice(
                        sequence.seq_id,
                        begin,
                        sequence.prompt[begin:end],
                        end == len(sequence.prompt),
                    ),
                )
            )
        return planned

    def _start(self, sequence: Sequence) -> None:
        prepared = sequence.prepared
        sampling = prepared.sampling
        if sampling.seed is not None and sequence.index:
            # Each answer draws differently, and the same way every time.
            sampling = attrs.evolve(
                sampling, seed=(sampling.seed + sequence.index) % (MAX_SEED + 1)
            )
        sequence.seq_id = self._free_rows.popleft()
        sequence.sampler = self._runner.new_sampler(sampling, sequence.prompt)
        sequence.text = AnswerText(prepared, sequence.index, self._runner.vocabulary)
        if prepared.constraint is not None:
            sequence.matcher = prepared.constraint.new_matcher()
        if sequence.index == 0:
            sequence.enter(SequenceState.PREFILLING)

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Start the other answers of a generation whose prompt has just been computed."""
        if first.prepared.n == 1:
            return []
        others = [s for s in self._answers(first.generation_id) if s is not first]
        for other in others:
            self._start(other)
            assert first.seq_id is not None
            assert other.seq_id is not None
            self._runner.copy(first.seq_id, other.seq_id)
            other.computed = first.computed
            other.enter(SequenceState.DECODING)
        return others

    def _has_next_cell(self, sequence: Sequence) -> bool:
        """Make sure that the sampled token may enter the cache; else the sequence ends here."""
        hold = sequence.hold
        needed = sequence.length
        if sequence.prepared.n > 1:
            answers = self._answers(sequence.generation_id)
            needed = len(sequence.prompt) + sum(answer.generated for answer in answers)
        if needed <= hold.cells:
            return True
        wanted = min(
            self._ledger.decode_headroom,
            self._ledger.max_ctx - sequence.length + 1,
            sequence.prepared.max_tokens - sequence.generated,
        )
        shortfall = needed - hold.cells
        if self._ledger.extend(hold, max(shortfall, wanted)) >= shortfall:
            return True
        self._finish(sequence, "length", detail="no_free_cells")
        return False

    def _take_outputs(self, planned: Iterable[Planned]) -> None:
        for index, item in enumerate(planned):
            sequence = item.sequence
            sequence.computed += len(item.slice.tokens)
            if sequence.state is SequenceState.PREFILLING:
                self._prompt_tokens += len(item.slice.tokens)
            if not item.slice.wants_output:
                continue
            answers = [sequence]
            if sequence.state is SequenceState.PREFILLING:
                sequence.enter(SequenceState.DECODING)
                answers += self._fork(sequence)
            for answer in answers:
                try:
                    self._take_token(answer, index)
                except ConstraintError as error:
                    self._fail(answer.generation_id, f"the answer's grammar: {error}")
                    break

    def _take_token(self, sequence: Sequence, output: int) -> None:
        """Choose a sequence's next token and see what comes of it."""
        sampler, text, matcher = sequence.sampler, sequence.text, sequence.matcher
        assert sampler is not None
        assert text is not None
        prepared, thinking = sequence.prepared, text.thinking
        plan, eog_tokens = prepared.thinking, self._runner.vocabulary.eog_tokens
        if thinking and not sequence.forced:
            assert plan is not None
            if text.reasoning_tokens >= plan.limit:
                sequence.close_thinking(plan.close_tokens, plan.limited_by)
        if not sequence.forced:
            mask = matcher.mask() if matcher is not None and not thinking else None
            token = sampler.sample(output, mask)
            if token in eog_tokens and thinking and matcher is not None:
                # It would end without the answer that it owes.
                assert plan is not None
                sequence.close_thinking(plan.close_tokens, "model")
        was_forced = bool(sequence.forced)
        if was_forced:
            token = sequence.forced.popleft()
            sampler.accept(token)
        sequence.last_token = token
        sequence.generated += 1
        self._completion_tokens += 1

        ends = token in eog_tokens and not was_forced
        if ends and (matcher is not None or not prepared.ignore_eos):
            if token in prepared.shown_tokens:  # it ends a part of the output as well
                self._tell(sequence, text.push(token, None, closes_for="model"))
            self._finish(sequence, "stop")
            return
        logprob = None
        if prepared.logprobs is not None and not thinking:
            logprob = self._runner.logprobs(output, token, prepared.logprobs)
        closes_for = sequence.closes_for if was_forced else "model"
        self._tell(sequence, text.push(token, logprob, closes_for=closes_for))
        if matcher is not None and not was_forced:
            if not thinking:
                matcher.accept(token)
            elif not text.thinking:
                assert plan is not None
                sequence.forced.extend(plan.resume_tokens)
        self._after_token(sequence, text)

    def _tell(self, sequence: Sequence, deltas: Iterable[TextDelta]) -> None:
        self._events += [(sequence.generation_id, delta) for delta in deltas]

    def _after_token(self, sequence: Sequence, text: AnswerText) -> None:
        """Decide whether the generation goes on."""
        if text.stopped:
            self._finish(sequence, "stop", stop_sequence=text.stop_sequence)
        elif sequence.matcher is not None and sequence.matcher.finished:
            self._finish(sequence, "stop")
        elif sequence.generated >= sequence.prepared.max_tokens:
            self._finish(sequence, "length")
        elif sequence.length >= self._ledger.room:
            self._finish(sequence, "length", detail="context_full")

    # ----------------------------------------------------------------------------- endings

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_sequence: str | None = None,
        detail: str | None = None,
    ) -> None:
        text = sequence.text
        if text is not None and reason != "cancelled":
            self._tell(sequence, text.finish())
        usage = Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=sequence.generated,
            reasoning_tokens=text.reasoning_tokens if text is not None else 0,
            thinking_closed_by=text.thinking_closed_by if text is not None else None,
        )
        self._free(sequence)
        self._retire(sequence, Finished(reason, usage, stop_sequence, detail, sequence.index))

    def _fail(self, generation_id: int, message: str, *, device_is_lost: bool = False) -> None:
        """End all of a generation's answers that have not ended, with one failure for all."""
        answers = self._answers(generation_id)
        for sequence in answers:
            self._free(sequence, device_is_lost=device_is_lost)
        for sequence in answers:
            self._retire(sequence, Failed(message) if sequence is answers[0] else None)

    def _free(self, sequence: Sequence, *, device_is_lost: bool = False) -> None:
        """Give back what it holds in the engine. Comes before its ending is told: should the
        device refuse, then that error is its one ending."""
        sampler, sequence.sampler = sequence.sampler, None
        if sampler is not None:
            sampler.close()
        if sequence.seq_id is not None:
            if not device_is_lost:
                self._runner.rewind(sequence.seq_id, 0)
            self._free_rows.append(sequence.seq_id)
            sequence.seq_id = None

    def _retire(self, sequence: Sequence, ending: Finished | Failed | None) -> None:
        """``ending``: what is told of it; ``None`` where another answer's failure says it all."""
        generation_id = sequence.generation_id
        del self._sequences[generation_id, sequence.index]
        sequence.enter(SequenceState.RETIRED)
        if ending is not None:
            self._events.append((generation_id, ending))
        if not self._answers(generation_id):
            self._events.append((generation_id, Retired()))

    # --------------------------------------------------------------------------- inspection

    def check_idle(self) -> None:
        """With nothing running the cache must be empty; EngineError when cells leaked."""
        leaked = {
            row: length
            for row in range(self._ledger.slots)
            if (length := self._runner.sequence_length(row))
        }
        if leaked:
            raise EngineError(f"KV cells leaked while idle: {leaked}")
        if len(self._free_rows) != self._ledger.slots:
            raise EngineError("a sequence row leaked while idle")

    def statistics(self) -> EngineStatistics:
        decoding = sum(s.state is SequenceState.DECODING for s in self._sequences.values())
        return EngineStatistics(
            steps=self._steps,
            sequences_prefilling=len(self._sequences) - decoding,
            sequences_decoding=decoding,
            cells_used=self._cells_used(),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )

    def _cells_used(self) -> int:
        """What is in the cache; a prompt that several answers share counts once."""
        used, shared = 0, set()
        for (generation_id, _), sequence in self._sequences.items():
            used += sequence.computed
            if sequence.computed and generation_id in shared:
                used -= len(sequence.prompt)
            elif sequence.prepared.n > 1:
                shared.add(generation_id)
        return used


def _shares(prefilling: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """How many tokens of each prompt go into a step of ``budget`` prefill tokens, none empty.

    Even shares, so that a long prompt cannot starve a short one; what a short one leaves over goes
    to the longer ones. With more prompts than tokens the oldest get one each. Keeps the order.
    """
    shares: dict[int, int] = {}
    by_need = sorted(prefilling[:budget], key=lambda s: len(s.prompt) - s.computed)
    for place, sequence in enumerate(by_need):
        share = min(len(sequence.prompt) - sequence.computed, budget // (len(by_need) - place))
        shares[sequence.generation_id] = share
        budget -= share
    return [(s, shares[s.generation_id]) for s in prefilling if s.generation_id in shares]
