"""A DFlash draft's whole guess as one graph that stays: injecting and guessing in one go.

llama.cpp computes a draft in two batches by turns, features and then a block, and builds the graph
of each anew, since it keeps the latest only. On a GPU, where each of the small model's operations
takes a microsecond or two, building and launching them takes several times as long as computing
them. Here both are one graph, of one size, which a GPU records once and replays: see
:mod:`llama_block_graph` for what it computes.

The cache has a row of cells for each slot, and a token is in the cell of its position: what is cut
off needs no forgetting, since nobody looks at it until it is overwritten. The last cell of a row
takes what is computed in vain.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np

from .context_size import padded
from .draft_file import DFLASH
from .drafting.draft_tree import Ranking
from .drafting.provider import Wanted
from .llama_abi import MissingSymbol
from .llama_block_graph import INJECTED_AT_ONCE, Built, Caches, GraphMaker, Key
from .llama_block_outputs import ALTERNATIVES
from .llama_block_weights import BlockWeights, read_block_weights
from .llama_draft_context import DraftContext, DraftSpec
from .llama_draft_rows import DraftRow
from .llama_ggml import F16, Device, Graph, Memory, Workspace, count_of, ggml, read_row
from .llama_model_params import find_devices
from .model_runner import EngineError

log = logging.getLogger("dflash_trio.engine")

ROWS_AT_ONCE = 8
"""Slots in one graph, of those that there are for all slots of a group. There is one for each slot
alone, too; with others for whatever rows are busy, each would be seen too rarely to be recorded."""
FEWEST_TOGETHER = 3
"""Of a group's slots that are computed at once, the others in vain."""
FEWEST_CELLS = 256
"""That a graph looks at; else a power of two times as many."""
MOST_GRAPHS = 64
"""That are kept."""
MADE_AT_FIRST = 40
"""Graphs that are made before anybody waits for them."""
MOST_EMBEDDINGS = 4096
"""Tokens whose embeddings are kept."""
_HIDDEN = -np.inf
_LEAST_CHANCE = 1e-9
"""What is less is none: its logarithm would be no number."""


class BlockPass:
    """A ``BlockComputer``: the cells of all slots, and the graphs that fill and read them. Used by
    one thread."""

    def __init__(
        self,
        weights: BlockWeights,
        device: Device,
        rows: list[DraftRow],
        *,
        max_ctx: int,
        block: int,
        skipped: int,
        aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes the device over. ``rows``: of all slots. ``max_ctx``: positions of a sequence,
        blocks included. ``block``: tokens of one, of which the first ``skipped`` guess nothing.
        ``aborted``: nothing more is to be computed. Raises EngineError where the device has no
        memory for it."""
        self._weights = weights
        self._shape = shape = weights.shape
        self._device = device
        self._ggml = ggml()
        self._rows, self._block, self._skipped = rows, block, skipped
        self._slots = slots = len(rows)
        self._aborted = aborted
        self._cells = padded(max_ctx + 1)
        self._vain = self._cells - 1
        """The cell of each row for what is computed in vain."""
        self._workspace: Workspace | None = None
        self._tensors = Graph(2)
        self._graphs: OrderedDict[Key, Built] = OrderedDict()
        self._embeddings: dict[int, Any] = {}
        # Whose inputs lie on the host, and of each of its rows the cells that are looked at.
        self._filled: tuple[Key, tuple[int, ...]] | None = None
        self._seen: dict[int, tuple[int, int]] = {}
        self._numbers = np.arange(self._cells * slots, dtype=np.int64)
        try:
            keys, values = (
                self._tensors.place(
                    self._tensors.new(F16, shape.kv, self._cells * slots, shape.layers),
                    device.allocate(2 * shape.kv * self._cells * slots * shape.layers),
                    0,
                )
                for _ in range(2)
            )
            self._caches = Caches(keys, values, self._cells, slots)
            self._maker = GraphMaker(weights, self._caches, block=block, alternatives=ALTERNATIVES)
            self.is_possible = self._maker.possible_on(device, slots)
            most = self._maker.input_bytes(min(ROWS_AT_ONCE, slots), self._cells)
            most = max(most, self._maker.input_bytes(0, 0))
            self._host = device.allocate_on_host(most)
            self._host_address = self._host.ctypes.data
            self._inputs: Memory = device.allocate(most)
            self._workspace = Workspace(device)
            # All that is ever wanted, so that no graph has to be made anew for a larger one.
            for ranks in (False, True):
                largest = self._maker.make(
                    Key(0, min(ROWS_AT_ONCE, slots), self._cells, ranks), self._host, self._inputs
                )
                self._workspace.place(largest.graph)
                largest.graph.close()
            width = max(self._maker.groups, ALTERNATIVES)
            self._outputs = device.allocate_on_host(3 * 4 * ROWS_AT_ONCE * block * width)
            self._outputs_address = self._outputs.ctypes.data
            self._mask_row = read_row(weights.embeddings, shape.mask)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent. Closes the device, too."""
        if self._device.backend is not None:
            self._device.wait()
        for built in self._graphs.values():
            built.graph.close()
        self._graphs.clear()
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None
        self._tensors.close()
        self._weights.graph.close()
        self._device.close()

    # ------------------------------------------------------------------------- computing

    def inject(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._inject(row, leaving=0)

    def _inject(self, row: int, *, leaving: int) -> None:
        """All pending features of a row but for the last ``leaving``."""
        state, built = self._rows[row], None
        while (count := min(state.pending.count - leaving, INJECTED_AT_ONCE)) > 0:
            if self._aborted():
                state.forget()
                return
            built = built or self._built(Key(0, 0, 0))
            inputs, first = built.inputs, self._cells * row
            begin = state.pending.begin
            inputs.features[:count] = state.pending.features[:count]
            inputs.features[count:] = 0
            inputs.injected_positions[:count] = self._numbers[begin : begin + count]
            inputs.injected_positions[count:] = 0
            inputs.injected_cells[:count] = self._numbers[first + begin : first + begin + count]
            inputs.injected_cells[count:] = first + self._vain
            self._filled = None
            self._compute(built)
            # The inputs are overwritten by the next one.
            self._device.wait()
            state.injected(count)

    def guesses(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        found: list[list[int]] = []
        for some, key in self._together(wanted, ranks=False):
            built = self._run(some, key)
            if built is None:
                break
            tokens = self._fetch(built.likeliest, 0, np.int32)
            self._device.wait()
            for each in some:
                at = (each.row - key.first) * self._block
                guess = tokens[at + self._skipped : at + self._block].tolist()
                if min(guess) < 0:  # a GPU's largest of no numbers
                    guess = guess[: next(i for i, token in enumerate(guess) if token < 0)]
                found.append(guess)
        return found

    def rankings(self, wanted: Sequence[Wanted]) -> list[Ranking]:
        found = []
        for some, key in self._together(wanted, ranks=True):
            built = self._run(some, key)
            if built is None:
                break
            tokens, chances = self._ranked(built)
            chances = np.log(np.maximum(chances, _LEAST_CHANCE))
            for each in some:
                at = (each.row - key.first) * self._block
                places = slice(at + self._skipped, at + self._block)
                logprobs = [[place] for place in chances[places].tolist()]
                found.append(Ranking(tokens[places].tolist(), logprobs))
        return found

    def _ranked(self, built: Built) -> tuple[Any, Any]:
        """int32 and float32[tokens, alternatives]"""
        size = len(self._outputs) // 3
        likeliest = self._fetch(built.likeliest, 0, np.int32)
        chances = self._fetch(built.chances, size, np.float32)
        order = self._fetch(built.order, 2 * size, np.int32) if built.order else None
        self._device.wait()
        if order is None:
            shape = -1, ALTERNATIVES
            likeliest, chances = likeliest.reshape(shape), chances.reshape(shape)
            order = np.argsort(-chances, axis=1)
            likeliest = np.take_along_axis(likeliest, order, axis=1)
            return likeliest, np.take_along_axis(chances, order, axis=1)
        groups = self._maker.groups
        best = order.reshape(-1, groups)[:, :ALTERNATIVES]
        within = np.take_along_axis(likeliest.reshape(-1, groups), best, axis=1)
        tokens = best * (self._shape.vocabulary // groups) + within
        return tokens, np.take_along_axis(chances.reshape(-1, groups), best, axis=1)

    def rewind(self, row: int, length: int) -> None:
        """Nothing: what stands there is overwritten before it is looked at."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a row the first ``length`` cells of another one."""
        if not length:
            return
        shape, graph = self._shape, Graph(4 * self._shape.layers)
        self._device.wait()
        size = 2 * shape.kv
        for cache in (self._caches.keys, self._caches.values):
            for layer in range(shape.layers):
                first = self._cells * self._slots * layer
                theirs, ours = (
                    graph.placed(
                        graph.view(
                            cache, (shape.kv, length), (size,), size * (first + self._cells * row)
                        )
                    )
                    for row in (source, target)
                )
                self._ggml.backend_tensor_copy(theirs, ours)
        graph.close()

    def _together(self, wanted: Sequence[Wanted], *, ranks: bool) -> list[tuple[list[Wanted], Key]]:
        """Those that are computed at once."""
        groups: dict[int, list[Wanted]] = {}
        for each in wanted:
            groups.setdefault(each.row // ROWS_AT_ONCE, []).append(each)
        found = []
        for group, some in groups.items():
            if len(some) < FEWEST_TOGETHER:
                parts = [(each.row, 1, [each]) for each in some]
            else:
                first = group * ROWS_AT_ONCE
                parts = [(first, min(ROWS_AT_ONCE, self._slots - first), some)]
            for first, rows, part in parts:
                longest = max(len(each.tokens) for each in part)
                cells = self._looked_at(longest - 1 + self._block)
                found.append((part, Key(first, rows, cells, ranks)))
        return found

    def _looked_at(self, needed: int) -> int:
        cells = FEWEST_CELLS
        while cells < needed:
            cells *= 2
        return min(cells, self._cells)

    def warm_up(self, *, ranks: bool) -> None:
        """Make the first graphs, those for short sequences, and compute each once: a GPU loads its
        programs as they are first used. What they compute means nothing."""
        keys = []
        for cells in (2 * FEWEST_CELLS, FEWEST_CELLS):
            for first in range(0, self._slots, ROWS_AT_ONCE):
                rows = min(ROWS_AT_ONCE, self._slots - first)
                keys.append(Key(first, rows, self._looked_at(cells), ranks))
                keys += [Key(first + i, 1, self._looked_at(cells), ranks) for i in range(rows)]
        for key in (Key(0, 0, 0), *keys[:MADE_AT_FIRST]):
            built = self._built(key)
            if key.rows:
                self._fill(built, key)
            else:
                built.inputs.injected_cells[:] = self._vain
                built.inputs.injected_positions[:] = 0
                built.inputs.features[:] = 0
            self._filled = None
            self._compute(built)
            self._device.wait()

    def _run(self, wanted: Sequence[Wanted], key: Key) -> Built | None:
        """Begin to compute these. ``None``: nothing more is to be computed."""
        for each in wanted:
            self._inject(each.row, leaving=self._block)
        if self._aborted():
            return None
        built, size, numbers = self._built(key), self._block, self._numbers
        inputs = built.inputs
        filled = key, tuple(each.row for each in wanted)
        if filled != self._filled:
            self._fill(built, key)
            self._filled = filled
        for each in wanted:
            state = self._rows[each.row]
            row, first = each.row - key.first, self._cells * each.row
            at, count, begin = row * size, state.pending.count, state.pending.begin
            inputs.features[at : at + count] = state.pending.features
            state.injected(count)
            end = begin + count
            inputs.injected_positions[at : at + count] = numbers[begin:end]
            inputs.injected_cells[at : at + count] = numbers[first + begin : first + end]
            inputs.injected_cells[at + count : at + size] = first + self._vain
            begin = len(each.tokens) - 1
            end = begin + size
            inputs.positions[row] = numbers[begin:end]
            inputs.cells[row] = numbers[first + begin : first + end]
            inputs.embeddings[row, 0] = self._embedding(each.tokens[begin])
            self._show(inputs.mask[row], row, state.begin, end)
        self._compute(built)
        return built

    def _show(self, mask: Any, row: int, begin: int, end: int) -> None:
        """Let a row look at these cells, and no others."""
        began, ended = self._seen.get(row, (-1, 0))
        if began != begin:
            mask[:] = _HIDDEN
            mask[:, begin:end] = 0
        elif ended < end:
            mask[:, ended:end] = 0
        else:
            mask[:, end:ended] = _HIDDEN
        self._seen[row] = begin, end

    def _fill(self, built: Built, key: Key) -> None:
        """What is the same in each computing of some rows, and whatever else may be computed, which
        has to be numbers: in vain as well."""
        inputs = built.inputs
        rows = self._cells * (key.first + np.arange(key.rows))
        inputs.injected_cells.reshape(key.rows, -1)[:] = (rows + self._vain)[:, None]
        inputs.injected_positions[:] = 0
        inputs.features[:] = 0
        inputs.cells[:] = (rows + self._vain)[:, None]
        inputs.positions[:] = 0
        inputs.embeddings[:] = self._mask_row
        # There is no mean of nothing.
        inputs.mask[:], inputs.mask[:, :, 0] = _HIDDEN, 0
        self._seen.clear()

    def _compute(self, built: Built) -> None:
        self._ggml.backend_tensor_set_async(
            self._device.backend, built.everything, self._host_address, 0, built.size
        )
        built.graph.compute(self._device)

    def _fetch(self, address: int, offset: int, kind: Any) -> Any:
        """A flat view of what a tensor holds: after the device was waited for, until the next
        fetching of it."""
        count = count_of(address)
        into = self._outputs[offset : offset + 4 * count].view(kind)
        self._ggml.backend_tensor_get_async(
            self._device.backend, address, self._outputs_address + offset, 0, 4 * count
        )
        return into

    def _embedding(self, token: int) -> Any:
        found = self._embeddings.get(token)
        if found is None:
            if len(self._embeddings) >= MOST_EMBEDDINGS:
                self._embeddings.clear()
            found = self._embeddings[token] = read_row(self._weights.embeddings, token)
        return found

    def _built(self, key: Key) -> Built:
        built = self._graphs.get(key)
        if built is not None:
            self._graphs.move_to_end(key)
            return built
        assert self._workspace is not None
        built = self._maker.make(key, self._host, self._inputs)
        try:
            grew = self._workspace.place(built.graph)
        except BaseException:
            built.graph.close()
            # The memory that the others were placed in may be gone.
            while self._graphs:
                self._graphs.popitem()[1].graph.close()
            raise
        while self._graphs and (grew or len(self._graphs) >= MOST_GRAPHS):
            self._graphs.popitem(last=False)[1].graph.close()
        self._graphs[key] = built
        return built


def open_block_pass(
    context: DraftContext, spec: DraftSpec, target: Any, rows: list[DraftRow], *, ranks: bool
) -> BlockPass | None:
    """For a draft whose model is loaded, and the native context of its target. It copies the
    draft's weights, and frees its model. ``ranks``: what it will be asked for.

    ``None``, and nothing has changed: only llama.cpp can compute this draft, or its cells are fewer
    than all slots might fill, or there is no room for it.
    """
    size, file = spec.context, spec.file
    if file.kind != DFLASH or not file.borrows or not size.has_all_cells:
        return None
    devices = find_devices(spec.devices)
    device: Device | None = None
    made: BlockPass | None = None
    try:
        device = Device(devices[0].handle if devices else None, spec.threads)
        weights = read_block_weights(context.model, llama.llama_get_model(target), device)
        if weights is not None:
            made = BlockPass(
                weights,
                device,
                rows,
                max_ctx=size.max_ctx,
                block=file.block,
                skipped=file.block - file.longest,
                aborted=lambda: context.aborted,
            )
            if made.is_possible:
                if devices:
                    made.warm_up(ranks=ranks)
                context.free_model()
                return made
    except MissingSymbol as missing:
        log.info("the draft %s is left to llama.cpp: %s", file.path, missing)
    except EngineError as error:
        log.warning("the draft %s is left to llama.cpp: %s", file.path, error)
    except BaseException:
        _close(made, device)
        raise
    _close(made, device)
    return None


def _close(made: BlockPass | None, device: Device | None) -> None:
    if made is not None:
        made.close()
    if device is not None:
        device.close()
