"""The draft as a GGUF for llama.cpp: Q8_0 matrices, float32 norms, the target's vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .source import Source

Q8_0 = gguf.GGMLQuantizationType.Q8_0
BLOCK_NAMES = {
    "attn_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
OUTER_NAMES = {"fc": "fc", "enc_norm": "enc.output_norm", "out_norm": "output_norm"}
UNWANTED = ("tokenizer.chat_template", "tokenizer.ggml.mask_token_id")
"""Of the target's ``tokenizer.*`` keys. A draft renders no chat, and its mask token is its own."""


def tensors(state: Mapping[str, np.ndarray], scale: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names and float32 values; the features' scale goes into ``fc``."""
    for ours, theirs in OUTER_NAMES.items():
        values = state[ours].astype(np.float32)
        yield f"{theirs}.weight", values * scale if ours == "fc" else values
    for index in range(len(state["wq"])):
        for ours, theirs in BLOCK_NAMES.items():
            yield f"blk.{index}.{theirs}.weight", state[ours][index].astype(np.float32)


def rounded(state: Mapping[str, np.ndarray], scale: np.ndarray) -> dict[str, np.ndarray]:
    """The state as the file will hold it, so that what is judged is what is served."""
    found = {}
    for name, values in state.items():
        values = values.astype(np.float32)
        if name.endswith("norm"):
            found[name] = values
            continue
        folded = values * scale if name == "fc" else values
        back = gguf.dequantize(gguf.quantize(folded, Q8_0), Q8_0).reshape(values.shape)
        found[name] = back / scale if name == "fc" else back
    return found


def write(
    path: Path,
    source: Source,
    state: Mapping[str, np.ndarray],
    scale: np.ndarray,
    shape: Mapping[str, Any],
    context: int,
) -> int:
    """Write the file (under another name until it is whole); its size in bytes."""
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, "dflash")
    target = source.value("general.name", source.path.stem)
    license = source.value("general.license", "")
    writer.add_name(f"DFlash draft for {target}")
    writer.add_description(
        f"Block-diffusion draft model (DFlash) for speculative decoding with {target}; it borrows "
        "that model's embeddings and output head and is of no use alone. Trained on answers that "
        "the target itself generated to templated prompts."
    )
    if license:
        writer.add_license(license)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(context)
    writer.add_embedding_length(shape["width"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["feed_forward"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_size"])
    writer.add_value_length(shape["head_size"])
    writer.add_layer_norm_rms_eps(shape["epsilon"])
    writer.add_rope_freq_base(shape["rope_base"])
    writer.add_rope_dimension_count(shape["head_size"])
    writer.add_uint32("dflash.block_size", shape["block"])
    writer.add_array("dflash.target_layers", list(shape["target_layers"]))
    _copy_vocabulary(writer, source)
    writer.add_uint32("tokenizer.ggml.mask_token_id", shape["mask_token"])
    for name, values in tensors(state, scale):
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)
    return path.stat().st_size


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The shape and the state in a file of :func:`write`, the features' scale still in ``fc``.

    Raises KeyError or ValueError for another file, and whatever gguf does for a broken one.
    """
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise KeyError(key)
        return field.contents()

    if value("general.architecture") != "dflash":
        raise ValueError(value("general.architecture"))
    shape = {
        "target_layers": tuple(value("dflash.target_layers")),
        "width": value("dflash.embedding_length"),
        "layers": value("dflash.block_count"),
        "heads": value("dflash.attention.head_count"),
        "kv_heads": value("dflash.attention.head_count_kv"),
        "head_size": value("dflash.attention.key_length"),
        "feed_forward": value("dflash.feed_forward_length"),
        "block": value("dflash.block_size"),
        "mask_token": value("tokenizer.ggml.mask_token_id"),
        "rope_base": value("dflash.rope.freq_base"),
        "epsilon": value("dflash.attention.layer_norm_rms_epsilon"),
    }
    found = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors
    }
    state = {ours: found.pop(f"{theirs}.weight") for ours, theirs in OUTER_NAMES.items()}
    for ours, theirs in BLOCK_NAMES.items():
        layers = range(shape["layers"])
        state[ours] = np.stack([found.pop(f"blk.{i}.{theirs}.weight") for i in layers])
    if found:
        raise ValueError(", ".join(found))
    return shape, state


def unfolded(state: Mapping[str, np.ndarray], scale: np.ndarray) -> dict[str, np.ndarray]:
    """A state of :func:`read` for features that are multiplied by ``scale`` beforehand."""
    return {**state, "fc": state["fc"] / scale}


def _copy_vocabulary(writer: gguf.GGUFWriter, source: Source) -> None:
    for key, field in source.reader.fields.items():
        if not key.startswith("tokenizer.") or key in UNWANTED:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
