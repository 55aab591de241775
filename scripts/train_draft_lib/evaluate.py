"""Drafts judged as they are served: greedy texts, a block at a time, only equal tokens accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draft import Blocks, Shape, forward


@dataclass
class Text:
    """A chat and its greedy answer: ``tokens``, of which ``answer`` is the answer's first."""

    kind: str
    tokens: list[int]
    answer: int


@torch.no_grad()
def proposals(
    parameters: Mapping[str, Tensor],
    shape: Shape,
    features: Tensor,
    tokens: Tensor,
    embedding: Tensor,
    head: Tensor,
    table: tuple[Tensor, Tensor],
    *,
    first: int,
    block: int,
    at_once: int = 64,
) -> Tensor:
    """What is proposed behind every position from ``first`` on of a text: [N - first, block - 1].

    ``features`` [N, target layers * width], scaled; ``tokens`` [N].
    """
    found = []
    every = torch.arange(first, len(tokens), device=tokens.device)
    mask = embedding[shape.mask_token].to(features.dtype)
    for anchors in every.split(at_once):
        hidden = forward(
            parameters,
            shape,
            features[None],
            embedding[tokens[anchors]][None].to(features.dtype),
            mask,
            Blocks(anchors[None], block),
            table,
        )
        rows = hidden[0, :, 1:].flatten(0, 1)
        found.append((rows @ head.to(rows.dtype).t()).argmax(-1).view(len(anchors), block - 1))
    return torch.cat(found)


@dataclass
class Score:
    """Of one text or many: steps of the served loop and the tokens that they committed."""

    steps: int = 0
    committed: int = 0

    def add(self, other: Score) -> None:
        self.steps += other.steps
        self.committed += other.committed

    @property
    def mean(self) -> float:
        return self.committed / max(1, self.steps)


def matches(tokens: Sequence[int], answer: int, proposed: Sequence[Sequence[int]]) -> list[int]:
    """How many proposals are accepted behind each position of the answer but the last."""
    found = []
    for anchor in range(answer, len(tokens) - 1):
        row = proposed[anchor - answer]
        accepted = 0
        for guess, right in zip(row, tokens[anchor + 1 :], strict=False):
            if guess != right:
                break
            accepted += 1
        found.append(accepted)
    return found


def walk(accepted: Sequence[int]) -> Score:
    """The served loop over an answer: its first token is the prompt's, each step commits the
    accepted tokens and one of the target's. What runs over the end is not counted."""
    score, at = Score(), 0
    while at < len(accepted):
        committed = min(accepted[at] + 1, len(accepted) - at)
        score.add(Score(1, committed))
        at += committed
    return score
