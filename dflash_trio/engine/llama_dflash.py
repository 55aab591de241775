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
from .context_size import MOST_PENDING_BYTES
from .drafting.draft_tree import Ranking
from .drafting.provider import Wanted
from .llama_block_batches import BlockBatches
from .llama_block_pass import BlockPass, open_block_pass
from .llama_draft_abi import LayerInputs, target_layers
from .llama_draft_context import DraftContext, DraftSpec
from .llama_draft_rows import BlockComputer, DraftRow
from .llama_features import PendingRows
from .model_runner import BatchSlice

T = TypeVar("T")

DRAFTS_AWAY = 256
"""Steps without a guess, after which nobody is expected to ask for one soon."""


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
        in_one_pass: bool | None = None,
        ranks: bool = False,
    ) -> None:
        """``target``: the native context of the model. Loads; raises as DraftContext does.

        ``steady_shapes``: inject batches of one size, with rows in vain; by default on a GPU. A
        CUDA graph is replayed for batches of one size and captured anew for another, which takes
        longer than those rows. ``in_one_pass``: inject and guess in one graph that stays, where
        that can compute the draft; by default on a GPU. ``ranks``: it is :meth:`rank` that will
        be asked, and not :meth:`propose`. ``batch_rows``: of each slice of the target's last
        batch, its first token's row.
        """
        self._batch_rows = batch_rows
        self._context = DraftContext(
            spec, on_progress=on_progress, stopped=stopped or threading.Event()
        )
        self._steady_shapes = not self._context.on_cpu if steady_shapes is None else steady_shapes
        self._in_one_pass = not self._context.on_cpu if in_one_pass is None else in_one_pass
        self._inputs: LayerInputs | None = None
        self._pass: BlockPass | None = None
        try:
            self._make(target, spec, ranks=ranks)
        except BaseException:
            self.close()
            raise

    def _make(self, target: Any, spec: DraftSpec, *, ranks: bool) -> None:
        context, file = self._context, spec.file
        self._kind, self._longest = file.kind, file.longest
        self._inputs = LayerInputs(target, target_layers(context.model))
        values = self._inputs.row_values
        self._rows = [DraftRow(PendingRows(values)) for _ in range(spec.context.slots)]
        self._steps_unasked = 0
        if self._in_one_pass:
            self._pass = open_block_pass(context, spec, target, self._rows, ranks=ranks)
        if self._pass is not None:
            self._computer: BlockComputer = self._pass
            return
        self._computer = BlockBatches(
            context, spec, target, self._rows, values=values, steady_shapes=self._steady_shapes
        )

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def steady(self) -> bool:
        return self._pass is not None

    @property
    def longest(self) -> int:
        return self._longest

    # -------------------------------------------------------------------------- proposing

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        blocks = self._draft(wanted, self._computer.guesses)
        return [
            [] if tokens is None else tokens[: each.limit]
            for tokens, each in zip(blocks, wanted, strict=True)
        ]

    def rank(self, wanted: Sequence[Wanted]) -> list[Ranking | None]:
        return self._draft(wanted, self._computer.rankings)

    def _draft(
        self, wanted: Sequence[Wanted], guess: Callable[[Sequence[Wanted]], list[T]]
    ) -> list[T | None]:
        """What ``guess`` finds for those of whom the draft knows all; ``None`` for the others."""
        self._steps_unasked = 0
        guesses: list[T | None] = [None for _ in wanted]
        ready = [
            index
            for index, each in enumerate(wanted)
            if len(each.tokens) > 1 and self._rows[each.row].known == len(each.tokens) - 1
        ]
        if ready and not self._context.aborted:
            # In the order of rows, which a partitioned cache computes at once.
            ready.sort(key=lambda index: wanted[index].row)
            found = guess([wanted[index] for index in ready])
            for index, each in zip(ready, found, strict=False):
                guesses[index] = each
        return guesses

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
                waiting = [r for r, state in enumerate(self._rows) if state.pending.count]
                self._computer.inject(waiting)
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
                self._computer.rewind(row, length)
                state.end = length
        state.known = state.pending.end if state.pending.count else state.end

    def copy(self, source: int, target: int, length: int) -> None:
        self._forget(target)
        theirs, state = self._rows[source], self._rows[target]
        if theirs.known < length:
            return  # less than the row holds: nothing to go on from
        if theirs.begin < min(theirs.end, length):
            self._computer.copy(source, target, length)
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
        self._clear_cache(row)
        self._rows[row].forget()

    def _clear_cache(self, row: int) -> None:
        state = self._rows[row]
        if state.end > state.begin:
            self._computer.rewind(row, 0)
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
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        self._context.close()
