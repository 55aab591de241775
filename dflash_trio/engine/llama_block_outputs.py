"""What a draft's block of tokens leaves in llama.cpp, read as guesses."""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np

from .drafting.draft_tree import Ranking
from .llama_draft_abi import read_lattice
from .llama_draft_context import DraftContext
from .llama_top_tokens import top_tokens

ALTERNATIVES = 8
"""Tokens at each place that a tree is made of."""


class BlockOutputs:
    """Of the blocks that were decoded last, one behind the other.

    ``candidates``: of a selector's lattice at each place, whose rows are ``width`` long; 0: there
    are logits. ``skipped``: places at a block's beginning that guess nothing.
    """

    def __init__(self, context: DraftContext, *, candidates: int, width: int, skipped: int) -> None:
        self._context = context
        self._candidates = candidates
        self._width = width
        self._skipped = skipped

    def guesses(self, count: int, block: int) -> list[list[int]]:
        """``count``: tokens of all blocks; ``block``: of each. Waits, as the others do."""
        if self._candidates:
            return self._walk_lattice(count, block)
        logits = self._context.logits(count)
        # A block at a time: of a part of all rows numpy would make a copy first.
        return [
            logits[at + self._skipped : at + block].argmax(axis=1).tolist()
            for at in range(0, count, block)
        ]

    def rankings(self, count: int, block: int) -> list[Ranking]:
        """At each place the likeliest tokens, whatever comes before. A DSpark's, whose logits are
        corrected by its own best guess before, are taken to hold for others there, too."""
        if self._candidates:
            return self._rank_lattice(count, block)
        logits = self._context.logits(count)
        ranked = []
        for begin in range(0, count, block):
            places = top_tokens(logits[begin + self._skipped : begin + block], ALTERNATIVES)
            ranked.append(Ranking([tokens for tokens, _ in places], [[ps] for _, ps in places]))
        return ranked

    def _rank_lattice(self, count: int, block: int) -> list[Ranking]:
        """A selector's candidates at each place, with its scores as logits: of each after each."""
        top, ranked = self._candidates, []
        for rows in self._lattice(count, block):
            scores = rows[1:, top : top + top * top].reshape(-1, top, top).astype(np.float64)
            scores -= scores.max(axis=2, keepdims=True)
            scores -= np.log(np.exp(scores).sum(axis=2, keepdims=True))
            chances = scores.tolist()
            # Before the first place stands the last token, as the first of its candidates.
            del chances[0][1:]
            ranked.append(Ranking(rows[1:, :top].astype(np.int64).tolist(), chances))
        return ranked

    def _lattice(self, count: int, block: int) -> Any:
        """float32[blocks, block, width]"""
        lattice = read_lattice(self._context.native, count, self._width)
        return lattice.reshape(-1, block, self._width)

    def _walk_lattice(self, count: int, block: int) -> list[list[int]]:
        """The greedy walk: at each position the best successor of the candidate chosen before."""
        top = self._candidates
        rows = self._lattice(count, block)
        chosen = np.zeros(len(rows), dtype=np.int64)
        each = np.arange(len(rows))
        walked = np.empty((len(rows), block - 1), dtype=np.int64)
        for position in range(1, block):
            row = rows[:, position]
            scores = row[:, top : top + top * top].reshape(-1, top, top)
            chosen = scores[each, chosen].argmax(axis=1)
            walked[:, position - 1] = row[each, chosen]
        found: list[list[int]] = walked.tolist()
        return found
