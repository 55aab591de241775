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

from attrs import frozen

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
from ..generation.status import EngineStatistics
from .admission import KVLedger
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
        # Insertion order is arrival order: oldest first everywhere below.
        self._sequences: dict[int, Sequence] = {}
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
        """Take a submitted sequence. During a shutdown it is finished at once."""
        self._sequences[sequence.generation_id] = sequence
        if not sequence.prompt:
            # There would be nothing to take logits from. Its own failure, not the engine's.
            self._retire(sequence, Failed("the prompt has no tokens"))
        elif self._finalizing:
            self._finish(sequence, "length", detail=SERVER_SHUTDOWN)

    def cancel(self, generation_id: int) -> None:
        """Retire a sequence whose client is gone. Unknown ids are already retired: no-op."""
        sequence = self._sequences.get(generation_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def finalize_all(self) -> None:
        """End every generation now, properly, and each later one at once."""
        self._finalizing = True
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "length", detail=SERVER_SHUTDOWN)

    def fail_all(self, message: str) -> None:
        """The engine is lost: fail and retire everybody. Frees nothing on the device."""
        for sequence in list(self._sequences.values()):
            self._free(sequence, device_is_lost=True)
            self._retire(sequence, Failed(message))

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
        sequence.seq_id = self._free_rows.popleft()
        sequence.sampler = self._runner.new_sampler(sequence.prepared.sampling, sequence.prompt)
        sequence.enter(SequenceState.PREFILLING)

    def _has_next_cell(self, sequence: Sequence) -> bool:
        """Make sure that the sampled token may enter the cache; else the sequence ends here."""
        if sequence.length <= sequence.hold.cells:
            return True
        wanted = min(
            self._ledger.decode_headroom,
            self._ledger.max_ctx - sequence.hold.cells,
            sequence.prepared.max_tokens - sequence.generated,
        )
        if self._ledger.extend(sequence.hold, max(1, wanted)):
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
            if sequence.state is SequenceState.PREFILLING:
                sequence.enter(SequenceState.DECODING)
            assert sequence.sampler is not None
            token = sequence.sampler.sample(index)
            sequence.last_token = token
            sequence.generated += 1
            self._completion_tokens += 1
            self._after_token(sequence, token)

    def _after_token(self, sequence: Sequence, token: int) -> None:
        """Turn a sampled token into text and decide whether the generation goes on."""
        prepared = sequence.prepared
        vocabulary = self._runner.vocabulary
        if token in vocabulary.eog_tokens and not prepared.ignore_eos:
            self._finish(sequence, "stop")
            return
        text = sequence.detokenizer.push(vocabulary.piece(token))
        result = sequence.stop_matcher.push(text)
        self._events.append((sequence.generation_id, TextDelta(result.text, sequence.generated)))
        if result.matched is not None:
            self._finish(sequence, "stop", stop_sequence=result.matched)
        elif sequence.generated >= prepared.max_tokens:
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
        if stop_sequence is None and reason != "cancelled":
            # A match that did not complete was text after all.
            held = sequence.stop_matcher.push(sequence.detokenizer.finish()).text
            held += sequence.stop_matcher.finish()
            if held:
                self._events.append((sequence.generation_id, TextDelta(held, sequence.generated)))
        usage = Usage(prompt_tokens=len(sequence.prompt), completion_tokens=sequence.generated)
        self._free(sequence)
        self._retire(sequence, Finished(reason, usage, stop_sequence, detail))

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

    def _retire(self, sequence: Sequence, ending: Finished | Failed) -> None:
        del self._sequences[sequence.generation_id]
        sequence.enter(SequenceState.RETIRED)
        self._events.append((sequence.generation_id, ending))
        self._events.append((sequence.generation_id, Retired()))

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
            cells_used=sum(s.computed for s in self._sequences.values()),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )


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
