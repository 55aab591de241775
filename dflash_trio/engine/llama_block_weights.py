"""A DFlash draft's weights as :mod:`llama_block_pass` wants them: what is multiplied by the same
values lies in one matrix.
"""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np
from attrs import frozen

from .llama_ggml import (
    ALIGNMENT,
    F32,
    Device,
    Graph,
    read_bytes,
    sizes,
    tensor,
    tensors_of,
)
from .llama_ggml import ggml as ggml_functions
from .llama_metadata import all_metadata

_KEYS = frozenset(
    (
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal"),
        *("rope.freq_base", "rope.dimension_count", "block_size", "target_layers", "vocab_size"),
    )
)
"""What the graph knows how to compute. With more in its file a draft is left to llama.cpp."""
_OF_LAYER = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
_NORMS = ("enc.output_norm.weight", "output_norm.weight")
_LEAST_EPSILON = 1e-6
"""Headers are read as text with six decimals."""


@frozen
class BlockShape:
    """Numbers of the draft's file."""

    layers: int
    width: int
    features: int
    """Values that it reads of its target for a token."""
    heads: int
    heads_kv: int
    head: int
    """Values of a head."""
    feed_forward: int
    vocabulary: int
    epsilon: float
    rope_base: float
    rope_dimensions: int
    rope_mode: int
    mask: int
    """The mask token."""

    @property
    def kv(self) -> int:
        """Values of a token's keys in a layer, and of its values."""
        return self.heads_kv * self.head


@frozen
class LayerWeights:
    attention_norm: int
    qkv: int
    qk_norm: int
    output: int
    ffn_norm: int
    gate_up: int
    down: int


@frozen
class BlockWeights:
    """Tensors on the device, by their addresses."""

    shape: BlockShape
    fuse: int
    """What makes a row of the draft's width of a token's features."""
    fuse_norm: int
    injection: int
    """The keys of all layers, then the values of all layers."""
    injection_norm: int
    """float32[layers * heads_kv, head]"""
    layers: tuple[LayerWeights, ...]
    norm: int
    head: int
    """The target's output."""
    embeddings: int
    """The target's, which may be on the host. Both are its own tensors: it has to outlive this."""
    graph: Graph
    """Owns the tensors' descriptions, not their values."""


def read_block_weights(draft: Any, target: Any, device: Device) -> BlockWeights | None:
    """Copy a loaded draft's weights to ``device``. ``target``: its target's model, which has to
    stay loaded; the draft's need not.

    ``None``: this draft is of a kind, or its weights of types, that only llama.cpp computes.
    Raises EngineError where there is no memory for them, and MissingSymbol.
    """
    tensors, theirs = dict(tensors_of(draft)), tensors_of(target)
    shape = _shape(draft, tensors)
    if shape is None:
        return None
    head, embeddings = _on_device(theirs, device), dict(theirs).get("token_embd.weight")
    if head is None or embeddings is None:
        return None
    if sizes(head)[:2] != (shape.width, shape.vocabulary) or sizes(embeddings) != sizes(head):
        return None
    return _copied(shape, tensors, head, embeddings, device)


def _shape(draft: Any, tensors: dict[str, int]) -> BlockShape | None:
    facts = all_metadata(draft)
    if facts.get("general.architecture") != "dflash":
        return None
    facts = {k.removeprefix("dflash."): v for k, v in facts.items() if k.startswith("dflash.")}
    if not facts.keys() <= _KEYS or facts.get("attention.causal") == "true":
        return None
    layers = int(llama.llama_model_n_layer(draft))
    expected = {f"blk.{i}.{name}.weight" for i in range(layers) for name in _OF_LAYER}
    epsilon = float(facts["attention.layer_norm_rms_epsilon"])
    if tensors.keys() != expected | {"fc.weight", *_NORMS} or epsilon < _LEAST_EPSILON:
        return None
    mode = int(llama.llama_model_rope_type(draft))
    if mode not in (llama.LLAMA_ROPE_TYPE_NORM, llama.LLAMA_ROPE_TYPE_NEOX):
        return None
    vocabulary = llama.llama_model_get_vocab(draft)
    query, key = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"]
    head = sizes(tensors["blk.0.attn_q_norm.weight"])[0]
    heads, heads_kv = sizes(query)[1] // head, sizes(key)[1] // head
    width = sizes(query)[0]
    feed_forward = sizes(tensors["blk.0.ffn_gate.weight"])[1]
    of_layer = {
        "attn_norm": (width,),
        "attn_q": (width, heads * head),
        "attn_k": (width, heads_kv * head),
        "attn_v": (width, heads_kv * head),
        "attn_output": (heads * head, width),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_norm": (width,),
        "ffn_gate": (width, feed_forward),
        "ffn_up": (width, feed_forward),
        "ffn_down": (feed_forward, width),
    }
    wanted = {f"blk.{i}.{name}.weight": of_layer[name] for i in range(layers) for name in of_layer}
    wanted |= dict.fromkeys(_NORMS, (width,))
    for name, dimensions in wanted.items():
        # Of one dimension are the norms, which are multiplied as they are.
        if len(dimensions) == 1 and tensor(tensors[name]).type != F32:
            return None
        if sizes(tensors[name])[: len(dimensions)] != dimensions:
            return None
    return BlockShape(
        layers=layers,
        width=width,
        features=sizes(tensors["fc.weight"])[0],
        heads=heads,
        heads_kv=heads_kv,
        head=head,
        feed_forward=feed_forward,
        vocabulary=int(llama.llama_vocab_n_tokens(vocabulary)),
        epsilon=epsilon,
        rope_base=float(facts.get("rope.freq_base", "10000")),
        rope_dimensions=int(facts.get("rope.dimension_count", head)),
        rope_mode=mode,
        mask=int(llama.llama_vocab_mask(vocabulary)),
    )


def _on_device(tensors: list[tuple[str, int]], device: Device) -> int | None:
    """A model's output, where the device can read it."""
    for wanted in ("output.weight", "token_embd.weight"):  # which is the output of who has none
        found = [address for name, address in tensors if name == wanted]
        if found:
            return next((address for address in found if device.reads(address)), None)
    return None


def _copied(
    shape: BlockShape, tensors: dict[str, int], head: int, embeddings: int, device: Device
) -> BlockWeights | None:
    layers = range(shape.layers)

    def named(part: str, *of: int) -> list[int]:
        return [tensors[f"blk.{i}.{part}.weight"] for i in of or layers]

    # Lists of tensors that become one, and its dimensions.
    joined: dict[str, tuple[list[int], tuple[int, ...]]] = {
        "fuse": ([tensors["fc.weight"]], (shape.features, shape.width)),
        "fuse_norm": ([tensors["enc.output_norm.weight"]], (shape.width,)),
        "injection": (
            [*named("attn_k"), *named("attn_v")],
            (shape.width, 2 * shape.layers * shape.kv),
        ),
        "injection_norm": (
            [each for each in named("attn_k_norm") for _ in range(shape.heads_kv)],
            (shape.head, shape.layers * shape.heads_kv),
        ),
        "norm": ([tensors["output_norm.weight"]], (shape.width,)),
    }
    for i in layers:
        qkv = [*named("attn_q", i), *named("attn_k", i), *named("attn_v", i)]
        norms = named("attn_q_norm", i) * shape.heads + named("attn_k_norm", i) * shape.heads_kv
        rows = (shape.heads + 2 * shape.heads_kv) * shape.head
        joined |= {
            f"{i}.attention_norm": (named("attn_norm", i), (shape.width,)),
            f"{i}.qkv": (qkv, (shape.width, rows)),
            f"{i}.qk_norm": (norms, (shape.head, shape.heads + shape.heads_kv)),
            f"{i}.output": (named("attn_output", i), (shape.heads * shape.head, shape.width)),
            f"{i}.ffn_norm": (named("ffn_norm", i), (shape.width,)),
            f"{i}.gate_up": (
                [*named("ffn_gate", i), *named("ffn_up", i)],
                (shape.width, 2 * shape.feed_forward),
            ),
            f"{i}.down": (named("ffn_down", i), (shape.feed_forward, shape.width)),
        }
    if any(len({tensor(each).type for each in parts}) > 1 for parts, _ in joined.values()):
        return None
    graph = Graph(len(joined))
    try:
        made = _place(joined, graph, device)
    except BaseException:
        graph.close()
        raise
    return BlockWeights(
        shape=shape,
        fuse=made["fuse"],
        fuse_norm=made["fuse_norm"],
        injection=made["injection"],
        injection_norm=made["injection_norm"],
        layers=tuple(
            LayerWeights(
                attention_norm=made[f"{i}.attention_norm"],
                qkv=made[f"{i}.qkv"],
                qk_norm=made[f"{i}.qk_norm"],
                output=made[f"{i}.output"],
                ffn_norm=made[f"{i}.ffn_norm"],
                gate_up=made[f"{i}.gate_up"],
                down=made[f"{i}.down"],
            )
            for i in layers
        ),
        norm=made["norm"],
        head=head,
        embeddings=embeddings,
        graph=graph,
    )


def _place(
    joined: dict[str, tuple[list[int], tuple[int, ...]]], graph: Graph, device: Device
) -> dict[str, int]:
    offsets: dict[str, int] = {}
    size = 0
    for name, (parts, _) in joined.items():
        offsets[name] = size
        count = sum(ggml_functions().nbytes(each) for each in parts)
        size += -(-count // ALIGNMENT) * ALIGNMENT + _SLACK
    memory = device.allocate(size)
    made = {}
    for name, (parts, dimensions) in joined.items():
        made[name] = graph.new(tensor(parts[0]).type, *dimensions)
        graph.place(made[name], memory, offsets[name])
        stored = np.concatenate([read_bytes(each) for each in parts])
        ggml_functions().backend_tensor_set(made[name], stored.ctypes.data, 0, len(stored))
    return made


_SLACK = 4096
"""Bytes behind each matrix: CUDA's kernels read quantized rows up to a multiple of 512 values."""
