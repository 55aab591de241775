"""Tokens in vain that make the rows of a batch even.

A partitioned cache computes together what is a run of rows with equally many tokens, and everything
else in parts, each by a graph that is built anew (measured on an H200 with SmolLM2-135M: four rows
scattered among sixteen took 11 ms a step, and 1.4 ms in a run; four prompts of 33 to 38 tokens 18
ms, and one 4). So gaps between rows are filled and shorter rows made longer where that costs less
than the part that it spares, and the fillers are taken back before anybody else sees them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from .model_runner import BatchSlice

WORTH = 64
"""Tokens in vain for a part less, at most. A part reads all weights of the model once, and about so
many tokens take a GPU as long to compute, if it is all the GPU's."""
FAR = 1024
"""Cells that a filled row may have more than any of the batch: all in a part look at as many."""
ANY_TOKEN = 0
"""Every vocabulary has it."""


def filler_room(chunk: int, slots: int) -> int:
    """Tokens that a GPU's batch may have beside those that are wanted."""
    return min(chunk, WORTH * slots)


def fillers(
    batch: Sequence[BatchSlice],
    length_of: Callable[[int], int],
    max_ctx: int,
    capacity: int,
    most: int,
) -> list[BatchSlice]:
    """What to compute beside a batch: behind its slices, and in the rows between them, which have
    ``length_of`` tokens. No row gets more than ``max_ctx`` tokens, and together with the batch they
    are ``capacity`` tokens at most, of which llama.cpp computes ``most`` at a time."""
    if not capacity or len(batch) < 2:
        return []
    sizes = {item.seq_id: len(item.tokens) for item in batch}
    counts = Counter(sizes.values())
    if len(counts) == 1 and max(sizes) - min(sizes) == len(sizes) - 1:
        return []  # in nearly all steps
    ends = {item.seq_id: item.position + len(item.tokens) for item in batch}
    room = capacity - sum(sizes.values())
    longest = min(max_ctx, max(ends.values()) + FAR)

    def end_of(row: int) -> int:
        return ends[row] if row in ends else length_of(row)

    def filled(targets: Mapping[int, int]) -> dict[int, int]:
        """How many tokens in vain each row gets, where ``targets`` are what they should have."""
        found: dict[int, int] = {}
        left = room
        rows = sorted(targets)
        wanted = [(range(row, row + 1), targets[row] - sizes[row]) for row in rows]
        for rows_alike, count in wanted + _holes(targets):
            tokens = count * len(rows_alike)
            if count and tokens <= left and max(map(end_of, rows_alike)) + count <= longest:
                found |= dict.fromkeys(rows_alike, count)
                left -= tokens
        return found

    def cost(found: Mapping[int, int]) -> int:
        """Of a batch with ``found``, in tokens."""
        both = Counter(sizes) + Counter(found)
        return WORTH * parts(both, most) + sum(found.values())

    levels = _levels(counts)
    leveled = {row: levels[size] for row, size in sizes.items()}
    best = min(({}, filled(sizes), filled(leveled)), key=cost)
    return [
        BatchSlice(row, end_of(row), (ANY_TOKEN,) * count, 0) for row, count in sorted(best.items())
    ]


def parts(sizes: Mapping[int, int], most: int) -> int:
    """In how many parts llama.cpp computes so many tokens of each row: the first row and those that
    follow it without a gap, and of all of them as many tokens as each has, ``most`` together; then
    what is left. (``llama_batch_allocr::split_equal``.)"""
    left = dict(sorted(sizes.items()))
    count = 0
    while left:
        run: list[int] = []
        for row in left:
            if not run or row == run[-1] + 1:
                run.append(row)
        least = min(*(left[row] for row in run), max(1, most // len(run)))
        for row in run:
            left[row] -= least
            if not left[row]:
                del left[row]
        count += 1
    return count


def _levels(rows: Mapping[int, int]) -> dict[int, int]:
    """How many tokens the slices of each size are to have. ``rows``: how many of that size there
    are."""
    levels = {}
    level = 0
    for size in sorted(rows, reverse=True):
        if (level - size) * rows[size] > WORTH or not level:
            level = size
        levels[size] = level
    return levels


def _holes(targets: Mapping[int, int]) -> list[tuple[range, int]]:
    """The rows between those of a batch, and how many tokens join what is beside them."""
    found = []
    rows = sorted(targets)
    least = min(targets.values())
    for row, following in pairwise(rows):
        hole = range(row + 1, following)
        for size in (min(targets[row], targets[following]), least):
            if hole and len(hole) * size <= WORTH:
                found.append((hole, size))
                break
    return found
