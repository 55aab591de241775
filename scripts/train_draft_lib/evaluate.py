"""Drafts judged as they are served: greedy texts, a block at a time, only equal tokens accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dataset import Plain, Texts
from .draft import Blocks, Shape, forward


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


def judge(
    parameters: Mapping[str, Tensor],
    shape: Shape,
    texts: Texts,
    kinds: Sequence[str],
    ends: Sequence[int],
    features: Plain,
    scale: Tensor,
    embedding: Tensor,
    head: Tensor,
    table: tuple[Tensor, Tensor],
    block: int,
) -> tuple[dict[str, Score], list[float]]:
    """The served loop over every text, up to its ``ends``.

    Returns the score of each kind and of ``all``, and for each position of the block the share of
    places in the answers behind which it and all before it are accepted.
    """
    scores = {kind: Score() for kind in ("all", *dict.fromkeys(kinds))}
    counts: list[int] = []
    for index, kind in enumerate(kinds):
        start, answer = int(texts.starts[index]), int(texts.greedy[index])
        part = slice(start, start + int(texts.lengths[index]))
        tokens = torch.from_numpy(texts.tokens[part]).to(features.device).long()
        proposed = proposals(
            parameters,
            shape,
            features[part] * scale.to(features.dtype),
            tokens,
            embedding,
            head,
            table,
            first=answer,
            block=block,
        )
        kept = tokens[: int(ends[index])].tolist()
        accepted = matches(kept, answer, proposed.tolist())
        counts += accepted
        for name in ("all", kind):
            scores[name].add(walk(accepted))
    shares = [sum(c >= i for c in counts) / max(1, len(counts)) for i in range(1, block)]
    return scores, [round(share, 4) for share in shares]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: committed tokens a step, by block and kind."""
    kinds = list(rows[0]["committed"])
    lines = [
        f"| block | loops | {' | '.join(kinds)} | accepted up to position 1, 2, ... |",
        "|---" * (len(kinds) + 3) + "|",
    ]
    for row in rows:
        means = " | ".join(f"{row['committed'][kind]:.2f}" for kind in kinds)
        shares = " ".join(f"{share:.2f}" for share in row["accepted"])
        loops = "as served" if row["loops"] else "cut off"
        lines.append(f"| {row['block']} | {loops} | {means} | {shares} |")
    return "\n".join(lines)
