"""The scheduler: what goes into the next batch, and what comes out of it.

A step is three calls: :meth:`Scheduler.plan` chooses slices, the runner decodes them, and
``_take_outputs`` samples, detokenizes and decides who is done. A step has one token of every
running sequence, or parts of prompts, or both (continuous batching); between two tokens of who runs
prompts are worked off by a chunk at most, so no prompt, however long, delays others by more.

When the pool has no cell for somebody's next token, the newest generation is paused: it gives its
cells back and computes them again once there are enough, oldest first. The oldest always goes on.

Runs on the worker's thread only. Touches no clock, no channel and no event loop: events are
returned as data, which is what makes it testable without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence

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
from ..generation.status import EngineStatistics
from .admission import KVLedger
from .cell_needs import CellNeeds
from .draft_plan import add_proposals, drop_proposals
from .drafting.drafter import Drafter
from .drafting.record import counts_of
from .drafting.row_mirror import RowMirror
from .model_runner import CacheRows, DecodeOutcome, ModelRunner
from .prefill_shares import Planned, PrefillTurns, next_token, prompt_part
from .prefix_cache import PrefixCache
from .prefix_store import PrefixStore
from .sampling_ahead import sample_ahead
from .sequence import Sequence, SequenceState, cells_used
from .sequence_rows import SequenceRows
from .token_step import Ending, take_token
from .verification import Run, take_run

Delivery = list[tuple[int, Event]]
"""(generation id, event) pairs, oldest first."""


_SHUTDOWN = Ending("length", detail=SERVER_SHUTDOWN)
_NO_CELLS = Ending("length", detail="no_free_cells")


class Scheduler:
    """Runs one model's sequences.

    ``chunk``: prefill tokens between two tokens of a running sequence, at most. ``prefixes`` and
    ``prompts``: how many ended sequences and whole prompts are kept for later ones, ``store``:
    where they outlive the process. ``drafter``: guesses what decoding sequences say next; ``None``:
    nobody does. ``on_batch`` is told the generations of each batch and its tokens right before it
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
        drafter: Drafter | None = None,
        on_batch: Callable[[frozenset[int], int], None] = lambda _generations, _tokens: None,
        on_launch: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._turns = PrefillTurns(chunk, runner.batching)
        self._store = store
        self._drafter = drafter
        self._on_batch = on_batch
        self._on_launch = on_launch
        # Rows change through this alone, so that a draft hears of it.
        rows: CacheRows = runner
        if drafter is not None:
            rows = RowMirror(runner, drafter.provider)
        self._cache = PrefixCache(
            rows, slots=ledger.slots, prefixes=prefixes, prompts=prompts, store=store
        )
        # By generation and the answer's index. Insertion order is arrival order: oldest first
        # everywhere below.
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._held = SequenceRows(runner, rows, self._cache, drafter, self._sequences)
        self._needs = CellNeeds(ledger, self._held.answers)
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
        for sequence in self._held.answers(generation_id):
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
        could = bool(planned)
        while planned:
            self._on_batch(
                frozenset(item.sequence.generation_id for item in planned),
                sum(len(item.slice.tokens) for item in planned),
            )
            try:
                slices = [item.slice for item in planned]
                if self._drafter is not None:
                    self._drafter.step_begins()
                outcome = self._runner.decode(slices, self._on_launch)
            finally:
                self._on_batch(frozenset(), 0)
            self._steps += 1
            if outcome is DecodeOutcome.DONE:
                sample_ahead(planned, self._runner)
                if self._drafter is None:
                    self._take_outputs(planned)
                elif self._drafter.asleep:
                    self._drafter.missed(slices)
                    self._take_outputs(planned)
                else:
                    self._take_runs(planned, self._drafter)
                return True
            if outcome is DecodeOutcome.ABORTED:
                # Everybody in the batch is to go, which is in the inbox already.
                if self._drafter is not None:
                    self._drafter.step_is_lost()
                return True
            if self._drafter is not None and drop_proposals(planned):
                continue
            # What the ledger promised is in kept prefixes, or nowhere: no use in waiting then.
            if not self._cache.evict():
                victim = max(planned, key=lambda item: item.sequence.generation_id)
                planned.remove(victim)
                for answer in self._held.answers(victim.sequence.generation_id):
                    # Who waits for its prompt would wait for ever.
                    if answer is victim.sequence or answer.state is SequenceState.QUEUED:
                        self._finish(answer, _NO_CELLS)
        return could  # others were not in that step, or can go on without those that ended

    def plan(self) -> list[Planned]:
        """The next batch: a part of the prompts, or one token of every decoding sequence and what
        is guessed to follow it, or both, as prompts take turns. While there are prompts nothing is
        guessed: somebody waits for their first token."""
        self._resume()
        self._promise_cells()
        planned: list[Planned] = []
        prefilling: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.hold.paused:
                continue
            if sequence.state is SequenceState.QUEUED and not sequence.index:
                self._held.start(sequence)
                self._held.place(sequence)
            elif sequence.state is SequenceState.PAUSED:
                self._held.place(sequence)
            if sequence.state is SequenceState.PREFILLING:
                prefilling.append(sequence)
            elif sequence.state is SequenceState.DECODING:
                planned.append(Planned(sequence, next_token(sequence)))
        shares, decodes = self._turns.next(prefilling, decoding=bool(planned))
        if not decodes:
            planned.clear()
        if self._drafter is not None and planned and not prefilling:
            add_proposals(planned, self._drafter, self._needs)
        planned += [Planned(sequence, prompt_part(sequence, share)) for sequence, share in shares]
        return planned

    # ------------------------------------------------------------------------------- cells

    def _promise_cells(self) -> None:
        """See to it that every decoding sequence is promised the cell for its next token, the
        oldest first: where the pool is out, the newest generation gives way."""
        for sequence in list(self._sequences.values()):
            while sequence.state is SequenceState.DECODING:
                if self._needs.promise_next(sequence):
                    break
                self._give_way(sequence)

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
        for sequence in self._held.answers(newest):
            self._held.give_row_back(sequence, keep=False)
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
            wanted = sum(max(0, self._needs.headroom(other)) for other in running)
            if not self._needs.resume(sequence, wanted):
                return

    # ---------------------------------------------------------------------------- outputs

    def _take_outputs(self, planned: Iterable[Planned]) -> None:
        """Where nobody looks at the step but this."""
        output = -1
        for item in planned:
            sequence = item.sequence
            output += item.slice.outputs
            if sequence.state is SequenceState.RETIRED:
                continue  # failed together with another answer of its generation, just now
            sequence.computed += len(item.slice.tokens)
            if sequence.state is SequenceState.PREFILLING:
                self._prefilled(item)
            if not item.slice.outputs:
                continue
            answers = [sequence]
            if not sequence.answer:
                answers += self._held.start_others(sequence)
                self._held.share_prompt(sequence, answers[1:])
            for answer in answers:
                if not self._take_token(answer, output):
                    break

    def _prefilled(self, item: Planned) -> None:
        sequence = item.sequence
        self._prompt_tokens += len(item.slice.tokens)
        if sequence.computed == sequence.to_prefill:
            sequence.enter(SequenceState.DECODING)

    def _take_runs(self, planned: list[Planned], drafter: Drafter) -> None:
        """With a drafter. First everybody chooses tokens, then the draft looks at what stays of the
        batch, and only then are rows rewound, copied and given back."""
        taken: list[list[Run]] = []
        kept: list[int] = []
        failing: set[int] = set()
        first = 0
        for item in planned:
            sequence, outputs = item.sequence, item.slice.outputs
            if sequence.generation_id in failing:
                # Its cells go together with those of the answer that could not go on.
                stays, runs = 0, []
            elif sequence.state is SequenceState.PREFILLING or not outputs:
                stays = len(item.slice.tokens)
                runs = self._first_runs(sequence, first) if outputs else []
            else:
                run = self._run(sequence, first, item.slice.tokens[1:], item.slice.parents)
                stays, runs = run.kept, [run]
            failing.update(r.sequence.generation_id for r in runs if r.error is not None)
            kept.append(stays)
            taken.append(runs)
            first += outputs
        drafter.observe([item.slice for item in planned], kept, taken)
        for item, stays, runs in zip(planned, kept, taken, strict=True):
            self._settle(item, stays, runs)

    def _first_runs(self, first: Sequence, output: int) -> list[Run]:
        """The first tokens of all answers to a prompt."""
        runs: list[Run] = []
        for answer in (first, *self._held.start_others(first)):
            runs.append(self._run(answer, output))
            if runs[-1].error is not None:
                break
        return runs

    def _run(self, sequence: Sequence, output: int, *guesses: AbstractSequence[int] | None) -> Run:
        return take_run(sequence, output, self._runner, *guesses, room=self._ledger.room)

    def _settle(self, item: Planned, stays: int, runs: list[Run]) -> None:
        sequence = item.sequence
        if sequence.state is SequenceState.RETIRED:
            return
        sequence.computed += stays
        if sequence.state is SequenceState.PREFILLING:
            self._prefilled(item)
            if runs:
                others = [
                    s for s in self._held.answers(sequence.generation_id) if s is not sequence
                ]
                self._held.share_prompt(sequence, others)
        elif stays < len(item.slice.tokens) or item.slice.parents is not None:
            self._held.drop_rejected(sequence, runs)
        for run in runs:
            generation_id = run.sequence.generation_id
            self._events += [(generation_id, delta) for delta in run.deltas]
            if run.error is not None:
                self._completion_tokens += run.kept - 1
                self._fail_by_grammar(generation_id, run.error)
                return
            self._completion_tokens += run.kept
            if run.ending is not None:
                self._finish(run.sequence, run.ending)

    def _take_token(self, sequence: Sequence, output: int) -> bool:
        """False: the whole generation has failed."""
        generation_id = sequence.generation_id
        try:
            deltas, ending = take_token(sequence, output, self._runner, room=self._ledger.room)
        except ConstraintError as error:
            self._fail_by_grammar(generation_id, error)
            return False
        self._completion_tokens += 1
        self._events += [(generation_id, delta) for delta in deltas]
        if ending is not None:
            self._finish(sequence, ending)
        return True

    def _fail_by_grammar(self, generation_id: int, error: ConstraintError) -> None:
        failure = Failed(f"the answer's grammar: {error}", is_the_requests=True)
        self._fail(generation_id, failure)

    # ----------------------------------------------------------------------------- endings

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        text = sequence.text
        if text is not None and ending.reason != "cancelled":
            self._events += [(sequence.generation_id, delta) for delta in text.finish()]
        accepted, rejected = counts_of(sequence.drafts, drafting=self._drafter is not None)
        usage = Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=sequence.generated,
            cached_tokens=sequence.cached,
            reasoning_tokens=text.reasoning_tokens if text is not None else 0,
            thinking_closed_by=text.thinking_closed_by if text is not None else None,
            accepted_drafts=accepted,
            rejected_drafts=rejected,
        )
        self._held.free(sequence)
        self._retire(
            sequence,
            Finished(ending.reason, usage, ending.stop_sequence, ending.detail, sequence.index),
        )

    def _fail(self, generation_id: int, failure: Failed, *, device_is_lost: bool = False) -> None:
        """End all of a generation's answers that have not ended, with one failure for all."""
        answers = self._held.answers(generation_id)
        for sequence in answers:
            self._held.free(sequence, device_is_lost=device_is_lost)
        for sequence in answers:
            self._retire(sequence, failure if sequence is answers[0] else None)

    def _retire(self, sequence: Sequence, ending: Finished | Failed | None) -> None:
        """``ending``: what is told of it; ``None`` where another answer's failure says it all."""
        generation_id = sequence.generation_id
        del self._sequences[generation_id, sequence.index]
        sequence.enter(SequenceState.RETIRED)
        if ending is not None:
            self._events.append((generation_id, ending))
        if not self._held.answers(generation_id):
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
            drafts=self._drafter.statistics() if self._drafter is not None else None,
        )
