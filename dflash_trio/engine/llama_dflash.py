"""Drafts of the DFlash kind: a whole block of tokens in one pass of a small model.

The draft attends to what its target's layers had for the tokens so far (*features*, from
``LayerInputs``) and to a block: the sequence's last token, and a mask for each token to guess.
Features enter the draft's cache by a batch of their own (*injection*), right before a block is
decoded; until then they wait on the host (``PendingRows``). The block's own cells are dropped.

Three forms, told by the file:

* plain: the largest logit at each mask is the guess;
* DFlash2: a selector rates pairs of candidates of neighbouring positions, and the guess is the
  greedy walk through them;
* DSpark: logits are corrected by the token guessed before, inside the graph; most of these guess
  a token at the anchor, the last token's own place, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np
from attrs import define

from .context_size import MOST_PENDING_BYTES, draft_batch
from .drafting.draft_tree import Ranking
from .drafting.provider import Wanted
from .llama_draft_abi import (
    LayerInputs,
    keep_lattice,
    read_lattice,
    selector_candidates,
    target_layers,
)
from .llama_draft_context import DraftBatch, DraftContext, DraftSpec
from .llama_features import PendingRows
from .llama_top_tokens import top_tokens
from .model_runner import BatchSlice

T = TypeVar("T")

ALTERNATIVES = 8
"""Tokens at each place that a tree is made of."""
DRAFTS_AWAY = 256
"""Steps without a guess, after which nobody is expected to ask for one soon."""


@define
class _Row:
    """What the draft has of one sequence."""

    pending: PendingRows
    begin: int = 0
    end: int = 0
    """Positions in the draft's cache, without the pending ones that follow."""
    known: int = 0
    """All of it ends here."""


class DFlashProvider:
    """A DFlash draft for one target. Belongs to the thread of its target's runner."""

    caught_up_seconds = 0.0
    looks_at_steps = True
    matched = ()

    def __init__(
        self,
        target: Any,
        spec: DraftSpec,
        *,
        on_progress: Callable[[float], None] = lambda _fraction: None,
        stopped: threading.Event | None = None,
        batch_rows: Callable[[Sequence[BatchSlice]], list[int]],
        steady_shapes: bool | None = None,
    ) -> None:
        """``target``: the native context of the model. Loads; raises as DraftContext does.

        ``steady_shapes``: inject batches of one size, with rows in vain; by default on a GPU. A
        CUDA graph is replayed for batches of one size and captured anew for another, which takes
        longer than those rows. ``batch_rows``: of each slice of the target's last batch, its first
        token's row.
        """
        self._batch_rows = batch_rows
        self._context = DraftContext(
            spec, on_progress=on_progress, stopped=stopped or threading.Event()
        )
        self._steady_shapes = not self._context.on_cpu if steady_shapes is None else steady_shapes
        self._inputs: LayerInputs | None = None
        try:
            self._make(target, spec)
        except BaseException:
            self.close()
            raise

    def _make(self, target: Any, spec: DraftSpec) -> None:
        context, file, slots = self._context, spec.file, spec.context.slots
        model = context.model
        self._candidates = selector_candidates(model)
        self._kind, self._longest = file.kind, file.longest
        # Where a token is guessed at the last one's own place, none is skipped.
        self._skipped = file.block - file.longest
        self._mask = int(llama.llama_vocab_mask(llama.llama_model_get_vocab(model)))
        capacity = draft_batch(slots, file.block)
        context.make_context(
            # llama.cpp wants room for an output of every row.
            batch=max(capacity, slots),
            microbatch=capacity,
            outputs=max(capacity, slots),
            target=target,
        )
        llama.llama_set_causal_attn(
            context.native, context.metadata("dflash.attention.causal") == "true"
        )
        if self._candidates:
            keep_lattice(context.native)
        self._width = int(llama.llama_model_n_embd(model))
        self._inputs = LayerInputs(target, target_layers(model))
        values = self._inputs.row_values
        dimensions = llama.llama_model_rope_type(model) == llama.LLAMA_ROPE_TYPE_MROPE
        self._batch = DraftBatch(capacity, values, sections=4 if dimensions else 1)
        # Of blocks, which mostly are as they were but for the last tokens and where they stand.
        self._blocks = DraftBatch(capacity)
        self._blocks_shape: tuple[int, list[int]] = (0, [])
        """Tokens of each, and their rows."""
        self._rows = [_Row(PendingRows(values)) for _ in range(slots)]
        self._steps_unasked = 0

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def longest(self) -> int:
        return self._longest

    # -------------------------------------------------------------------------- proposing

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        read = self._walk_lattice if self._candidates else self._likeliest
        blocks = self._draft(wanted, read)
        return [
            [] if tokens is None else tokens[: each.limit]
            for tokens, each in zip(blocks, wanted, strict=True)
        ]

    def rank(self, wanted: Sequence[Wanted]) -> list[Ranking | None]:
        return self._draft(wanted, self._rank_lattice if self._candidates else self._rank_logits)

    def _draft(
        self, wanted: Sequence[Wanted], read: Callable[[int, int], list[T]]
    ) -> list[T | None]:
        """What ``read`` makes of each one's block; it is told the tokens of all blocks, and of one.
        ``None``: the draft does not know enough of it."""
        self._steps_unasked = 0
        guesses: list[T | None] = [None for _ in wanted]
        ready = [
            index
            for index, each in enumerate(wanted)
            if len(each.tokens) > 1 and self._rows[each.row].known == len(each.tokens) - 1
        ]
        if not ready:
            return guesses
        # In the order of rows, which a partitioned cache computes at once.
        ready.sort(key=lambda index: wanted[index].row)
        self._inject([wanted[index].row for index in ready])
        ready = [i for i in ready if self._rows[wanted[i].row].end == len(wanted[i].tokens) - 1]
        # One length for all: convolutions and corrections run over equal blocks.
        longest = min(self._longest, max((wanted[i].limit for i in ready), default=0))
        block = longest + self._skipped
        at_once = max(1, self._batch.capacity // block) if block else 1
        for begin in range(0, len(ready), at_once):
            some = ready[begin : begin + at_once]
            found = self._decode_blocks([wanted[index] for index in some], block, read)
            for index, guess in zip(some, found, strict=False):
                guesses[index] = guess
        return guesses

    def _decode_blocks(
        self, wanted: Sequence[Wanted], block: int, read: Callable[[int, int], list[T]]
    ) -> list[T]:
        """Empty: there are no cells for the blocks."""
        batch, count = self._blocks, len(wanted) * block
        shape = block, [each.row for each in wanted]
        if shape != self._blocks_shape:
            self._blocks_shape = shape
            batch.tokens[:count] = self._mask
            batch.rows[:count] = np.repeat(shape[1], block)
            # All or none: of a graph that computes logits for every token, llama.cpp copies as many
            # rows as there are outputs, from the first one on.
            batch.outputs[:count] = 0 if self._candidates else 1
        for at, each in zip(range(0, count, block), wanted, strict=True):
            start = len(each.tokens) - 1
            batch.tokens[at] = each.tokens[start]
            batch.positions[at : at + block] = range(start, start + block)
        found = read(count, block) if self._context.decode(batch.of_tokens(count)) else []
        self._forget_after(wanted)
        return found

    def _likeliest(self, count: int, block: int) -> list[list[int]]:
        """At each place the token with the largest logit."""
        logits = self._context.logits(count)
        # A block at a time: of a part of all rows numpy would make a copy first.
        return [
            logits[at + self._skipped : at + block].argmax(axis=1).tolist()
            for at in range(0, count, block)
        ]

    def _rank_logits(self, count: int, block: int) -> list[Ranking]:
        """At each place the likeliest tokens, whatever comes before. A DSpark's, whose logits are
        corrected by its own best guess before, are taken to hold for others there, too."""
        logits = self._context.logits(count)
        ranked = []
        for begin in range(0, count, block):
            places = top_tokens(logits[begin + self._skipped : begin + block], ALTERNATIVES)
            ranked.append(Ranking([tokens for tokens, _ in places], [[ps] for _, ps in places]))
        return ranked

    def _rank_lattice(self, count: int, block: int) -> list[Ranking]:
        """A selector's candidates at each place, with its scores as logits: of each after each."""
        top, ranked = self._candidates, []
        for rows in self._lattice(count, block):
            scores = rows[1:, top : top + top * top].reshape(-1, top, top).astype(np.float64)
            scores -= scores.max(axis=2, keepdims=True)
            scores -= np.log(np.exp(scores).sum(axis=2, keepdims=True))
            chances = scores.tolist()
            # Before the first place stands the last token, as the first of its candidates.
            del chances[0][1:]
            ranked.append(Ranking(rows[1:, :top].astype(np.int64).tolist(), chances))
        return ranked

    def _lattice(self, count: int, block: int) -> Any:
        """float32[blocks, block, width]"""
        lattice = read_lattice(self._context.native, count, self._width)
        return lattice.reshape(-1, block, self._width)

    def _walk_lattice(self, count: int, block: int) -> list[list[int]]:
        """The greedy walk: at each position the best successor of the candidate chosen before."""
        top = self._candidates
        rows = self._lattice(count, block)
        chosen = np.zeros(len(rows), dtype=np.int64)
        each = np.arange(len(rows))
        walked = np.empty((len(rows), block - 1), dtype=np.int64)
        for position in range(1, block):
            row = rows[:, position]
            scores = row[:, top : top + top * top].reshape(-1, top, top)
            chosen = scores[each, chosen].argmax(axis=1)
            walked[:, position - 1] = row[each, chosen]
        found: list[list[int]] = walked.tolist()
        return found

    def _forget_after(self, wanted: Sequence[Wanted]) -> None:
        """Drop the blocks' own cells."""
        for each in wanted:
            self._context.rewind(each.row, len(each.tokens) - 1)

    # -------------------------------------------------------------------------- injection

    def _inject(self, rows: Sequence[int]) -> None:
        """Put the pending features of these rows, in ascending order, into the draft's cache."""
        block = self._longest + 1
        for row in rows:
            # Long ones, as prompts leave them, by themselves.
            while (pending := self._rows[row].pending).count > block:
                self._inject_parts([row], min(pending.count, self._batch.capacity))
        waiting = [row for row in rows if self._rows[row].pending.count]
        while waiting:
            longest = max(self._rows[row].pending.count for row in waiting)
            at_once = max(1, self._batch.capacity // longest)
            self._inject_parts(waiting[:at_once], longest)
            waiting = waiting[at_once:]

    def _inject_parts(self, rows: Sequence[int], most: int) -> None:
        """The first ``most`` pending tokens of each row, in one batch."""
        counts = [min(self._rows[row].pending.count, most) for row in rows]
        lengths = counts
        if len(rows) > 1 and not self._context.shares_cells:
            # A partitioned cache computes rows at once only if they bring equally many tokens.
            lengths = [most] * len(rows)
        block = self._longest + 1
        steady = self._steady_shapes and most < block and len(rows) * block <= self._batch.capacity
        fits = self._inject_batch(rows, counts, [block] * len(rows) if steady else lengths)
        if steady and not fits:
            # As at the end of the context, or of the cells.
            steady, fits = False, self._inject_batch(rows, counts, lengths)
        for row, count, length in zip(rows, counts, lengths, strict=True):
            if not fits:
                self._forget(row)
                self._context.rewind(row, 0)  # also what an aborted batch has left there
                continue
            state = self._rows[row]
            if state.begin == state.end:
                state.begin = state.pending.begin
            state.end = state.pending.begin + count
            state.pending.drop_first(count)
            if steady or count < length:
                self._context.rewind(row, state.end)

    def _inject_batch(
        self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]
    ) -> bool:
        """Of each row the first ``counts`` pending tokens, and what is made up to ``lengths``: that
        has to be cut off again. False: there are no cells for it."""
        batch, at = self._batch, 0
        for row, count, length in zip(rows, counts, lengths, strict=True):
            pending = self._rows[row].pending
            batch.features[at : at + count] = pending.features[:count]
            batch.features[at + count : at + length] = 0
            batch.positions[at : at + length] = np.arange(pending.begin, pending.begin + length)
            batch.rows[at : at + length] = row
            at += length
        return self._context.decode(batch.of_features(at))

    # --------------------------------------------------------------------- what rows hold

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        self._observe(
            batch,
            [
                slice(begin, begin + count)
                for begin, count in zip(self._batch_rows(batch), kept, strict=True)
            ],
            kept,
        )

    def nap(self, *, asleep: bool) -> None:
        if self._inputs is not None:
            self._inputs.keep(not asleep)

    def observe_trees(self, batch: Sequence[BatchSlice], paths: Sequence[Sequence[int]]) -> None:
        self._observe(
            batch,
            [
                [begin + place for place in path]
                for begin, path in zip(self._batch_rows(batch), paths, strict=True)
            ],
            [len(path) for path in paths],
        )

    def _observe(
        self, batch: Sequence[BatchSlice], rows: Sequence[slice | list[int]], kept: Sequence[int]
    ) -> None:
        """``rows``: of each slice, those of the batch that stay, and how many they are."""
        assert self._inputs is not None
        self._steps_unasked += 1
        self._inputs.read()
        for item, count, some in zip(batch, kept, rows, strict=True):
            if count:
                self._append(item.seq_id, item.position, some, count)
        self._keep_within_bounds()

    def _append(self, row: int, position: int, some: slice | list[int], count: int) -> None:
        assert self._inputs is not None
        state = self._rows[row]
        if position != state.known:
            # The draft's cache knows consecutive positions only: what comes before a gap is lost.
            self._forget(row)
        self._inputs.copy_rows(some, state.pending.extend(position, count))
        state.known = position + count

    @property
    def waiting_bytes(self) -> int:
        """Of buffers on the host with features in them."""
        return sum(state.pending.size_bytes for state in self._rows)

    def _keep_within_bounds(self) -> None:
        """Let buffers of no more than MOST_PENDING_BYTES wait: they are injected while drafts are
        asked for now and then; otherwise the row with the most loses its older half, and with it
        what came before."""
        while self.waiting_bytes > MOST_PENDING_BYTES:
            row = max(range(len(self._rows)), key=lambda r: self._rows[r].pending.size_bytes)
            pending = self._rows[row].pending
            if self._steps_unasked < DRAFTS_AWAY:
                self._inject([r for r, state in enumerate(self._rows) if state.pending.count])
                return
            known = self._rows[row].known
            half = pending.count - pending.count // 2
            self._clear_cache(row)
            pending.drop_first(half)
            self._rows[row].known = known if pending.count else 0

    def rewind(self, row: int, length: int) -> None:
        state = self._rows[row]
        if state.known <= length:
            return
        state.pending.cut(length)
        if state.end > length:
            if state.begin >= length:
                self._clear_cache(row)
            else:
                self._context.rewind(row, length)
                state.end = length
        state.known = state.pending.end if state.pending.count else state.end

    def copy(self, source: int, target: int, length: int) -> None:
        self._forget(target)
        theirs, state = self._rows[source], self._rows[target]
        if theirs.known < length:
            return  # less than the row holds: nothing to go on from
        if theirs.begin < min(theirs.end, length):
            self._context.copy(source, target, length)
            state.begin, state.end = theirs.begin, min(theirs.end, length)
        state.known = state.end
        pending = theirs.pending
        if pending.count and pending.begin < length:
            count = min(pending.count, length - pending.begin)
            state.pending.extend(pending.begin, count)[:] = pending.features[:count]
            state.known = pending.begin + count
            # Several answers to one prompt have a copy each.
            self._keep_within_bounds()

    def replaced(self, row: int) -> None:
        self._forget(row)

    def _forget(self, row: int) -> None:
        self._rows[row].pending.cut(0)
        self._clear_cache(row)
        self._rows[row].known = 0

    def _clear_cache(self, row: int) -> None:
        state = self._rows[row]
        if state.end > state.begin:
            self._context.rewind(row, 0)
        state.begin = state.end = 0

    def rests(self, row: int) -> None:
        """Nothing: who goes on from what the row holds goes on from the draft's, too."""

    def abort(self) -> None:
        self._context.abort()

    def rearm(self) -> None:
        self._context.rearm()

    def close(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None
        self._context.close()
