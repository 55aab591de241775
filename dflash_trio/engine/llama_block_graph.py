"""The graphs of :mod:`llama_block_pass`, one for each number of rows and cells.

The formula (float32 between the products; ``norm`` is the root mean square's, times its weight)::

    g      = norm(fuse @ features)                        of tokens that the target has computed
    K, V   = rope(norm(Wk @ g)), Wv @ g                   of each layer, into the cache
    x      = embeddings of the last token and of masks
    x     += Wo @ attention(rope(norm(Wq @ h)), K, V)     h = norm(x); K and V of the block, too
    x     += down @ swiglu(gate @ h, up @ h)              h = norm(x)
    logits = head @ norm(x)

What can be computed at once is: the injected keys and values of all layers are one product, as are
a layer's queries, keys and values. What a GPU makes one operation of, such as a norm, its weight
and a rotation, stands together, with nothing in between.
"""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np
from attrs import define, frozen

from .llama_block_weights import BlockWeights
from .llama_ggml import ALIGNMENT, F16, F32, I8, I32, I64, Device, Graph, Memory

INJECTED_AT_ONCE = 128
"""Tokens in a graph that only injects."""
MOST_GROUPS, FEWEST_GROUPS = 1024, 256
"""Of the vocabulary, of each of which the likeliest token is looked for; a GPU sorts no more than
so many at once, and with fewer, too many of the likeliest ones would be in one group."""
_LARGEST = 1e30
"""Of a logit."""


@frozen
class Key:
    """Of a graph: its rows, the cells of each that it looks at, and whether it ranks tokens.
    ``cells`` 0: it only injects."""

    first: int
    rows: int
    cells: int
    ranks: bool = False


@frozen
class Caches:
    """The draft's keys and values: float16[layers, slots * cells, values]."""

    keys: int
    values: int
    cells: int
    """Of a slot."""
    slots: int


@frozen
class Inputs:
    """Arrays on the host, where the device takes them from."""

    injected_cells: Any
    """int64[tokens]: where keys and values go, of all slots' cells."""
    injected_positions: Any
    """int32[tokens]"""
    features: Any
    """float32[tokens, features]"""
    cells: Any
    """int64[rows, block]"""
    positions: Any
    """int32[rows, block]"""
    embeddings: Any
    """float32[rows, block, width]"""
    mask: Any
    """float16[rows, block, cells]: 0 where a cell is looked at, and else minus infinity."""


@define
class Built:
    """A graph and what goes in and comes out."""

    graph: Graph
    inputs: Inputs
    size: int
    """Bytes of all inputs."""
    everything: int
    """A tensor over all of them."""
    likeliest: int = 0
    """int32[tokens]: of each token's logits the largest one's place; or of each group's."""
    chances: int = 0
    """float32[tokens, groups]: of each group's likeliest token."""
    order: int = 0
    """int32[tokens, groups]: the groups, the one with the likeliest token first. 0: there are none,
    and of the others ``likeliest`` and ``chances`` are int32 and float32[tokens, alternatives]."""


class GraphMaker:
    """Describes graphs for one draft. ``block``: tokens of a block."""

    def __init__(
        self, weights: BlockWeights, caches: Caches, *, block: int, alternatives: int
    ) -> None:
        self._weights, self._shape, self._caches = weights, weights.shape, caches
        self._block, self._alternatives = block, alternatives
        whole = weights.shape.vocabulary
        self.groups = max(n for n in range(1, MOST_GROUPS + 1) if whole % n == 0)
        if self.groups < FEWEST_GROUPS:
            self.groups = 0

    def input_bytes(self, rows: int, cells: int) -> int:
        """Of all inputs of a graph."""
        return sum(_padded(numbers, shape) for _, numbers, shape in self._inputs(rows, cells))

    def _inputs(self, rows: int, cells: int) -> list[tuple[int, Any, tuple[int, ...]]]:
        """Of each of ``Inputs``, as they lie behind each other: ggml's type, numpy's, and what its
        dimensions are."""
        width, block = self._shape.width, self._block
        injected = rows * block or INJECTED_AT_ONCE
        return [
            (I64, np.int64, (injected,)),
            (I32, np.int32, (injected,)),
            (F32, np.float32, (injected, self._shape.features)),
            (I64, np.int64, (rows, block)),
            (I32, np.int32, (rows, block)),
            (F32, np.float32, (rows, block, width)),
            (F16, np.float16, (rows, block, cells)),
        ]

    def possible_on(self, device: Device, slots: int) -> bool:
        """Whether the device can compute such graphs."""
        keys = [Key(0, 0, 0)]
        keys += [Key(0, rows, 256, ranks) for rows in {1, min(2, slots)} for ranks in (False, True)]
        host = np.zeros(max(self.input_bytes(key.rows, key.cells) for key in keys), dtype=np.uint8)
        for key in keys:
            graph = self.make(key, host, None).graph
            possible = graph.runs_on(device)
            graph.close()
            if not possible:
                return False
        return True

    def make(self, key: Key, host: Any, memory: Memory | None) -> Built:
        """``host``: uint8[...], and ``memory`` on the device: for the inputs, of as many bytes.
        ``None``: it is not to be computed."""
        shape, count = self._shape, key.rows * self._block
        graph = Graph(80 + 40 * shape.layers)
        offset, arrays, tensors = 0, [], []
        for kind, numbers, dimensions in self._inputs(key.rows, key.cells):
            exact = _bytes(numbers, dimensions)
            arrays.append(host[offset : offset + exact].view(numbers).reshape(dimensions))
            if exact:
                tensors.append(graph.new(kind, *_dimensions(kind, dimensions)))
                if memory is not None:
                    graph.place(tensors[-1], memory, offset)
            offset += _padded(numbers, dimensions)
        everything = graph.new(I8, offset)
        if memory is not None:
            graph.place(everything, memory, 0)
        built = Built(graph, Inputs(*arrays), offset, everything)
        cells, positions, features = tensors[:3]
        self._inject(graph, features, positions, cells, count or INJECTED_AT_ONCE)
        if count:
            self._guess(built, key, *tensors[3:])
        return built

    def _inject(self, graph: Graph, features: int, positions: int, cells: int, count: int) -> None:
        shape, weights, caches = self._shape, self._weights, self._caches
        fused = graph.mul_mat(weights.fuse, features)
        fused = graph.norm(fused, weights.fuse_norm, shape.epsilon)
        made = graph.mul_mat(weights.injection, fused)
        every = 4 * shape.layers * shape.kv
        heads = shape.layers * shape.heads_kv
        keys = graph.view(made, (shape.head, heads, count), (4 * shape.head, 2 * every))
        keys = graph.norm(keys, weights.injection_norm, shape.epsilon)
        keys = self._rotated(graph, keys, positions)
        # A layer's after the other.
        layered = shape.kv, count, shape.layers
        keys = graph.view(keys, layered, (every, 4 * shape.kv))
        values = graph.view(made, layered, (2 * every, 4 * shape.kv), every)
        graph.set_rows(caches.keys, keys, cells)
        graph.set_rows(caches.values, values, cells)

    def _rotated(self, graph: Graph, a: int, positions: int) -> int:
        shape = self._shape
        return graph.rope(
            a,
            positions,
            dimensions=shape.rope_dimensions,
            mode=shape.rope_mode,
            base=shape.rope_base,
        )

    def _guess(self, built: Built, key: Key, cells: int, positions: int, x: int, mask: int) -> None:
        graph, shape, weights = built.graph, self._shape, self._weights
        for layer, of in enumerate(weights.layers):
            h = graph.norm(x, of.attention_norm, shape.epsilon)
            attended = self._attention(graph, key, layer, h, mask, positions, cells)
            x = graph.add(graph.mul_mat(of.output, attended), x)
            h = graph.norm(x, of.ffn_norm, shape.epsilon)
            h = graph.swiglu(graph.mul_mat(of.gate_up, h))
            x = graph.add(graph.mul_mat(of.down, h), x)
        logits = graph.mul_mat(weights.head, graph.norm(x, weights.norm, shape.epsilon))
        if key.ranks:
            self._rank(built, logits, key.rows * self._block)
        else:
            built.likeliest = graph.result(graph.argmax(logits))

    def _attention(
        self, graph: Graph, key: Key, layer: int, h: int, mask: int, positions: int, cells: int
    ) -> int:
        shape, caches, of = self._shape, self._caches, self._weights.layers[layer]
        count, head = key.rows * self._block, 4 * shape.head
        both = shape.heads + shape.heads_kv
        made = graph.mul_mat(of.qkv, h)
        row = head * (both + shape.heads_kv)
        qk = graph.view(made, (shape.head, both, count), (head, row))
        qk = graph.norm(qk, of.qk_norm, shape.epsilon)
        qk = self._rotated(graph, qk, positions)
        keys = graph.view(qk, (shape.kv, count), (head * both,), head * shape.heads)
        values = graph.view(made, (shape.kv, count), (row,), head * both)
        looked_at = []
        for cache, some in ((caches.keys, keys), (caches.values, values)):
            size = 2 * shape.kv
            offset = size * caches.cells * caches.slots * layer
            whole = graph.view(cache, (shape.kv, caches.cells * caches.slots), (size,), offset)
            graph.set_rows(whole, some, cells)
            looked_at.append(
                graph.view(
                    cache,
                    (shape.head, key.cells, shape.heads_kv, key.rows),
                    (size, 2 * shape.head, size * caches.cells),
                    offset + size * caches.cells * key.first,
                )
            )
        q = graph.view(
            qk,
            (shape.head, shape.heads, self._block, key.rows),
            (head, head * both, head * both * self._block),
        )
        q = graph.permute(q, 0, 2, 1, 3)
        keys, values = looked_at
        attended = graph.attention(q, keys, values, mask, shape.head**-0.5)
        return graph.reshape(attended, shape.heads * shape.head, count)

    def _rank(self, built: Built, logits: int, count: int) -> None:
        """The likeliest tokens and their chances. Sorting a vocabulary takes a GPU as long as the
        rest of the draft does. So of each of its groups the likeliest is taken, and these are
        sorted: of two of the likeliest in one group, one is lost."""
        graph, whole, groups = built.graph, self._shape.vocabulary, self.groups
        # What is no number is none of the likeliest: on a GPU it would have no place at all, and
        # what lies before the first is read.
        logits = graph.clamp(logits, -_LARGEST, _LARGEST)
        if not groups:
            best = graph.top_k(logits, self._alternatives)
            # Before chances take the logits' place.
            built.likeliest = graph.result(best)
            chances = graph.reshape(graph.soft_max(logits), 1, whole, count)
            built.chances = graph.result(graph.get_rows(chances, best))
            return
        chances, every = graph.soft_max(logits), groups * count
        grouped = graph.reshape(chances, whole // groups, every)
        built.likeliest = graph.result(graph.argmax(grouped))
        best = graph.get_rows(
            graph.reshape(chances, 1, whole // groups, every),
            graph.reshape(built.likeliest, 1, every),
        )
        built.chances = graph.result(graph.reshape(best, groups, count))
        built.order = graph.result(graph.argsort(built.chances))


def _bytes(numbers: Any, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * int(np.dtype(numbers).itemsize)


def _padded(numbers: Any, shape: tuple[int, ...]) -> int:
    """Bytes up to where the next input may begin."""
    return -(-_bytes(numbers, shape) // ALIGNMENT) * ALIGNMENT


def _dimensions(kind: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As ggml counts them, the contiguous one first."""
    if kind == F16:  # the mask: the same for all heads
        rows, block, cells = shape
        return cells, block, 1, rows
    if kind == F32:
        return shape[-1], int(np.prod(shape[:-1]))
    return (int(np.prod(shape)),)
