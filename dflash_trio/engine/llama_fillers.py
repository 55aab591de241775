"""Tokens in vain for the rows that lie between those of a batch.

A partitioned cache computes rows that form a run at once, and each run by itself, by a graph that
is built anew (measured on an H200 with SmolLM2-135M: four rows scattered among sixteen took 11 ms a
step, and 1.4 ms in a run). On a GPU a few tokens more cost next to nothing, so the gaps are filled,
and the fillers are taken back before anybody else sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .model_runner import BatchSlice

MOST_FILLED = 16
"""Tokens of a row at most: more would be felt."""
ANY_TOKEN = 0
"""Every vocabulary has it."""


def fillers(
    batch: Sequence[BatchSlice], length_of: Callable[[int], int], max_ctx: int, capacity: int
) -> list[BatchSlice]:
    """What to compute beside a batch, in rows that have ``length_of`` tokens, ``max_ctx`` at most.
    Nothing where that and the batch are more than ``capacity`` tokens."""
    if not capacity or len(batch) < 2:
        return []
    wanted = {item.seq_id for item in batch}
    between = set(range(min(wanted), max(wanted))) - wanted
    # As many tokens as all have: what is beyond that is computed apart in any case.
    count = min(len(item.tokens) for item in batch)
    tokens = sum(len(item.tokens) for item in batch)
    if count > MOST_FILLED or tokens + count * len(between) > capacity:
        return []
    lengths = {row: length_of(row) for row in sorted(between)}
    return [
        BatchSlice(row, length, (ANY_TOKEN,) * count, 0)
        for row, length in lengths.items()
        if length + count <= max_ctx
    ]
