"""What sequences hold in the engine beside cells: rows of the cache, samplers, grammars.

They get it when they begin, share it where they begin alike, and give it back at their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from ..generation.request import MAX_SEED
from .answer_text import AnswerText
from .drafting.drafter import Drafter
from .model_runner import CacheRows, ModelRunner
from .prefix_cache import PrefixCache
from .sequence import Sequence, SequenceState, TokenView
from .verification import Run


class SequenceRows:
    """``rows``: the runner's, or what stands before them. ``sequences``: all that are not retired,
    as they come and go, by generation and the answer's index."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: CacheRows,
        cache: PrefixCache,
        drafter: Drafter | None,
        sequences: Mapping[tuple[int, int], Sequence],
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._cache = cache
        self._drafter = drafter
        self._sequences = sequences

    def answers(self, generation_id: int) -> list[Sequence]:
        """A generation's answers that are not retired."""
        return [s for (owner, _), s in self._sequences.items() if owner == generation_id]

    def start(self, sequence: Sequence) -> None:
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
        if self._drafter is not None:
            sequence.drafts = self._drafter.new_record(TokenView(sequence))

    def place(self, sequence: Sequence) -> None:
        """Give a sequence a row and what of its tokens is in the cache already, to prefill the
        rest. Waits where another answer of its generation computes the prompt for it."""
        first = self.answers(sequence.generation_id)[0]
        source, prompt = first.seq_id, len(sequence.prompt)
        if first is not sequence and (source is None or first.computed < prompt):
            return
        if first is not sequence and source is not None and self._may_copy(first, source):
            sequence.seq_id, sequence.computed = self._cache.take_row(), prompt
            self._rows.copy(source, sequence.seq_id, prompt)
        else:
            reuse = sequence.prepared.cache_prompt
            if not reuse and all(s.seq_id is None for s in self._sequences.values()):
                # It wants the same answer every time, and what is kept changes the last bits.
                self._cache.clear()
            tokens = sequence.tokens(0, sequence.to_prefill)
            if sequence.prepared.n > 1:
                tokens = tokens[: prompt + 1]  # the others begin where it ends
            sequence.seq_id, sequence.computed = self._cache.begin(tokens, reuse=reuse)
            if not sequence.answer:
                sequence.cached = sequence.computed
        sequence.enter(SequenceState.PREFILLING)
        if sequence.computed == sequence.to_prefill:
            sequence.enter(SequenceState.DECODING)

    def _may_copy(self, first: Sequence, row: int) -> bool:
        # What has gone on beyond its prompt cannot be cut back to it in every cache.
        prompt = len(first.prompt)
        return first.computed == prompt or self._rows.can_rewind(row, prompt)

    def start_others(self, first: Sequence) -> list[Sequence]:
        """Start the other answers of a generation whose prompt has just been computed."""
        if first.prepared.n == 1:
            return []
        others = [s for s in self.answers(first.generation_id) if s is not first]
        for other in others:
            self.start(other)
        return others

    def share_prompt(self, first: Sequence, others: Iterable[Sequence]) -> None:
        """A prompt has just been computed: for the other answers too, and for later requests."""
        assert first.seq_id is not None
        if first.prepared.cache_prompt:
            self._cache.computed(first.seq_id, first.prompt)
        for other in others:
            other.seq_id, other.computed = self._cache.take_row(), first.computed
            self._rows.copy(first.seq_id, other.seq_id, first.computed)
            other.cached = first.cached
            other.enter(SequenceState.DECODING)

    def drop_rejected(self, sequence: Sequence, runs: Iterable[Run]) -> None:
        """Take what was computed for it and does not count out of its row again: of a tree all but
        one path. Where there are no runs, all goes in a moment."""
        assert sequence.seq_id is not None
        for run in runs:
            if run.path is not None:
                self._rows.keep_path(sequence.seq_id, run.path)
                return
        self._rows.rewind(sequence.seq_id, sequence.computed)

    def give_row_back(self, sequence: Sequence, *, keep: bool) -> None:
        """``keep``: later prompts may begin with it."""
        row, sequence.seq_id = sequence.seq_id, None
        if row is not None:
            keep = keep and sequence.prepared.cache_prompt
            self._cache.end(row, sequence.tokens(0, sequence.computed), keep=keep)
            if self._drafter is not None:
                self._drafter.provider.rests(row)
        sequence.computed = 0

    def free(self, sequence: Sequence, *, device_is_lost: bool = False) -> None:
        """Give back what it holds in the engine. Comes before its ending is told: should the
        device refuse, then that error is its one ending."""
        sampler, sequence.sampler = sequence.sampler, None
        if sampler is not None:
            sampler.close()
        if device_is_lost and sequence.seq_id is not None:
            self._cache.lose(sequence.seq_id)
            sequence.seq_id = None
        # Of several answers the first is as good as any to go on from.
        self.give_row_back(sequence, keep=not sequence.index)
