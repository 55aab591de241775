"""The draft: a block of masks, denoised at once, that looks at the target's layer inputs.

Its graph is llama.cpp's ``dflash``: the inputs of some target layers at each text position, side by
side, go through ``fc`` and a norm; every layer of the draft makes keys and values of that (and
nothing else of the text). The block ``[last token, mask, mask, ...]`` stands at the positions after
the text, attends to all keys before it and to all of its own, and the output at mask ``i`` is the
target's vocabulary head's guess of the token at that mask's own position.

Parameters are plain tensors by name, those of all layers stacked: the optimizer works on a stack at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MATRICES = ("fc", "wq", "wk", "wv", "wo", "gate", "up", "down")


@dataclass(frozen=True)
class Shape:
    """The draft's sizes; ``target_layers``: whose inputs it sees, in the order they are joined."""

    target_layers: tuple[int, ...]
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    block: int
    mask_token: int
    rope_base: float
    epsilon: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def matrix_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Outputs x inputs, behind the number of layers where each has one."""
    n, width, ff = shape.layers, shape.width, shape.feed_forward
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return {
        "fc": (width, len(shape.target_layers) * width),
        "wq": (n, q, width),
        "wk": (n, kv, width),
        "wv": (n, kv, width),
        "wo": (n, width, q),
        "gate": (n, ff, width),
        "up": (n, ff, width),
        "down": (n, width, ff),
    }


def norm_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    n, width = shape.layers, shape.width
    return {
        "enc_norm": (width,),
        "out_norm": (width,),
        "attn_norm": (n, width),
        "ffn_norm": (n, width),
        "q_norm": (n, shape.head_size),
        "k_norm": (n, shape.head_size),
    }


def new_parameters(shape: Shape, device: str, seed: int) -> dict[str, Tensor]:
    """Float32, on ``device``, each requiring its gradient."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in matrix_shapes(shape).items():
        deviation = 1.0 / math.sqrt(size[-1])
        if name in ("wo", "down"):
            deviation /= math.sqrt(2 * shape.layers)
        found[name] = torch.randn(size, generator=generator) * deviation
    for name, size in norm_shapes(shape).items():
        # The residual begins as the mask itself; a small last norm keeps it from being proposed.
        found[name] = torch.full(size, 0.25 if name == "out_norm" else 1.0)
    return {n: t.to(device).requires_grad_() for n, t in found.items()}


def rope_table(shape: Shape, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions below ``length``, [length, head_size / 2]."""
    half = shape.head_size // 2
    rates = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotation of the last axis; ``cos`` and ``sin`` broadcast against its halves."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def encode(features: Tensor, fc: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    return normed(F.linear(features, fc), norm, epsilon)


def layer(
    x: Tensor,
    context: Tensor,
    bias: Tensor,
    rope: tuple[Tensor, Tensor, Tensor, Tensor],
    w: Mapping[str, Tensor],
    shape: tuple[int, int, int, float],
) -> Tensor:
    """One layer on a block batch ``x`` [B, Q, width] over ``context`` [B, L, width].

    ``bias`` [B, 1, groups * Q, L + Q]; ``rope``: cosines and sines of the context [L, half], then
    of the block [B, Q, half]; ``shape``: heads, kv_heads, head_size, epsilon. The heads that share
    keys are laid along the query axis, so that keys are never copied.
    """
    heads, kv_heads, size, epsilon = shape
    batch, queries, _ = x.shape
    length = context.shape[1]
    groups = heads // kv_heads
    context_cos, context_sin, cos, sin = rope

    seen = normed(x, w["attn_norm"], epsilon)
    q = normed(F.linear(seen, w["wq"]).view(batch, queries, heads, size), w["q_norm"], epsilon)
    q = rotated(q, cos[:, :, None], sin[:, :, None])
    both = torch.cat((context, seen), 1)
    k = normed(
        F.linear(both, w["wk"]).view(batch, length + queries, kv_heads, size), w["k_norm"], epsilon
    )
    all_cos = torch.cat((context_cos.expand(batch, -1, -1), cos), 1)[:, :, None]
    all_sin = torch.cat((context_sin.expand(batch, -1, -1), sin), 1)[:, :, None]
    k = rotated(k, all_cos, all_sin)
    v = F.linear(both, w["wv"]).view(batch, length + queries, kv_heads, size)

    q = q.view(batch, queries, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * queries, size)
    mixed = F.scaled_dot_product_attention(
        q, k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), attn_mask=bias
    )
    mixed = mixed.view(batch, kv_heads, groups, queries, size).permute(0, 3, 1, 2, 4)
    x = x + F.linear(mixed.reshape(batch, queries, heads * size), w["wo"])

    seen = normed(x, w["ffn_norm"], epsilon)
    hidden = F.silu(F.linear(seen, w["gate"])) * F.linear(seen, w["up"])
    return x + F.linear(hidden, w["down"])


Layer = Callable[..., Tensor]
PER_LAYER = (
    *("wq", "wk", "wv", "wo", "gate", "up", "down"),
    *("attn_norm", "ffn_norm", "q_norm", "k_norm"),
)


@dataclass(frozen=True)
class Blocks:
    """Blocks behind chosen positions of a batch of texts.

    ``anchors`` [B, A]: the position of each block's first, known token. The text before an anchor
    is what the block sees of it. ``sizes`` [B, A]: how many of ``block`` positions are there.
    """

    anchors: Tensor
    block: int
    sizes: Tensor | None = None

    def positions(self) -> Tensor:
        """[B, A * block]"""
        steps = torch.arange(self.block, device=self.anchors.device)
        return (self.anchors[:, :, None] + steps).flatten(1)

    def bias(self, length: int, groups: int, dtype: torch.dtype) -> Tensor:
        """What a query may see, as numbers to add: [B, 1, groups * A * block, L + A * block]."""
        device, block = self.anchors.device, self.block
        batch, count = self.anchors.shape
        before = torch.arange(length, device=device) < self.anchors[:, :, None]  # B, A, L
        own = torch.eye(count, dtype=torch.bool, device=device)[:, :, None]  # A, A, 1
        own = own.expand(count, count, block)[None].expand(batch, -1, -1, -1)
        if self.sizes is not None:
            there = torch.arange(block, device=device) < self.sizes[:, :, None]  # B, A, block
            own = own & (there[:, None] | (torch.arange(block, device=device) == 0))
        seen = torch.cat((before, own.flatten(2)), -1)  # B, A, L + A * block
        bias = torch.zeros(seen.shape, dtype=dtype, device=device)
        bias.masked_fill_(~seen, -math.inf)
        return bias.repeat_interleave(block, 1).repeat(1, groups, 1)[:, None]


def forward(
    parameters: Mapping[str, Tensor],
    shape: Shape,
    features: Tensor,
    first_embeddings: Tensor,
    mask_embedding: Tensor,
    blocks: Blocks,
    table: tuple[Tensor, Tensor],
    *,
    run_layer: Layer = layer,
    run_encode: Layer = encode,
) -> Tensor:
    """The last hidden states (normed: the head comes next), [B, A, block, width].

    ``features`` [B, L, target layers * width], scaled already; ``first_embeddings`` [B, A, width]:
    the target's embeddings of the anchors' tokens. All in one type, parameters are cast to it.
    """
    kind = features.dtype
    w = {name: tensor.to(kind) for name, tensor in parameters.items()}
    batch, count = blocks.anchors.shape
    length = features.shape[1]
    context = run_encode(features, w["fc"], w["enc_norm"], shape.epsilon)
    x = mask_embedding.expand(batch, count, blocks.block, -1).clone()
    x[:, :, 0] = first_embeddings
    x = x.flatten(1, 2).to(kind)
    if torch.is_grad_enabled():
        x.requires_grad_()  # as every later layer's: one compiled form serves them all
    groups = shape.heads // shape.kv_heads
    bias = blocks.bias(length, groups, kind)
    cos, sin = table
    places = blocks.positions()
    rope = (cos[:length], sin[:length], cos[places], sin[places])
    sizes = (shape.heads, shape.kv_heads, shape.head_size, shape.epsilon)
    stacks = {name: w[name].unbind(0) for name in PER_LAYER}
    for index in range(shape.layers):
        x = run_layer(x, context, bias, rope, {n: s[index] for n, s in stacks.items()}, sizes)
    return normed(x, w["out_norm"], shape.epsilon).view(batch, count, blocks.block, -1)
