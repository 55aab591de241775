"""Graphs of one's own on a device, computed by the ggml that llama.cpp brings along.

llama.cpp builds the graph of each of its batches, and builds it anew where the next one is of
another kind. A graph that is made here stays: a device that records what it computes replays it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

# Before numpy, for the reason given in llama_runner.
import numpy as np
from attrs import frozen

from .llama_abi import _bind, bind_quick
from .model_runner import EngineError

F32, F16, I8, I32, I64 = 0, 1, 24, 26, 27
"""enum ggml_type"""
ALIGNMENT = 256
"""Bytes: more than any backend wants of a tensor's place."""
_PRECISION_F32 = 10
_DESCENDING = 1  # enum ggml_sort_order


class Tensor(ctypes.Structure):
    """The head of ``struct ggml_tensor``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


_P, _I, _L, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_F, _BOOL = ctypes.c_float, ctypes.c_bool

_QUICK: dict[str, tuple[Any, ...]] = {
    # result, arguments
    "ggml_init": (_P, _InitParams),
    "ggml_free": (None, _P),
    "ggml_tensor_overhead": (_Z,),
    "ggml_graph_overhead_custom": (_Z, _Z, _BOOL),
    "ggml_new_graph_custom": (_P, _P, _Z, _BOOL),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_graph_n_nodes": (_I, _P),
    "ggml_graph_node": (_P, _P, _I),
    "ggml_new_tensor": (_P, _P, _I, _I, _P),
    "ggml_set_output": (None, _P),
    "ggml_nbytes": (_Z, _P),
    "ggml_row_size": (_Z, _I, _L),
    "ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), _I),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_mul": (_P, _P, _P, _P),
    "ggml_add": (_P, _P, _P, _P),
    "ggml_rms_norm": (_P, _P, _P, _F),
    "ggml_rope_ext": (_P, _P, _P, _P, _P, *(_I,) * 3, *(_F,) * 6),
    "ggml_set_rows": (_P, _P, _P, _P, _P),
    "ggml_get_rows": (_P, _P, _P, _P),
    "ggml_swiglu": (_P, _P, _P),
    "ggml_soft_max": (_P, _P, _P),
    "ggml_clamp": (_P, _P, _P, _F, _F),
    "ggml_argmax": (_P, _P, _P),
    "ggml_top_k": (_P, _P, _P, _I),
    "ggml_argsort": (_P, _P, _P, _I),
    "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, *(_F,) * 3),
    "ggml_flash_attn_ext_set_prec": (None, _P, _I),
    "ggml_view_4d": (_P, _P, _P, *(_L,) * 4, *(_Z,) * 4),
    "ggml_reshape_4d": (_P, _P, _P, *(_L,) * 4),
    "ggml_permute": (_P, _P, _P, *(_I,) * 4),
    "ggml_gallocr_new": (_P, _P),
    "ggml_gallocr_free": (None, _P),
    "ggml_gallocr_get_buffer_size": (_Z, _P, _I),
    "ggml_backend_supports_op": (_BOOL, _P, _P),
    "ggml_backend_supports_buft": (_BOOL, _P, _P),
    "ggml_backend_get_default_buffer_type": (_P, _P),
    "ggml_backend_dev_host_buffer_type": (_P, _P),
    "ggml_backend_buffer_get_base": (_P, _P),
    "ggml_backend_buffer_get_type": (_P, _P),
    "ggml_backend_buffer_is_host": (_BOOL, _P),
    "ggml_backend_tensor_alloc": (_I, _P, _P, _P),
    "ggml_backend_view_init": (_I, _P),
    "ggml_backend_cpu_set_n_threads": (None, _P, _I),
    "ggml_backend_tensor_set_async": (None, _P, _P, _P, _Z, _Z),
    "ggml_backend_tensor_get_async": (None, _P, _P, _P, _Z, _Z),
}
# These take longer, or wait.
_SLOW: dict[str, tuple[Any, ...]] = {
    "ggml_backend_dev_init": (_P, _P, ctypes.c_char_p),
    "ggml_backend_dev_by_type": (_P, _I),
    "ggml_backend_free": (None, _P),
    "ggml_backend_buft_alloc_buffer": (_P, _P, _Z),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_buffer_clear": (None, _P, ctypes.c_uint8),
    "ggml_backend_tensor_set": (None, _P, _P, _Z, _Z),
    "ggml_backend_tensor_get": (None, _P, _P, _Z, _Z),
    "ggml_backend_tensor_copy": (None, _P, _P),
    "ggml_gallocr_alloc_graph": (_BOOL, _P, _P),
    "ggml_backend_graph_compute_async": (_I, _P, _P),
    "ggml_backend_synchronize": (None, _P),
}


class _Functions:
    """ggml's functions, by their names without the prefix. Raises MissingSymbol."""

    def __init__(self) -> None:
        for name, (result, *arguments) in _QUICK.items():
            setattr(self, name.removeprefix("ggml_"), bind_quick(name, result, *arguments))
        for name, (result, *arguments) in _SLOW.items():
            setattr(self, name.removeprefix("ggml_"), _bind(name, result, *arguments))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@functools.cache
def ggml() -> _Functions:
    return _Functions()


def tensor(address: int) -> Tensor:
    """What it is, without its values."""
    return Tensor.from_address(address)


def sizes(address: int) -> tuple[int, ...]:
    """Its four dimensions, the contiguous one first."""
    return tuple(tensor(address).ne)


def count_of(address: int) -> int:
    """Its values."""
    ne = tensor(address).ne
    return int(ne[0] * ne[1] * ne[2] * ne[3])


def read_bytes(address: int) -> Any:
    """uint8[...]: a copy of a tensor's values as they are stored, from whatever device."""
    size = ggml().nbytes(address)
    values = np.empty(size, dtype=np.uint8)
    ggml().backend_tensor_get(address, values.ctypes.data, 0, size)
    return values


def read_row(address: int, row: int) -> Any:
    """float32[ne0]: a row of a matrix of any type."""
    head, functions = tensor(address), ggml()
    width = int(head.ne[0])
    size = functions.row_size(head.type, width)
    stored = np.empty(size, dtype=np.uint8)
    functions.backend_tensor_get(address, stored.ctypes.data, row * int(head.nb[1]), size)
    if head.type == F32:
        return stored.view(np.float32)
    to_float = functions.get_type_traits(head.type).contents.to_float
    if not to_float:
        raise EngineError(f"ggml cannot read values of its type {head.type}")
    values = np.empty(width, dtype=np.float32)
    ctypes.CFUNCTYPE(None, _P, _P, _L)(to_float)(stored.ctypes.data, values.ctypes.data, width)
    return values


class Device:
    """A queue of work on one device, and memory there. Used and closed by one thread.

    ``handle``: ggml_backend_dev_t; ``None``: the CPU, with so many ``threads``.
    """

    def __init__(self, handle: int | None, threads: int = 1) -> None:
        functions = ggml()
        self._device = handle or functions.backend_dev_by_type(0)
        self.backend = functions.backend_dev_init(self._device, None)
        if not self.backend:
            raise EngineError("ggml cannot use the device")
        if not handle:
            functions.backend_cpu_set_n_threads(self.backend, threads)
        self._buffers: list[int] = []

    def allocate(self, size: int) -> Memory:
        """Memory there, all zero. Raises EngineError."""
        return self._allocate(ggml().backend_get_default_buffer_type(self.backend), size)

    def allocate_on_host(self, size: int) -> Any:
        """uint8[size] that the device reads and writes quickly."""
        kind = ggml().backend_dev_host_buffer_type(self._device)
        if not kind:
            return np.zeros(size, dtype=np.uint8)
        memory = self._allocate(kind, size)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(memory.base))

    def _allocate(self, kind: int, size: int) -> Memory:
        functions = ggml()
        buffer = functions.backend_buft_alloc_buffer(kind, size)
        if not buffer:
            raise EngineError(f"no {size} bytes are free on the device")
        self._buffers.append(buffer)
        functions.backend_buffer_clear(buffer, 0)
        return Memory(buffer, functions.backend_buffer_get_base(buffer))

    def reads(self, address: int) -> bool:
        """Whether a tensor lies where this device can use it."""
        functions, buffer = ggml(), tensor(address).buffer
        return bool(
            buffer
            and functions.backend_supports_buft(
                self.backend, functions.backend_buffer_get_type(buffer)
            )
        )

    def wait(self) -> None:
        """Until all of its work is done."""
        ggml().backend_synchronize(self.backend)

    def close(self) -> None:
        """Idempotent. Frees all memory on it."""
        if self.backend is not None:
            self.wait()
            for buffer in self._buffers:
                ggml().backend_buffer_free(buffer)
            self._buffers.clear()
            ggml().backend_free(self.backend)
            self.backend = None


@frozen
class Memory:
    """A piece of a device's memory."""

    buffer: int
    base: int
    """Its first byte's address, there."""


class Graph:
    """Tensors, and how each is made of others; addresses of ``struct ggml_tensor`` throughout.

    Made by one of the operations below, which are ggml's of the same names, placed by
    :class:`Workspace` or :meth:`place`, and computed as often as wanted. ``nodes``: as many as
    there may be.
    """

    def __init__(self, nodes: int) -> None:
        functions = ggml()
        size = 2 * nodes * functions.tensor_overhead()
        size += functions.graph_overhead_custom(nodes, False)
        self._ggml = functions
        self._context = functions.init(_InitParams(size, None, True))
        if not self._context:
            raise EngineError("out of memory")
        self.native = functions.new_graph_custom(self._context, nodes, False)

    def new(self, kind: int, *shape: int) -> int:
        """A tensor that has to be placed; the contiguous dimension comes first."""
        dimensions = (ctypes.c_int64 * len(shape))(*shape)
        found: int = self._ggml.new_tensor(self._context, kind, len(shape), dimensions)
        return found

    def place(self, address: int, memory: Memory, offset: int) -> int:
        """Give a tensor its memory: ``offset`` bytes, which are ALIGNED, behind the first."""
        code = self._ggml.backend_tensor_alloc(memory.buffer, address, memory.base + offset)
        if code:
            raise EngineError(f"a tensor cannot be placed ({code})")
        return address

    def placed(self, view: int) -> int:
        """A view of what has its place, to be used outside of the graph."""
        if self._ggml.backend_view_init(view):
            raise EngineError("a view cannot be placed")
        return view

    def result(self, address: int) -> int:
        """Compute this one, and keep it until the graph is computed again."""
        self._ggml.set_output(address)
        return self.expand(address)

    def expand(self, address: int) -> int:
        """Compute this one before whatever is added later."""
        self._ggml.build_forward_expand(self.native, address)
        return address

    def mul_mat(self, a: int, b: int) -> int:
        return int(self._ggml.mul_mat(self._context, a, b))

    def add(self, a: int, b: int) -> int:
        return int(self._ggml.add(self._context, a, b))

    def norm(self, a: int, weight: int, epsilon: float) -> int:
        """Root mean square, times ``weight``."""
        normed = self._ggml.rms_norm(self._context, a, epsilon)
        return int(self._ggml.mul(self._context, normed, weight))

    def rope(self, a: int, positions: int, *, dimensions: int, mode: int, base: float) -> int:
        """Rotary positions without scaling of any kind."""
        return int(
            self._ggml.rope_ext(
                *(self._context, a, positions, None),
                *(dimensions, mode, 0, base, 1.0, 0.0, 1.0, 32.0, 1.0),
            )
        )

    def set_rows(self, a: int, b: int, rows: int) -> int:
        return self.expand(int(self._ggml.set_rows(self._context, a, b, rows)))

    def get_rows(self, a: int, rows: int) -> int:
        return int(self._ggml.get_rows(self._context, a, rows))

    def swiglu(self, a: int) -> int:
        return int(self._ggml.swiglu(self._context, a))

    def clamp(self, a: int, least: float, most: float) -> int:
        return int(self._ggml.clamp(self._context, a, least, most))

    def soft_max(self, a: int) -> int:
        return int(self._ggml.soft_max(self._context, a))

    def argmax(self, a: int) -> int:
        return int(self._ggml.argmax(self._context, a))

    def argsort(self, a: int) -> int:
        """Of each row, the places of its values, the largest one's first."""
        return int(self._ggml.argsort(self._context, a, _DESCENDING))

    def top_k(self, a: int, count: int) -> int:
        return int(self._ggml.top_k(self._context, a, count))

    def attention(self, q: int, k: int, v: int, mask: int, scale: float) -> int:
        found = self._ggml.flash_attn_ext(self._context, q, k, v, mask, scale, 0.0, 0.0)
        self._ggml.flash_attn_ext_set_prec(found, _PRECISION_F32)
        return int(found)

    def view(self, a: int, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> int:
        """``strides``: bytes of all dimensions but the first."""
        shape = (*shape, *(1,) * (4 - len(shape)))
        strides = list(strides)
        while len(strides) < 3:
            strides.append((strides[-1] if strides else 0) * shape[len(strides)])
        return int(self._ggml.view_4d(self._context, a, *shape, *strides, offset))

    def reshape(self, a: int, *shape: int) -> int:
        return int(self._ggml.reshape_4d(self._context, a, *shape, *(1,) * (4 - len(shape))))

    def permute(self, a: int, *axes: int) -> int:
        return int(self._ggml.permute(self._context, a, *axes))

    def runs_on(self, device: Device) -> bool:
        """Whether the device can compute all of it."""
        count = self._ggml.graph_n_nodes(self.native)
        return all(
            self._ggml.backend_supports_op(device.backend, self._ggml.graph_node(self.native, i))
            for i in range(count)
        )

    def compute(self, device: Device) -> None:
        """Begin to; what its tensors hold is certain after ``device.wait``."""
        code = self._ggml.backend_graph_compute_async(device.backend, self.native)
        if code:
            raise EngineError(f"ggml cannot compute a graph of the draft ({code})")

    def close(self) -> None:
        """Idempotent."""
        if self._context is not None:
            self._ggml.free(self._context)
            self._context = None


class Workspace:
    """Memory for what graphs compute on their way; one for all, as one is computed at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ggml = ggml()
        self._native = self._ggml.gallocr_new(
            self._ggml.backend_get_default_buffer_type(device.backend)
        )

    @property
    def size_bytes(self) -> int:
        return int(self._ggml.gallocr_get_buffer_size(self._native, 0))

    def place(self, graph: Graph) -> bool:
        """Place all tensors of a graph that have no place yet. True: the memory grew for it, and
        graphs that were placed before must not be computed any more. Raises EngineError."""
        before = self.size_bytes
        self._device.wait()  # it may be freed under what is being computed
        if not self._ggml.gallocr_alloc_graph(self._native, graph.native):
            raise EngineError("no memory is free on the device for what the draft computes")
        return self.size_bytes != before

    def close(self) -> None:
        """Idempotent. Before the device is closed."""
        if self._native is not None:
            self._ggml.gallocr_free(self._native)
            self._native = None


def tensors_of(model: Any) -> list[tuple[str, int]]:
    """All tensors of a loaded model by their names, some of which it may have twice: on the host
    and on a device.

    Reads libstdc++'s ``std::vector<std::pair<std::string, ggml_tensor *>>``. Raises MissingSymbol
    where another library is used, whose symbol has another name.
    """
    find = bind_quick(
        "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model", ctypes.c_void_p, _P
    )
    begin, end = (ctypes.c_void_p * 2).from_address(find(model))
    found = []
    for at in range(begin or 0, end or 0, 40):
        text, length, _, _, address = (ctypes.c_size_t * 5).from_address(at)
        found.append((ctypes.string_at(text, length).decode(), int(address)))
    return found
