"""What a loaded model says of itself."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as llama

from .model_runner import Batching

_LONGEST = 256
"""Bytes of an answer."""
_FULL = 32
"""Tokens. Measured on two cores: a prompt's token takes as long among 16 as among 512."""


def metadata(model: Any, key: str) -> str | None:
    """The value of ``key`` in the file's header; ``None``: it has none."""
    buffer = ctypes.create_string_buffer(_LONGEST)
    length = llama.llama_model_meta_val_str(model, key.encode(), buffer, _LONGEST)
    return buffer.value.decode("utf-8", "replace") if length >= 0 else None


def all_metadata(model: Any) -> dict[str, str]:
    """All that the file's header says; long values are cut."""
    key = ctypes.create_string_buffer(_LONGEST)
    found = {}
    for i in range(llama.llama_model_meta_count(model)):
        llama.llama_model_meta_key_by_index(model, i, key, _LONGEST)
        name = key.value.decode("utf-8", "replace")
        found[name] = metadata(model, name) or ""
    return found


def description(model: Any) -> str:
    """Architecture, size and format in a few words."""
    buffer = ctypes.create_string_buffer(_LONGEST)
    llama.llama_model_desc(model, buffer, _LONGEST)
    return buffer.value.decode("utf-8", "replace")


def cpu_batching(model: Any) -> Batching:
    """What steps on a CPU are best made of: it is busy with a few tokens, but experts want so many
    that each of them has some."""
    return Batching(full=_FULL * experts_to_one(model), apart=True)


def experts_to_one(model: Any) -> int:
    """How many experts there are to each one that a token uses; 1 without any."""
    architecture = metadata(model, "general.architecture")
    count, used = (
        int(metadata(model, f"{architecture}.{key}") or 0)
        for key in ("expert_count", "expert_used_count")
    )
    return max(1, count // used) if used else 1
