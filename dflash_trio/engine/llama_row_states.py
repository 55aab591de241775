"""What a row of the cache holds, as bytes; and copies between rows that are not made yet.

A partitioned cache notes that one row is to be another's copy, and copies the bytes when the next
step begins. Steps come after that, so they see what they should. But a saved state is read and
written at once: loaded into a row of such a copy it would be overwritten, or be what is copied; and
saved of a copy it would be what lay there before. (``llama_kv_cache::seq_cp`` and ``update``.)
"""

from __future__ import annotations

import ctypes
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
from attrs import define, field

from .host_memory import new_bytes


def read_state(context: Any, seq_id: int) -> bytes:
    """All that a row holds."""
    size = llama.llama_state_seq_get_size(context, seq_id)
    # Megabytes: written where they stay, neither zeroed nor copied.
    state = new_bytes(size)
    written = llama.llama_state_seq_get_data(context, _address(state), size, seq_id)
    return state if written == size else state[:written]


def write_state(context: Any, seq_id: int, state: bytes) -> bool:
    """Into an empty row. False: it does not fit, and the row may hold anything."""
    return bool(llama.llama_state_seq_set_data(context, _address(state), len(state), seq_id))


def _address(state: bytes) -> Any:
    return ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))


@define
class PendingCopies:
    """The rows of copies since the last step."""

    _sources: set[int] = field(factory=set)
    _targets: set[int] = field(factory=set)

    def add(self, source: int, target: int) -> None:
        self._sources.add(source)
        self._targets.add(target)

    def carried_out(self) -> None:
        """A step has begun."""
        if self._targets:
            self._sources.clear()
            self._targets.clear()

    def hinder_reading(self, row: int) -> bool:
        """What lies in the row is not yet its own."""
        return row in self._targets

    def hinder_writing(self, row: int) -> bool:
        """What is written into the row now would be copied, or overwritten."""
        return row in self._targets or row in self._sources
