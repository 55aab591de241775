"""Drafts and targets that nobody has trained: GGUF files of a few layers with random weights.

What they propose is nonsense, which is what tests of exactness want: nearly all of it is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BLOCK_SIZE = 8
HEADS, HEADS_KV, HEAD = 4, 2, 32
MASK_TOKEN = 5


def write_dflash(
    path: Path,
    target: Path,
    *,
    layers: int = 2,
    target_layers: Sequence[int] = (1, 3),
    block_size: int = BLOCK_SIZE,
    embedding_length: int | None = None,
    vocabulary: Path | None = None,
    selector: int = 0,
    markov: bool = False,
    from_anchor: bool | None = None,
    facts: dict[str, int | float] | None = None,
    seed: int = 1,
) -> Path:
    """An untrained draft for ``target``, with the tokens of ``vocabulary`` if it is not its own.

    ``selector``: a DFlash2 with so many candidates a position; ``markov``: a DSpark, which begins
    ``from_anchor`` or behind it.
    """
    reader = gguf.GGUFReader(target)
    tokens = reader if vocabulary is None else gguf.GGUFReader(vocabulary)
    wide = embedding_length or _number(reader, "embedding_length")
    writer = _writer(path, "dflash", layers=layers, wide=wide, facts=facts or {})
    writer.add_uint32("dflash.block_size", block_size)
    writer.add_array("dflash.target_layers", list(target_layers))
    copy_tokens(tokens, writer)
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK_TOKEN)
    dice = np.random.default_rng(seed)
    count = len(tokens.fields["tokenizer.ggml.tokens"].data)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 / np.sqrt(shape[-1])
        writer.add_tensor(name, (dice.standard_normal(shape) * scale).astype(np.float32))

    add("fc.weight", wide, len(target_layers) * wide)
    for name in ("enc.output_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(wide, dtype=np.float32))
    _add_layers(writer, add, layers, wide, head_norms=True)
    if selector:
        rank, kernel, group = 16, 3, 8
        for key, value in {
            "conv_kernel_size": kernel,
            "conv_group_size": group,
            "selector_rank": rank,
            "selector_top_k": selector,
        }.items():
            writer.add_uint32(f"dflash.{key}", value)
        add("selector_predecessor.weight", count, rank)
        add("selector_successor.weight", count, rank)
        add("selector_hidden.weight", rank, wide)
        for number in range(layers):
            for part in ("attn", "ffn"):
                add(f"blk.{number}.{part}_conv_base", 2, kernel, wide)
                add(f"blk.{number}.{part}_conv_proj.weight", 2 * kernel * (wide // group), wide)
    if markov:
        add("markov_w1.weight", count, 16)
        add("markov_w2.weight", count, 16)
        if from_anchor is not None:
            writer.add_bool("dflash.sample_from_anchor", from_anchor)
    return _written(writer, path)


def write_target(
    path: Path,
    vocabulary: Path,
    *,
    layers: int = 4,
    embedding_length: int = 64,
    architecture: str = "llama",
    seed: int = 2,
) -> Path:
    """An untrained model with the tokens of another one. ``architecture``: of the llama kind."""
    wide = embedding_length
    reader = gguf.GGUFReader(vocabulary)
    writer = _writer(path, architecture, layers=layers, wide=wide, facts={})
    copy_tokens(reader, writer)
    dice = np.random.default_rng(seed)
    count = len(reader.fields["tokenizer.ggml.tokens"].data)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 / np.sqrt(shape[-1])
        writer.add_tensor(name, (dice.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", count, wide)
    writer.add_tensor("output_norm.weight", np.ones(wide, dtype=np.float32))
    _add_layers(writer, add, layers, wide, head_norms=False)
    return _written(writer, path)


def copy_tokens(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, *, leave: int = 0) -> None:
    """Everything of a file's tokenizer, but for the last ``leave`` tokens."""
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer.") or name == "tokenizer.ggml.mask_token_id":
            continue
        value: Any = field.contents()
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            if leave and name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
                value = value[:-leave]
            writer.add_key_value(name, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, value, kind)


def _number(reader: gguf.GGUFReader, key: str) -> int:
    architecture = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{architecture}.{key}"].contents())


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
