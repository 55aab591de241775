"""A block draft's guesses by llama.cpp's own graphs: features in one batch, and a block of tokens
for each sequence in the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np

from .context_size import draft_batch
from .drafting.draft_tree import Ranking
from .drafting.provider import Wanted
from .llama_block_outputs import BlockOutputs
from .llama_draft_abi import keep_lattice, selector_candidates
from .llama_draft_context import DraftBatch, DraftContext, DraftSpec
from .llama_draft_rows import DraftRow
from .llama_metadata import metadata

T = TypeVar("T")


class BlockBatches:
    """A ``BlockComputer``. ``context``: the draft's, which becomes one of llama.cpp's here;
    ``target``: the native context whose model it borrows from; ``steady_shapes``: see
    ``DFlashProvider``. Raises ModelLoadError."""

    def __init__(
        self,
        context: DraftContext,
        spec: DraftSpec,
        target: Any,
        rows: list[DraftRow],
        *,
        values: int,
        steady_shapes: bool,
    ) -> None:
        """``values``: of a token's features."""
        self._context, self._rows, self._steady_shapes = context, rows, steady_shapes
        model, file = context.model, spec.file
        self._candidates = selector_candidates(model)
        self._longest = file.longest
        # Where a token is guessed at the last one's own place, none is skipped.
        self._skipped = file.block - file.longest
        self._mask = int(llama.llama_vocab_mask(llama.llama_model_get_vocab(model)))
        capacity = draft_batch(spec.context.slots, file.block)
        context.make_context(
            # llama.cpp wants room for an output of every row.
            batch=max(capacity, spec.context.slots),
            microbatch=capacity,
            outputs=max(capacity, spec.context.slots),
            target=target,
        )
        llama.llama_set_causal_attn(
            context.native, metadata(model, "dflash.attention.causal") == "true"
        )
        if self._candidates:
            keep_lattice(context.native)
        self._outputs = BlockOutputs(
            context,
            candidates=self._candidates,
            width=int(llama.llama_model_n_embd(model)),
            skipped=self._skipped,
        )
        dimensions = llama.llama_model_rope_type(model) == llama.LLAMA_ROPE_TYPE_MROPE
        self._batch = DraftBatch(capacity, values, sections=4 if dimensions else 1)
        # Of blocks, which mostly are as they were but for the last tokens and where they stand.
        self._blocks = DraftBatch(capacity)
        self._blocks_shape: tuple[int, list[int]] = (0, [])
        """Tokens of each, and their rows."""

    def rewind(self, row: int, length: int) -> None:
        self._context.rewind(row, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._context.copy(source, target, length)

    def close(self) -> None:
        """Nothing: the context is its owner's."""

    # --------------------------------------------------------------------------- guessing

    def guesses(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return self._all(wanted, self._outputs.guesses)

    def rankings(self, wanted: Sequence[Wanted]) -> list[Ranking]:
        return self._all(wanted, self._outputs.rankings)

    def _all(self, wanted: Sequence[Wanted], read: Callable[[int, int], list[T]]) -> list[T]:
        """``read`` is told the tokens of all blocks of a batch, and of one."""
        self.inject([each.row for each in wanted])
        # One length for all: convolutions and corrections run over equal blocks.
        longest = min(self._longest, max((each.limit for each in wanted), default=0))
        block = longest + self._skipped
        at_once = max(1, self._batch.capacity // block) if block else 1
        found: list[T] = []
        for begin in range(0, len(wanted), at_once):
            some = wanted[begin : begin + at_once]
            if any(self._rows[each.row].end != len(each.tokens) - 1 for each in some):
                break  # what was to be injected found no cells
            read_now = self._decode_blocks(some, block, read)
            found += read_now
            if not read_now:
                break
        return found

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
        for each in wanted:  # the blocks' own cells
            self._context.rewind(each.row, len(each.tokens) - 1)
        return found

    # -------------------------------------------------------------------------- injection

    def inject(self, rows: Sequence[int]) -> None:
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
            state = self._rows[row]
            if not fits:
                state.forget()
                self._context.rewind(row, 0)  # also what an aborted batch has left there
                continue
            state.injected(count)
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
