"""The likeliest tokens of rows of logits, without sorting them."""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np

MARGIN = 12.0
"""Logits below the largest that are looked at. A token further down has less than a hundred and
sixty thousandth of the likeliest one's chance; all of them together are left out of the sum that
makes chances of logits (seen on a draft's rows: 0.3 % of it, and never more than 1 %)."""


def top_tokens(row: Any, count: int) -> tuple[list[int], list[float]]:
    """The ``count`` likeliest tokens of float32[vocabulary], or fewer if no more are within the
    margin, with the logarithms of their chances. Of equal ones, the smaller number first."""
    largest = row.max()
    some = np.flatnonzero(row > largest - MARGIN)
    values = row[some]
    total = float(np.exp(values - largest).sum(dtype=np.float64))
    if len(some) > count:
        best = np.argpartition(values, -count)[-count:]
        some, values = some[best], values[best]
    order = np.lexsort((some, -values))
    chances = values[order].astype(np.float64) - float(largest) - np.log(total)
    return some[order].tolist(), chances.tolist()
