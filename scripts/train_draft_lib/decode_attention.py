"""Attention of one new token a row over the cells that row has, as a Triton kernel.

torch's own attention reads every cell up to the longest row's and a mask beside them; this one
reads what each row has, and nothing of a row that is over. Where Triton is missing or its result is
off, torch's attention is used.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GROUP = 16
"""Queries of a program: the heads that share keys, padded to what the matrix units take."""


def attend(q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, length: int) -> Tensor:
    """[rows, heads * head_size] from ``q`` [rows, heads, head_size].

    ``keys`` and ``values``: [rows * kv_heads, cells, head_size], of which row i has ``counts[i]``.
    ``length``: no count is above it.
    """
    if q.is_cuda and works(q.dtype, q.shape[2]):
        return _by_triton(q, keys, values, counts)
    return _by_torch(q, keys, values, counts, length)


def _by_torch(q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, length: int) -> Tensor:
    rows, heads, size = q.shape
    kv_heads = keys.shape[0] // rows
    groups = heads // kv_heads
    bias = torch.zeros((rows, length), dtype=q.dtype, device=q.device)
    bias.masked_fill_(torch.arange(length, device=q.device) >= counts[:, None], -torch.inf)
    with sdpa_kernel(BACKENDS):
        mixed = F.scaled_dot_product_attention(
            q.view(rows, kv_heads, groups, size),
            keys[:, :length].view(rows, kv_heads, length, size),
            values[:, :length].view(rows, kv_heads, length, size),
            attn_mask=bias[:, None, None].expand(rows, kv_heads, groups, length),
        )
    return mixed.reshape(rows, heads * size)


def _by_triton(q: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    rows, heads, size = q.shape
    kv_heads = keys.shape[0] // rows
    q = q.contiguous()
    out = torch.empty_like(q)
    from .decode_kernel import attention

    attention[(rows * kv_heads,)](
        q,
        keys,
        values,
        out,
        counts,
        keys.stride(0),
        size**-0.5,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        SIZE=size,
        GROUP=GROUP,
        CELLS=64,
        num_warps=4,
    )
    return out.view(rows, heads * size)


@functools.cache
def works(kind: torch.dtype, size: int) -> bool:
    """Whether the kernel can be had and says what torch says."""
    try:
        random = torch.Generator(device="cuda").manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device="cuda").to(kind)

        q, keys, values = make(6, 9, size), make(18, 192, size), make(18, 192, size)
        counts = torch.tensor([1, 2, 63, 64, 65, 192], device="cuda")
        got = _by_triton(q, keys, values, counts).float()
        off = (got - _by_torch(q, keys, values, counts, 192).float()).abs().max()
        if float(off) < 0.02:
            return True
        print(f"no attention by Triton: it is off by {float(off):.3f}", flush=True)
    except Exception as error:  # Triton fails with whatever its compiler raises
        line = str(error).strip().splitlines()[:1]
        print(f"no attention by Triton: {type(error).__name__}: {line}", flush=True)
    return False
