"""The likeliest tokens of rows of logits, without sorting them or making chances of all of them.

Theory of operation. A row is looked at as lines, one below the other. The largest of each column is
found in one go, fast, and the likeliest tokens are in the columns that have the largest of these.
To the sum that makes chances of logits each column gives its largest, and what else is in it: as it
is where the likeliest are, and for the others as much as some of them have. Tokens that are next to
each other in the vocabulary, and often alike, are in different columns.
"""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np

MARGIN = 12.0
"""Logits below the largest that are looked at. A token further down has less than a hundred and
sixty thousandth of the likeliest one's chance."""
LINES = 64
SAMPLED, FEWEST = 8, 64
"""Of so many columns one says what is in the others, and so many columns do, where there are."""


def top_tokens(rows: Any, count: int) -> list[tuple[list[int], list[float]]]:
    """Of each row of float32[rows, vocabulary], the ``count`` likeliest tokens, or fewer if no more
    are within the margin, with the logarithms of their chances, which are off by some hundredths.
    Of equal ones, the smaller number first."""
    number, size = rows.shape
    lines = min(LINES, size)
    columns = size // lines
    grid = rows[:, : lines * columns].reshape(number, lines, columns)
    # What makes no whole line.
    rest = rows[:, lines * columns :]
    best = grid.max(axis=1)
    ordered = np.sort(best, axis=1)
    largest = ordered[:, -1]
    if rest.shape[1]:
        largest = np.maximum(largest, rest.max(axis=1))
    top = best >= ordered[:, -min(count, columns), None]
    at, column = top.nonzero()
    values = grid[at, :, column]
    total = _sum_of_chances(grid, best, top, values, rest, largest)

    least = np.nextafter(largest - MARGIN, largest)
    if columns >= count:
        least = np.maximum(least, ordered[:, -count])
    place, line = (values >= least[at, None]).nonzero()
    row, token, value = at[place], line * columns + column[place], values[place, line]
    if rest.shape[1]:
        more, behind = (rest >= least[:, None]).nonzero()
        row = np.concatenate([row, more])
        token = np.concatenate([token, behind + lines * columns])
        value = np.concatenate([value, rest[more, behind]])
    order = np.lexsort((token, -value, row))
    row = row[order]
    chances = (value[order].astype(np.float64) - (largest + np.log(total))[row]).tolist()
    tokens, found, begin = token[order].tolist(), [], 0
    for end in row.searchsorted(np.arange(number), side="right").tolist():
        last = min(end, begin + count)
        found.append((tokens[begin:last], chances[begin:last]))
        begin = end
    return found


def _sum_of_chances(grid: Any, best: Any, top: Any, values: Any, rest: Any, largest: Any) -> Any:
    """float64 of each row: about the sum of all its tokens' chances, in those of its likeliest one.
    ``best``: of each column the largest; ``values``: the whole columns that are in ``top``."""
    columns = best.shape[1]
    chances = np.exp(best - largest[:, None])
    total = chances.sum(axis=1, dtype=np.float64)
    at = top.nonzero()[0]
    known = np.exp(values - largest[at, None]).sum(axis=1, dtype=np.float64) - chances[top]
    total += np.bincount(at, weights=known, minlength=len(grid))
    if rest.shape[1]:
        total += np.exp(rest - largest[:, None]).sum(axis=1, dtype=np.float64)
    some = min(columns, max(columns // SAMPLED, FEWEST))
    others = ~top[:, :some]
    sums = np.exp(grid[:, :, :some] - largest[:, None, None]).sum(axis=1) - chances[:, :some]
    share = (columns - top.sum(axis=1)) / np.maximum(others.sum(axis=1), 1)
    return total + share * (sums * others).sum(axis=1)
