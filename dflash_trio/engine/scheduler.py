"""The scheduler: what goes into the next batch, and what comes out of it.

A step is three calls: :meth:`Scheduler.plan` chooses slices, the runner decodes them, and
``_take_outputs`` samples, detokenizes and decides who is done. Every running sequence gets one
token a step, and prompts share the rest of the batch chunk by chunk (continuous batching), so
a long prompt delays its neighbours by one chunk at most.

When the pool has no cell for somebody's next token, the newest generation is paused: it gives its
cells back and computes them again once there are enough, oldest first. The oldest always goes on.

Runs on the worker's thread only. Touches no clock, no channel and no event loop: events are
returned as data, which is what makes it testable without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from ..generation.constraint import ConstraintError
from ..generation.events import (
    SERVER_SHUTDOWN,
    Event,
    Failed,
    Finished,
    Retired,
    TextDelta,
    Usage,
)
from ..generation.request import MAX_SEED
from ..generation.status import EngineStatistics
from .admission import KVLedger
from .answer_text import AnswerText
from .model_runner import BatchSlice, DecodeOutcome, ModelRunner
from .prefill_shares import Planned, prefill_shares
from .prefix_cache import PrefixCache
from .prefix_store import PrefixStore
from .sequence import Sequence, SequenceState, cells_used
from .token_step import Ending, take_token

Delivery = list[tuple[int, Event]]
"""(generation id, event) pairs, oldest first."""


_SHUTDOWN = Ending("length", detail=SERVER_SHUTDOWN)
_NO_CELLS = Ending("length", detail="no_free_cells")


class Scheduler:
    """Runs one model's sequences.

    ``chunk``: prefill tokens in one step, shared by all prompts. ``prefixes`` and ``prompts``: how
    many ended sequences and whole prompts are kept for later ones, ``store``: where they outlive
    the process. ``on_batch`` is told the generations of each batch and its tokens right before it
    is decoded, and the empty set right after: meanwhile their tokens are on the device.
    ``on_launch``: the device has a batch and has not computed it yet, on devices of that kind.
    """

    def __init__(
        self,
        runner: ModelRunner,
        ledger: KVLedger,
        *,
        chunk: int,
        prefixes: int = 0,
        prompts: int = 0,
        store: PrefixStore | None = None,
        on_batch: Callable[[frozenset[int], int], None] = lambda _generations, _tokens: None,
        on_launch: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._chunk = chunk
        self._store = store
        self._on_batch = on_batch
        self._on_launch = on_launch
        self._cache = PrefixCache(
            runner, slots=ledger.slots, prefixes=prefixes, prompts=prompts, store=store
        )
        # By generation and the answer's index. Insertion order is arrival order: oldest first
        # everywhere below.
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._events: Delivery = []
        self._finalizing = False
        self._steps = 0
        self._pauses = 0
        self._prompt_tokens = self._completion_tokens = 0

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
            self._fail(sequence.generation_id, Failed("the prompt has no tokens"))
        elif self._finalizing:
            for answer in (sequence, *siblings):
                self._finish(answer, _SHUTDOWN)

    def cancel(self, generation_id: int) -> None:
        """Retire a generation whose client is gone. Unknown ids are already retired: no-op."""
        for sequence in self._answers(generation_id):
            self._finish(sequence, Ending("cancelled"))

    def finalize_all(self) -> None:
        """End every generation now, properly, and each later one at once."""
        self._finalizing = True
        for sequence in list(self._sequences.values()):
            self._finish(sequence, _SHUTDOWN)

    def fail_all(self, message: str) -> None:
        """The engine is lost: fail and retire everybody. Frees nothing on the device."""
        for generation_id in dict.fromkeys(generation for generation, _ in self._sequences):
            self._fail(generation_id, Failed(message), device_is_lost=True)

    def _answers(self, generation_id: int) -> list[Sequence]:
        """A generation's answers that are not retired."""
        return [s for (owner, _), s in self._sequences.items() if owner == generation_id]

    @property
    def only_text_waits(self) -> bool:
        """Nothing is to be told but more text: no first token, which somebody is waiting for, no
        end, and no capacity that comes free."""
        return all(isinstance(e, TextDelta) and e.tokens > 1 for _, e in self._events)

    def take_events(self) -> Delivery:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ----------------------------------------------------------------------------- one step

    def step(self) -> bool:
        """Plan, decode, take the outputs. False: nobody can go on now; everybody is paused until
        somebody outside gives cells back. Raises EngineError when the engine is lost."""
        planned = self.plan()
        while planned:
            self._on_batch(
                frozenset(item.sequence.generation_id for item in planned),
                sum(len(item.slice.tokens) for item in planned),
            )
            try:
                slices = [item.slice for item in planned]
                outcome = self._runner.decode(slices, self._on_launch)
            finally:
                self._on_batch(frozenset(), 0)
            self._steps += 1
            if outcome is DecodeOutcome.DONE:
                self._take_outputs(planned)
                return True
            if outcome is DecodeOutcome.ABORTED:
                # Everybody in the batch is to go, which is in the inbox already.
                return True
            # What the ledger promised is in kept prefixes, or nowhere: no use in waiting then.
            if not self._cache.evict():
                victim = max(planned, key=lambda item: item.sequence.generation_id)
                planned.remove(victim)
                for answer in self._answers(victim.sequence.generation_id):
                    # Who waits for its prompt would wait for ever.
                    if answer is victim.sequence or answer.state is SequenceState.QUEUED:
                        self._finish(answer, _NO_CELLS)
        return False

    def plan(self) -> list[Planned]:
        """The next batch: one token of every decoding sequence, then prompts by chunks."""
        self._resume()
        self._promise_cells()
        planned: list[Planned] = []
        prefilling: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.hold.paused:
                continue
            if sequence.state is SequenceState.QUEUED and not sequence.index:
                self._start(sequence)
                self._place(sequence)
            elif sequence.state is SequenceState.PAUSED:
                self._place(sequence)
            if sequence.state is SequenceState.PREFILLING:
                prefilling.append(sequence)
            elif sequence.state is SequenceState.DECODING:
                assert sequence.seq_id is not None
                token = (sequence.answer[-1],)
                planned.append(
                    Planned(sequence, BatchSlice(sequence.seq_id, sequence.computed, token, True))
                )
        for sequence, share in prefill_shares(prefilling, self._chunk):
            assert sequence.seq_id is not None
            begin, end = sequence.computed, sequence.computed + share
            # A sequence that goes on after a pause has its next token already.
            wants_output = end == sequence.to_prefill and not sequence.answer
            tokens = sequence.tokens(begin, end)
            planned.append(
                Planned(sequence, BatchSlice(sequence.seq_id, begin, tokens, wants_output))
            )
        return planned

    def _start(self, sequence: Sequence) -> None:
        """Give a sequence what it needs beside cells."""
        prepared = sequence.prepared
        sampling = prepared.sampling
        if sampling.seed is not None and sequence.index:
            # Each answer draws differently, and the same way every time.
            seed = (sampling.seed + sequence.index) % (MAX_SEED + 1)
            sampling = attrs.evolve(sampling, seed=seed)
        sequence.sampler = self._runner.new_sampler(sampling, sequence.prompt)
        sequence.text = AnswerText(prepared, sequence.index, self._runner.vocabulary)
        if prepared.constraint is not None:
            sequence.matcher = prepared.constraint.new_matcher()

    def _place(self, sequence: Sequence) -> None:
        """Give a sequence a row and what of its tokens is in the cache already, to prefill the
        rest. Waits where another answer of its generation computes the prompt for it."""
        first = self._answers(sequence.generation_id)[0]
        source, prompt = first.seq_id, len(sequence.prompt)
        if first is not sequence and (source is None or first.computed < prompt):
            return
        if first is not sequence and source is not None and self._may_copy(first, source):
            sequence.seq_id, sequence.computed = self._cache.take_row(), prompt
            self._runner.copy(source, sequence.seq_id, prompt)
        else:
            reuse = sequence.prepared.cache_prompt
            if not reuse and all(s.seq_id is None for s in self._sequences.values()):
                # It wants the same answer every time, and what is kept changes the last bits.
                self._cache.clear()
            tokens = sequence.tokens(0, sequence.to_prefill)
            sequence.seq_id, sequence.computed = self._cache.begin(tokens, reuse=reuse)
            if not sequence.answer:
                sequence.cached = sequence.computed
        sequence.enter(SequenceState.PREFILLING)
        if sequence.computed == sequence.to_prefill:
            sequence.enter(SequenceState.DECODING)

    def _may_copy(self, first: Sequence, row: int) -> bool:
        # What has gone on beyond its prompt cannot be cut back to it in every cache.
        prompt = len(first.prompt)
        return first.computed == prompt or self._runner.can_rewind(row, prompt)

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Start the other answers of a generation whose prompt has just been computed."""
        if first.prepared.n == 1:
            return []
        others = [s for s in self._answers(first.generation_id) if s is not first]
        for other in others:
            self._start(other)
            assert first.seq_id is not None
            other.seq_id, other.computed = self._cache.take_row(), first.computed
            self._runner.copy(first.seq_id, other.seq_id, first.computed)
            other.cached = first.cached
            other.enter(SequenceState.DECODING)
        return others

    # ------------------------------------------------------------------------------- cells

    def _promise_cells(self) -> None:
        """See to it that every decoding sequence is promised the cell for its next token, the
        oldest first: where the pool is out, the newest generation gives way."""
        for sequence in list(self._sequences.values()):
            while sequence.state is SequenceState.DECODING and not self._has_next_cell(sequence):
                self._give_way(sequence)

    def _has_next_cell(self, sequence: Sequence) -> bool:
        hold = sequence.hold
        shortfall = self._cells_needed(sequence) - hold.cells
        if shortfall <= 0:
            return True
        return self._ledger.extend(hold, max(shortfall, self._headroom(sequence))) >= shortfall

    def _cells_needed(self, sequence: Sequence) -> int:
        """Cells for all that a generation's answers have so far; the prompt counts once."""
        if sequence.prepared.n == 1:
            return sequence.length
        answers = self._answers(sequence.generation_id)
        return len(sequence.prompt) + sum(answer.generated for answer in answers)

    def _headroom(self, sequence: Sequence) -> int:
        """Cells that a sequence is promised beyond what it has, where there are as many."""
        left = sequence.prepared.max_tokens - sequence.generated
        room = self._ledger.max_ctx - sequence.length + 1
        return min(self._ledger.decode_headroom, room, left)

    def _give_way(self, claimant: Sequence) -> None:
        """Pause the newest generation, so that an older one has cells; or end ``claimant`` where
        it has all of the pool."""
        running = {s.generation_id: s.hold for s in self._sequences.values() if not s.hold.paused}
        newest = max(running)
        # Cells of requests that are not in the engine, whose output drains or who are about to
        # come, are worth waiting for.
        if len(running) == 1 and self._ledger.committed == claimant.hold.cells:
            self._finish(claimant, _NO_CELLS)
            return
        for sequence in self._answers(newest):
            self._give_row_back(sequence, keep=False)
            if sequence.state is not SequenceState.QUEUED:
                sequence.enter(SequenceState.PAUSED)
        self._ledger.pause(running[newest])
        self._pauses += 1

    def _resume(self) -> None:
        """Promise paused generations their cells again, the oldest first, as far as there are
        enough for everybody to go on for a while."""
        for sequence in list(self._sequences.values()):
            if not sequence.hold.paused:
                continue
            # What the running ones want next stays free: else it would be paused again at once.
            running = [s for s in self._sequences.values() if not s.hold.paused]
            wanted = sum(max(0, self._headroom(other)) for other in running)
            answers = len(self._answers(sequence.generation_id))
            needed = self._cells_needed(sequence) + answers * max(1, self._headroom(sequence))
            cells = min(needed, self._ledger.pool)
            if not self._ledger.try_resume(sequence.hold, cells, spare=wanted):
                return

    # ---------------------------------------------------------------------------- outputs

    def _take_outputs(self, planned: Iterable[Planned]) -> None:
        for index, item in enumerate(planned):
            sequence = item.sequence
            if sequence.state is SequenceState.RETIRED:
                continue  # failed together with another answer of its generation, just now
            sequence.computed += len(item.slice.tokens)
            if sequence.state is SequenceState.PREFILLING:
                self._prompt_tokens += len(item.slice.tokens)
                if sequence.computed == sequence.to_prefill:
                    sequence.enter(SequenceState.DECODING)
            if not item.slice.wants_output:
                continue
            answers = [sequence]
            if not sequence.answer:
                assert sequence.seq_id is not None
                if sequence.prepared.cache_prompt:
                    self._cache.computed(sequence.seq_id, sequence.prompt)
                answers += self._fork(sequence)
            for answer in answers:
                if not self._take_token(answer, index):
                    break

    def _take_token(self, sequence: Sequence, output: int) -> bool:
        """False: the whole generation has failed."""
        generation_id = sequence.generation_id
        try:
            deltas, ending = take_token(sequence, output, self._runner, room=self._ledger.room)
        except ConstraintError as error:
            failure = Failed(f"the answer's grammar: {error}", is_the_requests=True)
            self._fail(generation_id, failure)
            return False
        self._completion_tokens += 1
        self._events += [(generation_id, delta) for delta in deltas]
        if ending is not None:
            self._finish(sequence, ending)
        return True

    # ----------------------------------------------------------------------------- endings

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        text = sequence.text
        if text is not None and ending.reason != "cancelled":
            self._events += [(sequence.generation_id, delta) for delta in text.finish()]
        usage = Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=sequence.generated,
            cached_tokens=sequence.cached,
            reasoning_tokens=text.reasoning_tokens if text is not None else 0,
            thinking_closed_by=text.thinking_closed_by if text is not None else None,
        )
        self._free(sequence)
        self._retire(
            sequence,
            Finished(ending.reason, usage, ending.stop_sequence, ending.detail, sequence.index),
        )

    def _fail(self, generation_id: int, failure: Failed, *, device_is_lost: bool = False) -> None:
        """End all of a generation's answers that have not ended, with one failure for all."""
        answers = self._answers(generation_id)
        for sequence in answers:
            self._free(sequence, device_is_lost=device_is_lost)
        for sequence in answers:
            self._retire(sequence, failure if sequence is answers[0] else None)

    def _free(self, sequence: Sequence, *, device_is_lost: bool = False) -> None:
        """Give back what it holds in the engine. Comes before its ending is told: should the
        device refuse, then that error is its one ending."""
        sampler, sequence.sampler = sequence.sampler, None
        if sampler is not None:
            sampler.close()
        if device_is_lost and sequence.seq_id is not None:
            self._cache.lose(sequence.seq_id)
            sequence.seq_id = None
        # Of several answers the first is as good as any to go on from.
        self._give_row_back(sequence, keep=not sequence.index)

    def _give_row_back(self, sequence: Sequence, *, keep: bool) -> None:
        row, sequence.seq_id = sequence.seq_id, None
        if row is not None:
            keep = keep and sequence.prepared.cache_prompt
            self._cache.end(row, sequence.tokens(0, sequence.computed), keep=keep)
        sequence.computed = 0

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

    def store_idle(self, deadline: float) -> None:
        """See PrefixCache."""
        self._cache.store_idle(deadline)

    def check_idle(self) -> None:
        """See PrefixCache."""
        self._cache.check_idle()

    def statistics(self) -> EngineStatistics:
        states = [sequence.state for sequence in self._sequences.values()]
        decoding = states.count(SequenceState.DECODING)
        paused = states.count(SequenceState.PAUSED)
        return EngineStatistics(
            steps=self._steps,
            sequences_prefilling=len(states) - decoding - paused,
            sequences_decoding=decoding,
            sequences_paused=paused,
            pauses=self._pauses,
            cells_used=cells_used(self._sequences.values()),
            cells_cached=self._cache.cells,
            prefixes_cached=len(self._cache),
            prefixes_stored=self._store.entries if self._store is not None else 0,
            bytes_stored=self._store.size_bytes if self._store is not None else 0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cache.reused,
            completion_tokens=self._completion_tokens,
        )
