"""The target's answers, many at a time, and prompts that it makes up itself.

Rows are decoded over one static cache; on CUDA a step is a captured graph. Every so many steps the
rows that are over are taken out and get the next prompts, so that hardly any row works in vain. A
share of the answers begins with a few tokens drawn at temperature 1: served greedily they would
never be seen, but the greedy text behind them is like any other, and there is more of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .target import Cache, Target

CELLS = 64
ROUND = 32
"""Steps from one look at which rows are over to the next."""
AT_ONCE = 256
"""Prompts computed in one batch."""
LONGEST_PERIOD = 96
LEAST_REPEATED = 24


@dataclass(frozen=True)
class Answer:
    """``prompt`` indexes what was asked; ``drawn`` tokens of the answer are not greedy ones."""

    prompt: int
    tokens: list[int]
    drawn: int


class Generator:
    """``rows`` at a time; a prompt and its answer have ``length`` tokens at most."""

    def __init__(
        self, target: Target, rows: int, length: int, ends: frozenset[int], seed: int
    ) -> None:
        self.target = target
        self.rows = rows
        self.length = -(-length // CELLS) * CELLS
        device = target.device
        self.cache: Cache = target.new_cache(rows, self.length)
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)
        self.lengths = torch.ones(rows, dtype=torch.long, device=device)
        """Of the prompts."""
        self.drawn = torch.zeros(rows, dtype=torch.long, device=device)
        """First tokens of each answer that are not greedy ones."""
        self.said = torch.zeros((rows, 2), dtype=torch.long, device=device)
        """Answers so far; a last column takes what is decoded of rows that are over."""
        self.ends = torch.tensor(sorted(ends), device=device)
        torch.manual_seed(seed)
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.use_graphs = device.startswith("cuda")

    @torch.no_grad()
    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        drawn_share: float = 0.0,
        drawn_tokens: tuple[int, int] = (1, 12),
        cut_loops: bool = True,
        deadline: float = float("inf"),
        report: Callable[[int, int], None] = lambda prompts, tokens: None,
    ) -> Iterator[Answer]:
        """Answers of at most ``most`` tokens, in any order, the end token kept; those that begin to
        loop end soon after. ``drawn_tokens``: the fewest and the most that are drawn at temperature
        1, of those that have any. What is not over at the ``deadline`` (``time.monotonic``) is left
        out, but for the first to end."""
        most = min(most, self.length - max(map(len, prompts)))
        self.said = torch.full(
            (self.rows, most + 1), -1, dtype=torch.long, device=self.tokens.device
        )
        self.graphs.clear()
        self.positions.zero_()
        asked_by = np.full(self.rows, -1)
        waiting = iter(range(len(prompts)))
        over = np.ones(self.rows, bool)
        done = kept = 0
        reported = time.monotonic()
        while True:
            new = [row for row in np.flatnonzero(over) if self._next(row, asked_by, waiting)]
            if new:
                self._begin(new, [prompts[i] for i in asked_by[new]], drawn_share, drawn_tokens)
            if not (asked_by >= 0).any():
                return
            # Who goes on is beyond the tokens that are drawn, unless all of an answer is.
            longest = int(self.drawn.max()) if new or drawn_tokens[1] > ROUND else 0
            for step in range(ROUND):
                self._step(drawing=step < longest)
            cuts = self._cuts(most, cut_loops).cpu().numpy()
            over = cuts > 0
            finished = np.flatnonzero(over & (asked_by >= 0))
            table = self.said[torch.from_numpy(finished).to(self.said.device)].cpu().numpy()
            drawn = self.drawn.cpu().numpy()
            for row, tokens in zip(finished, table, strict=True):
                count = int(cuts[row])
                kept += count
                yield Answer(
                    int(asked_by[row]), tokens[:count].tolist(), min(int(drawn[row]), count)
                )
            done += len(finished)
            asked_by[finished] = -1
            if time.monotonic() > deadline and done:
                return
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                report(done, kept)

    @staticmethod
    def _next(row: int, asked_by: np.ndarray, waiting: Iterator[int]) -> bool:
        asked_by[row] = next(waiting, -1)
        return bool(asked_by[row] >= 0)

    def _begin(
        self,
        new: Sequence[int],
        prompts: Sequence[Sequence[int]],
        drawn_share: float,
        drawn_tokens: tuple[int, int],
    ) -> None:
        """Compute these prompts into these rows, and the first token of each answer."""
        device = self.tokens.device
        # Alike in length, and so with little padding.
        order = sorted(range(len(new)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), AT_ONCE):
            part = order[begin : begin + AT_ONCE]
            rows = torch.tensor([int(new[i]) for i in part], device=device)
            lengths = torch.tensor([len(prompts[i]) for i in part])
            asked = torch.zeros((len(part), int(lengths.max())), dtype=torch.long)
            for index, i in enumerate(part):
                asked[index, : len(prompts[i])] = torch.tensor(prompts[i])
            lengths = lengths.to(device)
            least, most = drawn_tokens
            drawn = torch.randint(
                least, most + 1, (len(part),), generator=self.random, device=device
            )
            chance = torch.rand(len(part), generator=self.random, device=device)
            drawn = torch.where(chance < drawn_share, drawn, 0)
            hidden, _ = self.target.prefill(asked.to(device), (), self.cache, rows)
            logits = self.target.logits(hidden[torch.arange(len(part), device=device), lengths - 1])
            first = _chosen(logits, drawn > 0)
            self.tokens[rows] = first
            self.positions[rows] = lengths
            self.lengths[rows] = lengths
            self.drawn[rows] = drawn
            self.said[rows] = -1
            self.said[rows, 0] = first

    def _cuts(self, most: int, cut_loops: bool) -> Tensor:
        """How many tokens of each row's answer count, 0 while it goes on."""
        said = self.said[:, :most]
        long_enough = torch.where((said >= 0).all(1), most, most + 1)
        is_end = torch.isin(said, self.ends)
        first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, most + 1)
        cut = torch.minimum(long_enough, first_end)
        if cut_loops:
            loops = loop_ends(said, said >= 0)
            cut = torch.minimum(cut, torch.where(loops < most, loops, most + 1))
        return torch.where(cut <= most, cut, 0)

    def _step(self, *, drawing: bool) -> None:
        """One token for each row. On CUDA by a graph, captured at its second use."""
        if not self.use_graphs:
            self._decode(drawing, int(self.positions.max()) + 1)
            return
        graph = self.graphs.get(drawing)
        if graph is not None:
            graph.replay()
            return
        # A step that is run twice writes the same keys to the same cells: warming up changes
        # nothing but what is put back.
        kept = [t.clone() for t in (self.tokens, self.positions, self.said)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(drawing, self.length)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

        def put_back() -> None:
            for tensor, values in zip((self.tokens, self.positions, self.said), kept, strict=True):
                tensor.copy_(values)

        put_back()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._decode(drawing, self.length)
        except RuntimeError as error:
            print(f"generation without CUDA graphs: {error}", flush=True)
            self.use_graphs = False
            torch.cuda.synchronize()
            put_back()
            self._decode(drawing, self.length)
            return
        self.graphs[drawing] = graph
        graph.replay()

    def _decode(self, drawing: bool, length: int) -> None:
        logits = self.target.step(self.tokens, self.positions, self.cache, length)
        index = self.positions + 1 - self.lengths
        chosen = _chosen(logits, self.drawn > index) if drawing else logits.argmax(-1)
        self.tokens.copy_(chosen)
        # Rows that are over go on until somebody looks, within the cache and the last column.
        self.positions.copy_((self.positions + 1).clamp_(max=self.length - 1))
        index = index.clamp(max=self.said.shape[1] - 1)
        self.said.scatter_(1, index[:, None], chosen[:, None])


def _chosen(logits: Tensor, drawn: Tensor) -> Tensor:
    """The greedy token, or where ``drawn`` one at temperature 1 (by Gumbel noise)."""
    noise = torch.empty_like(logits).exponential_().log_().neg_()
    return (logits + noise.masked_fill_(~drawn[:, None], 0.0)).argmax(-1)


def loop_ends(said: Tensor, there: Tensor | None = None) -> Tensor:
    """Where each row [N, T] has repeated itself for long enough to be cut; T where it never does.

    A period of p tokens counts as a loop when 2 p more tokens, and 24 at least, repeat it. Where
    ``there`` is false, nothing is said.
    """
    rows, length = said.shape
    found = torch.full((rows,), length, device=said.device)
    for period in range(1, min(LONGEST_PERIOD, length // 2) + 1):
        needed = max(2 * period, LEAST_REPEATED)
        if length - period < needed:
            break
        same = said[:, period:] == said[:, :-period]
        if there is not None:
            same &= there[:, period:]
        count = torch.nn.functional.pad(same.int().cumsum(1), (1, 0))
        full = (count[:, needed:] - count[:, :-needed]) == needed
        first = torch.where(full.any(1), full.int().argmax(1) + period + needed, length)
        found = torch.minimum(found, first)
    return found
