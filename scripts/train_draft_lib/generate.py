"""The target's greedy answers, many at a time.

Rows start together and are decoded in waves over one static cache; on CUDA a step is a captured
graph, one for each multiple of 64 cells in use. A share of the rows begins with a few tokens drawn
at temperature 1: served greedily they would never be seen, but the greedy text behind them is like
any other, and there is more of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .target import Cache, Target

CELLS = 64
LONGEST_PERIOD = 96
LEAST_REPEATED = 24


@dataclass(frozen=True)
class Answer:
    """``prompt`` indexes what was asked; ``drawn`` tokens of the answer are not greedy ones."""

    prompt: int
    tokens: list[int]
    drawn: int


class Generator:
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
        self.ends = torch.tensor(sorted(ends), device=device)
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.use_graphs = device.startswith("cuda")

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        drawn_share: float = 0.0,
        most_drawn: int = 12,
        cut_loops: bool = True,
        deadline: float = float("inf"),
        report: Callable[[int, int], None] = lambda prompts, tokens: None,
    ) -> Iterator[Answer]:
        """Answers of at most ``most`` tokens, in any order, the end token kept; those that begin to
        loop end soon after. No new wave is begun after ``deadline`` (``time.monotonic``)."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        waves = [order[i : i + self.rows] for i in range(0, len(order), self.rows)]
        done = kept = 0
        # Long and short prompts in turn, so that a deadline leaves out neither kind.
        for wave in waves[::2] + waves[1::2][::-1]:
            if time.monotonic() > deadline and done:
                return
            for answer in self._wave(wave, prompts, most, drawn_share, most_drawn, cut_loops):
                kept += len(answer.tokens)
                yield answer
            done += len(wave)
            report(done, kept)

    @torch.no_grad()
    def _wave(
        self,
        wave: Sequence[int],
        prompts: Sequence[Sequence[int]],
        most: int,
        drawn_share: float,
        most_drawn: int,
        cut_loops: bool,
    ) -> list[Answer]:
        target, device, rows = self.target, self.target.device, self.rows
        lengths = torch.ones(rows, dtype=torch.long)
        lengths[: len(wave)] = torch.tensor([len(prompts[i]) for i in wave])
        longest = int(lengths.max())
        asked = torch.zeros((rows, longest), dtype=torch.long)
        for row, index in enumerate(wave):
            asked[row, : len(prompts[index])] = torch.tensor(prompts[index])
        asked, lengths = asked.to(device), lengths.to(device)
        steps = min(most, self.length - longest)

        drawn = torch.randint(1, most_drawn + 1, (rows,), generator=self.random, device=device)
        chance = torch.rand(rows, generator=self.random, device=device)
        drawn = torch.where(chance < drawn_share, drawn, 0)
        for begin in range(0, rows, 256):
            part = asked[begin : begin + 256]
            hidden, _ = target.prefill(part, (), self.cache, begin)
            last = lengths[begin : begin + 256] - 1
            logits = target.logits(hidden[torch.arange(len(part), device=device), last])
            self.tokens[begin : begin + 256] = self._choose(logits, drawn[begin : begin + 256] > 0)
        self.positions.copy_(lengths)
        said = torch.full((rows, steps), -1, dtype=torch.long, device=device)
        said[:, 0] = self.tokens
        over = torch.isin(self.tokens, self.ends)
        over[len(wave) :] = True
        for step in range(1, steps):
            cells = min(self.length, -(-(longest + step) // CELLS) * CELLS)
            if drawn_share and step < most_drawn:
                logits = target.step(self.tokens, self.positions, self.cache, cells)
                self.tokens.copy_(self._choose(logits, drawn > step))
                self.positions += 1
            else:
                self._greedy_step(cells)
            said[:, step] = self.tokens
            over |= torch.isin(self.tokens, self.ends)
            if step % 32 == 0:
                ended = over.clone()
                if cut_loops:
                    ended |= loop_ends(said[:, : step + 1]) <= step
                if float(ended.float().mean()) > 0.97:
                    break
        cut = torch.full((rows,), said.shape[1], device=device)
        if cut_loops:
            cut = torch.minimum(cut, loop_ends(said))
        is_end = torch.isin(said, self.ends)
        first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, said.shape[1])
        said_by = (said >= 0).sum(1)
        kept = torch.minimum(torch.minimum(cut, first_end), said_by).tolist()
        table, drawn_by = said.tolist(), drawn.tolist()
        return [
            Answer(index, table[row][: kept[row]], min(drawn_by[row], kept[row]))
            for row, index in enumerate(wave)
        ]

    def _choose(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """The greedy token, or where ``drawn`` one at temperature 1."""
        noise = torch.empty_like(logits).exponential_(generator=self.random).log_().neg_()
        return (logits + noise.masked_fill_(~drawn[:, None], 0.0)).argmax(-1)

    def _greedy_step(self, cells: int) -> None:
        if not self.use_graphs:
            self._step(cells)
            return
        graph = self.graphs.get(cells)
        if graph is None:
            # A step run twice writes the same keys to the same cells: warming up changes nothing
            # but the two tensors that are put back.
            tokens, positions = self.tokens.clone(), self.positions.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(cells)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self.tokens.copy_(tokens)
            self.positions.copy_(positions)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self._step(cells)
            except RuntimeError as error:
                print(f"generation without CUDA graphs: {error}", flush=True)
                self.use_graphs = False
                torch.cuda.synchronize()
                self.tokens.copy_(tokens)
                self.positions.copy_(positions)
                self._step(cells)
                return
            self.graphs[cells] = graph
        graph.replay()

    def _step(self, cells: int) -> None:
        logits = self.target.step(self.tokens, self.positions, self.cache, cells)
        self.tokens.copy_(logits.argmax(-1))
        self.positions += 1


def loop_ends(said: Tensor) -> Tensor:
    """Where each row [N, T] has repeated itself for long enough to be cut; T where it never does.

    A period of p tokens counts as a loop when 2 p more tokens, and 24 at least, repeat it.
    """
    rows, length = said.shape
    found = torch.full((rows,), length, device=said.device)
    for period in range(1, min(LONGEST_PERIOD, length // 2) + 1):
        needed = max(2 * period, LEAST_REPEATED)
        if length - period < needed:
            break
        same = said[:, period:] == said[:, :-period]
        count = torch.nn.functional.pad(same.int().cumsum(1), (1, 0))
        full = (count[:, needed:] - count[:, :-needed]) == needed
        first = torch.where(full.any(1), full.int().argmax(1) + period + needed, length)
        found = torch.minimum(found, first)
    return found
