"""One llama.cpp batch, filled anew for each step: numpy arrays that llama.cpp reads in place."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np

from .model_runner import BatchSlice, EngineError
from .token_tree import depths_of


class LlamaBatch:
    """``capacity``: tokens. Owned by its runner, for the runner's life."""

    def __init__(self, capacity: int, most_outputs: int) -> None:
        self._capacity = capacity
        self._most_outputs = most_outputs
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._ids = np.ones(capacity, dtype=np.int32)
        self._output = np.zeros(capacity, dtype=np.int8)
        # seq_id is an array of pointers, each to the ids of its token: but in trees, to its one.
        self._one_each = (
            self._seq.ctypes.data + np.arange(capacity, dtype=np.uint64) * self._seq.itemsize
        ).astype(np.uint64)
        self._seq_pointers = self._one_each.copy()
        # The rows that are in trees, and their ids.
        self._trees: list[tuple[int, int, Any]] = []
        # Of each output, as the slices count them: its token's row, and its place among them all.
        self._rows: list[int] = []
        self._places: list[int] = []
        self.first_rows: list[int] = []
        """Of each slice of the last batch, its first token's row."""

        def pointer(array: Any, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        self.has_guesses = False
        """A slice has several outputs."""
        self.native = llama.llama_batch(
            n_tokens=0,
            token=pointer(self._token, llama.llama_token),
            embd=None,
            pos=pointer(self._pos, llama.llama_pos),
            n_seq_id=pointer(self._ids, ctypes.c_int32),
            seq_id=pointer(self._seq_pointers, ctypes.POINTER(llama.llama_seq_id)),
            logits=pointer(self._output, ctypes.c_int8),
        )
        """What llama_decode takes."""

    @property
    def capacity(self) -> int:
        """Tokens at most."""
        return self._capacity

    def __len__(self) -> int:
        """Tokens."""
        return int(self.native.n_tokens)

    def fill(
        self, slices: Sequence[BatchSlice], ids: Mapping[int, Sequence[Sequence[int]]] | None = None
    ) -> None:
        """Replace what it holds. Raises EngineError for slices that are empty or too many, and for
        more outputs than the context has room for.
        ``ids``: of slices that are trees, by their indexes, the sequence ids of each token.

        The tokens lie in the order of their sequences' ids, whatever the slices' order is: a
        partitioned cache computes a run of ids at once and everything else one after the other
        (measured: a step of 16 sequences in any order took seven times as long), and outputs
        that are out of order are copied into it.
        """
        for begin, end, _ in self._trees:
            self._ids[begin:end] = 1
            self._seq_pointers[begin:end] = self._one_each[begin:end]
        self._trees.clear()
        at = place = 0
        firsts = []
        outputs = 0
        self.has_guesses = False
        for item in slices:
            firsts.append(outputs)
            outputs += item.outputs
            if item.outputs > 1:
                self.has_guesses = True
        if outputs > self._most_outputs:  # llama.cpp would end the process
            raise EngineError(f"a batch of more than {self._most_outputs} outputs")
        self._rows = [0] * outputs
        self._places = [0] * outputs
        self.first_rows = [0] * len(slices)
        for index in batch_order(slices):
            item = slices[index]
            if not item.tokens:
                raise EngineError("an empty slice")
            self.first_rows[index] = at
            end = at + len(item.tokens)
            if end > self._capacity:
                raise EngineError(f"a batch of more than {self._capacity} tokens")
            if end == at + 1:  # a decoding sequence's: no arrays for one number
                self._token[at] = item.tokens[0]
                self._pos[at] = item.position
                self._seq[at] = item.seq_id
            else:
                self._token[at:end] = item.tokens
                self._pos[at:end] = np.arange(item.position, item.position + end - at)
                self._seq[at:end] = item.seq_id
                self._output[at:end] = 0
            if ids and index in ids:
                self._fill_tree(item, ids[index], at)
            if item.outputs == 1:
                self._output[end - 1] = 1
                self._rows[firsts[index]] = end - 1
                self._places[firsts[index]] = place
                place += 1
            elif not item.outputs:
                self._output[end - 1] = 0
            elif item.outputs > len(item.tokens):
                raise EngineError("more outputs than tokens")
            else:
                self._fill_outputs(firsts[index], item.outputs, end, place)
                place += item.outputs
            at = end
        self.native.n_tokens = at

    def _fill_tree(self, item: BatchSlice, ids: Sequence[Sequence[int]], at: int) -> None:
        """Positions and ids of a tree's tokens, from row ``at`` on."""
        assert item.parents is not None
        end = at + len(item.tokens)
        self._pos[at:end] = [item.position + depth for depth in depths_of(item.parents)]
        counts = [len(each) for each in ids]
        flat = np.array([seq_id for each in ids for seq_id in each], dtype=np.int32)
        address = flat.ctypes.data
        self._ids[at:end] = counts
        firsts = accumulate(counts[:-1], initial=0)
        self._seq_pointers[at:end] = [address + flat.itemsize * first for first in firsts]
        self._trees.append((at, end, flat))

    def _fill_outputs(self, first: int, count: int, end: int, place: int) -> None:
        """Want those of the ``count`` tokens before row ``end``."""
        self._output[end - count : end] = 1
        self._rows[first : first + count] = range(end - count, end)
        self._places[first : first + count] = range(place, place + count)

    @property
    def outputs(self) -> int:
        """How many there are."""
        return len(self._rows)

    def row(self, output: int) -> int:
        """The row whose logits belong to ``output``. EngineError if there is no such one."""
        self.place(output)
        return self._rows[output]

    def place(self, output: int) -> int:
        """Where ``output`` is among llama.cpp's. EngineError if there is no such one."""
        if not 0 <= output < len(self._places):
            raise EngineError(f"no logits for output {output}")
        return self._places[output]


def batch_order(slices: Sequence[BatchSlice]) -> list[int]:
    """The slices' indexes in the order in which their tokens lie in a batch."""
    return sorted(range(len(slices)), key=lambda index: slices[index].seq_id)
