"""What llama.cpp has for drafts and llama-cpp-python does not bind, looked up by C++ symbol.

These functions are llama.cpp's staging ground, so their names may change with the pinned version:
a missing one is a :class:`MissingSymbol` as the draft is made, before anything computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np

from .llama_abi import bind_quick
from .model_runner import EngineError

MOST_ARRAYS = 1024
_FLOATS = ctypes.POINTER(ctypes.c_float)


class LayerInputs:
    """What goes into some of a model's layers, read after each of its steps.

    Costs each step of the model a copy of these values to the host, from the making on until
    :meth:`close`, but for what :meth:`keep` leaves out. All three let llama.cpp plan its memory
    anew with the next step.
    """

    def __init__(self, context: Any, layers: Sequence[int]) -> None:
        """``context``: the model's; ``layers``: in the order in which rows want them."""
        self._set = bind_quick(
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
            None,
            *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool),
        )
        self._get = bind_quick(
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
            ctypes.c_void_p,
            *(ctypes.c_void_p, ctypes.c_uint32),
        )
        self._context = context
        self._layers = tuple(layers)
        self._width = int(llama.llama_model_n_embd(llama.llama_get_model(context)))
        # The values of a whole batch, by address: there are a few, since llama.cpp moves them with
        # the number of outputs, and making an array costs more than copying a row.
        self._most = int(llama.llama_n_batch(context))
        self._arrays: dict[int, Any] = {}
        self._views: list[Any] = []
        self.keep(True)

    def keep(self, on: bool) -> None:
        """Whether the next steps keep their values."""
        for layer in self._layers:
            self._set(self._context, layer, on)

    @property
    def row_values(self) -> int:
        """float32 values for one token: of all layers."""
        return len(self._layers) * self._width

    def read(self) -> None:
        """Find the values of the last batch, for :meth:`copy_rows`: after the step was waited for,
        and before the next one."""
        self._views = [self._array(self._get(self._context, layer)) for layer in self._layers]

    def _array(self, address: int | None) -> Any:
        """float32[tokens, width]"""
        if not address:
            raise EngineError("llama.cpp kept no inputs of a layer")
        array = self._arrays.get(address)
        if array is None:
            values = (ctypes.c_float * (self._most * self._width)).from_address(address)
            array = np.ctypeslib.as_array(values).reshape(self._most, self._width)
            if len(self._arrays) >= MOST_ARRAYS:
                self._arrays.clear()
            self._arrays[address] = array
        return array

    def copy_rows(self, rows: slice | list[int], into: Any) -> None:
        """Fill float32[tokens, row_values] with those of the batch's tokens in these rows."""
        count = len(into)
        parts = into.reshape(count, len(self._views), self._width)
        for number, view in enumerate(self._views):
            parts[:, number] = view[rows]

    def close(self) -> None:
        """Idempotent."""
        if self._context is not None:
            self.keep(False)
            self._context = None


def target_layers(model: Any) -> tuple[int, ...]:
    """The target's layers whose inputs a draft wants."""
    pointer = ctypes.c_void_p
    count = bind_quick(
        "_Z30llama_model_target_layer_ids_nPK11llama_model", ctypes.c_uint32, pointer
    )
    layers = bind_quick(
        "_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), pointer
    )
    found = layers(model)
    return tuple(found[i] for i in range(count(model)))


def selector_candidates(model: Any) -> int:
    """How many tokens a DFlash2's selector chooses from at each position; 0: it has none."""
    of_model = bind_quick(
        "_Z33llama_model_dflash_selector_top_kPK11llama_model", ctypes.c_int32, ctypes.c_void_p
    )
    return max(0, int(of_model(model)))


def keep_lattice(context: Any) -> None:
    """Let a DFlash2's context keep, for each token, the row that its selector makes."""
    keep = bind_quick(
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        None,
        *(ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool),
    )
    keep(context, True, False)


def read_lattice(context: Any, tokens: int, width: int) -> Any:
    """float32[tokens, width] that the last step left, valid until the next one."""
    get = bind_quick("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, ctypes.c_void_p)
    llama.llama_synchronize(context)
    rows = get(context)
    if not rows:
        raise EngineError("llama.cpp kept no lattice of the draft's selector")
    return np.ctypeslib.as_array(rows, shape=(tokens, width))
