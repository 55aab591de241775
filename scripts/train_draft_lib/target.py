"""The target in torch, with the very weights that llama.cpp serves, and its greedy decoding.

Matrices are of one narrow type; the residual stream and the logits are float32, because a greedy
choice between two near tokens is decided by less than a narrow type can tell apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from .decode_attention import BACKENDS, attend
from .source import Sizes, Source


def wide_product(x: Tensor, rows: Tensor) -> Tensor:
    """x times the rows of a matrix, in float32 from narrow inputs where the device can."""
    if x.is_cuda and _wide_works(x.dtype):
        return torch.mm(x, rows.t(), out_dtype=torch.float32)
    return F.linear(x, rows).float()


@functools.cache
def _wide_works(kind: torch.dtype) -> bool:
    one = torch.ones((16, 16), dtype=kind, device="cuda")
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError) as error:
        print(f"logits are rounded to {kind}: {error}", flush=True)
        return False
    return True


@dataclass
class Cache:
    """Keys and values of all layers, each [rows * kv_heads, length, head_size]."""

    keys: list[Tensor]
    values: list[Tensor]


class Target:
    """Holds its weights on ``device`` in ``kind``; not differentiated."""

    def __init__(self, source: Source, device: str, kind: torch.dtype, length: int) -> None:
        self.sizes: Sizes = source.sizes
        self.device = device
        self.kind = kind
        found = source.weights()

        def put(*names: str) -> Tensor:
            return torch.cat([torch.from_numpy(found[n]) for n in names]).to(device, kind)

        self.embedding = put("token_embd.weight")
        self.head = put("output.weight")
        self.norm = put("output_norm.weight").float()
        self.layers: list[dict[str, Tensor]] = []
        for index in range(self.sizes.layers):
            blk = f"blk.{index}."
            self.layers.append(
                {
                    "attn_norm": put(blk + "attn_norm.weight").float(),
                    "qkv": put(*(f"{blk}attn_{n}.weight" for n in "qkv")),
                    "out": put(blk + "attn_output.weight"),
                    "ffn_norm": put(blk + "ffn_norm.weight").float(),
                    "gate_up": put(blk + "ffn_gate.weight", blk + "ffn_up.weight"),
                    "down": put(blk + "ffn_down.weight"),
                }
            )
        half = self.sizes.head_size // 2
        rates = self.sizes.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        if "rope_freqs.weight" in found:
            rates = rates / torch.from_numpy(found["rope_freqs.weight"]).double()
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def _attend(
        self,
        x: Tensor,
        layer: dict[str, Tensor],
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """x [..., width] in float32; ``attention`` gets heads before the last axis."""
        s = self.sizes
        seen = F.rms_norm(x, (s.width,), layer["attn_norm"], s.epsilon).to(self.kind)
        joined = F.linear(seen, layer["qkv"])
        q, k, v = joined.split([h * s.head_size for h in (s.heads, s.kv_heads, s.kv_heads)], -1)
        q = _turned(q.unflatten(-1, (s.heads, s.head_size)), cos, sin)
        k = _turned(k.unflatten(-1, (s.kv_heads, s.head_size)), cos, sin)
        mixed = attention(q, k, v.unflatten(-1, (s.kv_heads, s.head_size)))
        return x + F.linear(mixed, layer["out"]).float()

    def _feed_forward(self, x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        s = self.sizes
        seen = F.rms_norm(x, (s.width,), layer["ffn_norm"], s.epsilon).to(self.kind)
        gate, up = F.linear(seen, layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"]).float()

    def logits(self, x: Tensor) -> Tensor:
        """Of residual rows [N, width], float32."""
        s = self.sizes
        return wide_product(
            F.rms_norm(x, (s.width,), self.norm, s.epsilon).to(self.kind), self.head
        )

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        take: tuple[int, ...] = (),
        cache: Cache | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run whole texts [B, L], padded at the right.

        Returns the residual after the last layer [B, L, width] and the inputs of the layers in
        ``take``, float32. Keys and values go into the ``rows`` [B] of ``cache``.
        """
        s = self.sizes
        length = tokens.shape[1]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        x = self.embedding[tokens].float()
        inputs = []
        for index, layer in enumerate(self.layers):
            if index in take:
                inputs.append(x)

            def attention(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                if cache is not None and rows is not None:
                    shape = (-1, s.kv_heads, cache.keys[index].shape[1], s.head_size)
                    cache.keys[index].view(shape)[rows, :, :length] = k.transpose(1, 2)
                    cache.values[index].view(shape)[rows, :, :length] = v.transpose(1, 2)
                groups = s.heads // s.kv_heads
                k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
                with sdpa_kernel(BACKENDS):
                    mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
                return mixed.transpose(1, 2).flatten(2)

            x = self._attend(x, layer, attention, cos, sin)
            x = self._feed_forward(x, layer)
        if s.layers in take:
            inputs.append(x)
        return x, inputs

    def new_cache(self, rows: int, length: int) -> Cache:
        s = self.sizes
        size = (rows * s.kv_heads, length, s.head_size)

        def make() -> list[Tensor]:
            return [torch.zeros(size, dtype=self.kind, device=self.device) for _ in self.layers]

        return Cache(make(), make())

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """One token a row [B] at its own position, all of them below ``length``. Logits."""
        s = self.sizes
        batch = tokens.shape[0]
        cells = torch.arange(batch * s.kv_heads, device=self.device)
        places = positions[:, None].expand(-1, s.kv_heads).reshape(-1)
        counts = positions + 1
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embedding[tokens].float()
        for index, layer in enumerate(self.layers):

            def attention(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                keys, values = cache.keys[index], cache.values[index]
                keys[cells, places] = k.flatten(0, 1)
                values[cells, places] = v.flatten(0, 1)
                return attend(q, keys, values, counts, length)

            x = self._attend(x, layer, attention, cos, sin)
            x = self._feed_forward(x, layer)
        return self.logits(x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def narrow_type(name: str, device: str) -> Any:
    """``auto``: half precision on a GPU, float32 elsewhere."""
    if name == "auto":
        name = "float16" if device.startswith("cuda") else "float32"
    return getattr(torch, name)
