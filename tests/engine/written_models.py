"""Headers of models that nobody has to have: written GGUF files, a few kilobytes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

Value = int | float | Sequence[int] | Sequence[bool]


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    layers: int = 4,
    facts: Mapping[str, Value] | None = None,
    layer_tensors: Mapping[str, int] | None = None,
    others: Mapping[str, int] | None = None,
    chat_template: str | None = None,
) -> Path:
    """A file with ``facts`` in its header (without the architecture's name) and tensors of zeros.

    ``layer_tensors``: names behind ``blk.N.`` with the KiB of each; ``others``: whole names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    numbers: dict[str, Value] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 128,
        "vocab_size": 1000,
        **(facts or {}),
    }
    for key, value in numbers.items():
        name = f"{architecture}.{key}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_array(name, value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    sizes = {"token_embd.weight": 100, "output.weight": 50} if others is None else dict(others)
    for number in range(layers):
        for name, size in (layer_tensors or {"attn_k.weight": 10}).items():
            sizes[f"blk.{number}.{name}"] = size
    for name, size in sizes.items():
        writer.add_tensor(name, np.zeros((size, 256), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
