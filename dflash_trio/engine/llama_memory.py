"""Calls of llama.cpp that return at once, of which several are made between a step and the next: so
the GIL is kept."""

from __future__ import annotations

import ctypes

from .llama_abi import bind_quick

_pointer, _id, _position = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32

seq_rm = bind_quick("llama_memory_seq_rm", ctypes.c_bool, _pointer, _id, _position, _position)
"""Memory, sequence, first position and the one behind the last (-1: all): take the sequence off
these cells. False: it cannot be taken off a part."""
seq_cp = bind_quick("llama_memory_seq_cp", None, _pointer, _id, _id, _position, _position)
"""Memory, source, target, positions: put the target on cells of the source."""
seq_pos_max = bind_quick("llama_memory_seq_pos_max", _position, _pointer, _id)
"""The last position that a sequence has a cell for; -1: it has none."""
get_logits = bind_quick("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
"""Of a context whose step has been waited for: the address of its outputs."""
