"""The logits that a step has left in a context, as an array.

For runners and drafts, which have imported llama_cpp by then; see llama_runner on numpy and it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .llama_memory import get_logits


class OutputArray:
    """One context's. ``vocabulary_size``: entries of a row."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._array: Any = None
        self._memory: tuple[int, int] | None = None

    def of(self, context: Any, outputs: int) -> Any | None:
        """float32[outputs, vocabulary] of the last step, which must have been waited for; valid and
        writable until the next one. ``None``: it has left nothing."""
        address = get_logits(context)
        if not address or not outputs:
            return None
        # Mostly the same memory as last time: making an array costs more than a search in it.
        if (address, outputs) != self._memory:
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            shape = (outputs, self._vocabulary_size)
            self._array = np.ctypeslib.as_array(pointer, shape=shape)
            self._memory = (address, outputs)
        return self._array
