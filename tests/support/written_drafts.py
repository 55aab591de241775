"""Drafts and targets that nobody has trained: GGUF files of a few layers with random weights.

What they propose is nonsense, which is what tests of exactness want: nearly all of it is rejected.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from attrs import frozen

BLOCK_SIZE = 8
HEADS, HEADS_KV, HEAD = 4, 2, 32
MASK_TOKEN = 5


@frozen
class Tokenizer:
    """A file's tokens, as headers say them."""

    entries: tuple[tuple[str, Any, Any, Any], ...]
    """Keys behind ``tokenizer.ggml.``, with their values, their types and their elements' types."""

    def value(self, key: str) -> Any:
        return next(value for name, value, *_ in self.entries if name == key)

    @property
    def count(self) -> int:
        return len(self.value("tokens"))

    def changed(self, **values: Any) -> Tokenizer:
        return Tokenizer(
            tuple((key, values.get(key, value), *types) for key, value, *types in self.entries)
        )

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        for key, value, kind, element in self.entries:
            name = f"tokenizer.ggml.{key}"
            if kind == gguf.GGUFValueType.ARRAY:
                writer.add_key_value(name, value, kind, sub_type=element)
            else:
                writer.add_key_value(name, value, kind)


@functools.cache
def tokenizer_of(path: Path) -> Tokenizer:
    """Takes a second or two: there is one of a kind for all tests."""
    prefix = "tokenizer.ggml."
    return Tokenizer(
        tuple(
            (name.removeprefix(prefix), field.contents(), field.types[0], field.types[-1])
            for name, field in gguf.GGUFReader(path).fields.items()
            if name.startswith(prefix) and name != f"{prefix}mask_token_id"
        )
    )


def tiny_tokenizer(count: int = 1000) -> Tokenizer:
    """The printable characters, and words that nobody says."""
    kinds = gguf.GGUFValueType
    characters = ["<|end|>", *map(chr, range(33, 127)), "\u0120", "\u010a"]
    words = [f"word{number}" for number in range(count - len(characters))]
    types = [3] + [1] * (count - 1)
    return Tokenizer(
        (
            ("model", "gpt2", kinds.STRING, None),
            ("pre", "default", kinds.STRING, None),
            ("tokens", characters + words, kinds.ARRAY, kinds.STRING),
            ("token_type", types, kinds.ARRAY, kinds.INT32),
            ("merges", ["w o", "r d"], kinds.ARRAY, kinds.STRING),
            ("eos_token_id", 0, kinds.UINT32, None),
            ("bos_token_id", 0, kinds.UINT32, None),
        )
    )


def write_dflash(
    path: Path,
    tokenizer: Tokenizer,
    *,
    wide: int = 64,
    layers: int = 2,
    target_layers: Sequence[int] = (1, 3),
    block_size: int = BLOCK_SIZE,
    selector: int = 0,
    markov: bool = False,
    from_anchor: bool | None = None,
    neutral: bool = False,
    facts: dict[str, int | float] | None = None,
    seed: int = 1,
) -> Path:
    """An untrained draft for a target with these tokens and embeddings of ``wide`` values.

    ``selector``: a DFlash2 with so many candidates a position; ``markov``: a DSpark, which begins
    ``from_anchor`` or behind it. ``neutral``: what a DFlash2 has beside a plain draft changes
    nothing; what a DSpark has is all that counts, and means the token with the next number.
    """
    count = tokenizer.count
    writer = _writer(path, "dflash", layers=layers, wide=wide, facts=facts or {})
    writer.add_uint32("dflash.block_size", block_size)
    writer.add_array("dflash.target_layers", list(target_layers))
    tokenizer.add_to(writer)
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK_TOKEN)
    dice = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 / np.sqrt(shape[-1])
        writer.add_tensor(name, (dice.standard_normal(shape) * scale).astype(np.float32))

    add("fc.weight", wide, len(target_layers) * wide)
    for name in ("enc.output_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(wide, dtype=np.float32))
    _add_layers(writer, add, layers, wide, head_norms=True)
    if selector:
        _add_selector(writer, add, layers, wide, count, selector, neutral=neutral)
    if markov:
        rank = 64 if neutral else 16
        first = dice.standard_normal((count, rank)).astype(np.float32)
        first /= np.linalg.norm(first, axis=1, keepdims=True)
        writer.add_tensor("markov_w1.weight", first)
        if neutral:
            writer.add_tensor("markov_w2.weight", 1e4 * np.roll(first, 1, axis=0))
        else:
            add("markov_w2.weight", count, rank)
        if from_anchor is not None:
            writer.add_bool("dflash.sample_from_anchor", from_anchor)
    return _written(writer, path)


def write_target(
    path: Path,
    tokenizer: Tokenizer,
    *,
    wide: int = 64,
    layers: int = 4,
    architecture: str = "llama",
    seed: int = 2,
) -> Path:
    """An untrained model. ``architecture``: one of the llama kind."""
    writer = _writer(path, architecture, layers=layers, wide=wide, facts={})
    tokenizer.add_to(writer)
    dice = np.random.default_rng(seed)
    count = tokenizer.count

    def add(name: str, *shape: int) -> None:
        scale = 1.0 / np.sqrt(shape[-1])
        writer.add_tensor(name, (dice.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", count, wide)
    writer.add_tensor("output_norm.weight", np.ones(wide, dtype=np.float32))
    _add_layers(writer, add, layers, wide, head_norms=False)
    return _written(writer, path)


def _writer(
    path: Path, architecture: str, *, layers: int, wide: int, facts: dict[str, int | float]
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    numbers: dict[str, int | float] = {
        "context_length": 2048,
        "embedding_length": wide,
        "block_count": layers,
        "feed_forward_length": 2 * wide,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS_KV,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        **facts,
    }
    for key, value in numbers.items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    return writer


def _add_selector(
    writer: gguf.GGUFWriter,
    add: Any,
    layers: int,
    wide: int,
    count: int,
    candidates: int,
    *,
    neutral: bool,
) -> None:
    rank, kernel, group = 16, 3, 8
    for key, value in {
        "conv_kernel_size": kernel,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": candidates,
    }.items():
        writer.add_uint32(f"dflash.{key}", value)
    tensors = {
        "selector_predecessor.weight": (count, rank),
        "selector_successor.weight": (count, rank),
        "selector_hidden.weight": (rank, wide),
    }
    for number in range(layers):
        for part in ("attn", "ffn"):
            tensors[f"blk.{number}.{part}_conv_base"] = (2, kernel, wide)
            projected = (2 * kernel * (wide // group), wide)
            tensors[f"blk.{number}.{part}_conv_proj.weight"] = projected
    for name, shape in tensors.items():
        if not neutral:
            add(name, *shape)
            continue
        values = np.zeros(shape, dtype=np.float32)
        if name.endswith("conv_base"):
            values[:, 0] = 1.0  # each position is what it was
        writer.add_tensor(name, values)


def _add_layers(
    writer: gguf.GGUFWriter, add: Any, layers: int, wide: int, head_norms: bool
) -> None:
    for number in range(layers):
        block = f"blk.{number}."
        norms = {"attn_norm": wide, "ffn_norm": wide}
        if head_norms:
            norms |= {"attn_q_norm": HEAD, "attn_k_norm": HEAD}
        for name, size in norms.items():
            writer.add_tensor(f"{block}{name}.weight", np.ones(size, dtype=np.float32))
        add(f"{block}attn_q.weight", HEADS * HEAD, wide)
        add(f"{block}attn_k.weight", HEADS_KV * HEAD, wide)
        add(f"{block}attn_v.weight", HEADS_KV * HEAD, wide)
        add(f"{block}attn_output.weight", wide, HEADS * HEAD)
        add(f"{block}ffn_gate.weight", 2 * wide, wide)
        add(f"{block}ffn_up.weight", 2 * wide, wide)
        add(f"{block}ffn_down.weight", wide, 2 * wide)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
