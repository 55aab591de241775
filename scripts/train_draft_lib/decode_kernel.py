"""The Triton kernel of :mod:`.decode_attention`: imported only where there is Triton."""

import triton
import triton.language as tl


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    out,
    counts,
    stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    CELLS: tl.constexpr,
):
    """One row's one key head; softmax over its cells block by block, kept in a running maximum."""
    pair = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + pair // KV_HEADS)
    head = tl.arange(0, GROUP)
    place = tl.arange(0, SIZE)
    at = (pair * GROUPS + head[:, None]) * SIZE + place[None, :]
    there = head[:, None] < GROUPS
    asked = tl.load(q + at, mask=there, other=0.0)
    most = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, SIZE), tl.float32)
    for begin in range(0, count, CELLS):
        cell = begin + tl.arange(0, CELLS)
        seen = cell[:, None] < count
        cells = pair * stride + cell[:, None] * SIZE + place[None, :]
        key = tl.load(keys + cells, mask=seen, other=0.0)
        score = tl.dot(asked, tl.trans(key)) * scale
        score = tl.where(cell[None, :] < count, score, -1e30)
        higher = tl.maximum(most, tl.max(score, 1))
        shrunk = tl.exp(most - higher)
        share = tl.exp(score - higher[:, None])
        value = tl.load(values + cells, mask=seen, other=0.0)
        total = total * shrunk + tl.sum(share, 1)
        mixed = mixed * shrunk[:, None] + tl.dot(share.to(value.dtype), value)
        most = higher
    mixed = mixed / total[:, None]
    tl.store(out + at, mixed.to(asked.dtype), mask=there)
