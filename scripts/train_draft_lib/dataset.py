"""Answered chats, flat, and what the draft sees of them: the target's layer inputs.

Texts lie one after another without padding. Features are made once by a run of the target over
every text and kept on the device in bfloat16 (for SmolLM2-135M 4.6 kB a token: 60 GB for 13
million); running the target within each training step instead would about double its arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .target import Target


@dataclass
class Texts:
    """``tokens`` [N]; of text i: ``starts[i]``, ``lengths[i]`` and ``greedy[i]``, the index within
    the text of the first token that the target chose greedily, with all behind it."""

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    greedy: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> Texts:
        """From (prompt, answer, drawn tokens of the answer)."""
        lengths = np.array([len(p) + len(a) for p, a, _ in rows], np.int64)
        tokens = np.concatenate([np.array([*p, *a], np.int32) for p, a, _ in rows])
        greedy = np.array([len(p) + drawn for p, _, drawn in rows], np.int64)
        return cls(tokens, np.cumsum(lengths) - lengths, lengths, greedy)

    def first(self, count: int) -> Texts:
        """The first ``count`` texts alone."""
        tokens = self.tokens[: int(self.lengths[:count].sum())]
        return Texts(tokens, self.starts[:count], self.lengths[:count], self.greedy[:count])

    def save(self, path: Path) -> None:
        unfinished = path.with_name(path.name + ".part.npz")
        np.savez(unfinished, **vars(self))
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        with np.load(path) as found:
            return cls(**{name: found[name] for name in found.files})


@dataclass
class Seen:
    """On the device: ``features`` [N, layers * width] unscaled; ``likely`` [N, k] the target's most
    probable next tokens and ``chances`` [N, k], normed over these k."""

    features: Tensor
    likely: Tensor
    chances: Tensor


@torch.no_grad()
def look(
    target: Target,
    texts: Texts,
    layers: tuple[int, ...],
    candidates: int,
    rows: int,
    kind: torch.dtype,
) -> Seen:
    """Run the target over every text."""
    device = target.device
    count, width = len(texts.tokens), target.sizes.width
    features = torch.empty((count, len(layers) * width), dtype=kind, device=device)
    likely = torch.empty((count, candidates), dtype=torch.int32, device=device)
    chances = torch.empty((count, candidates), dtype=torch.float16, device=device)
    flat = torch.from_numpy(texts.tokens).to(device).long()
    order = np.argsort(texts.lengths, kind="stable")
    for begin in range(0, len(order), rows):
        part = order[begin : begin + rows]
        lengths = torch.from_numpy(texts.lengths[part]).to(device)
        starts = torch.from_numpy(texts.starts[part]).to(device)
        steps = torch.arange(int(texts.lengths[part].max()), device=device)
        there = steps < lengths[:, None]
        places = (starts[:, None] + steps).clamp_(max=count - 1)
        hidden, inputs = target.prefill(flat[places], layers)
        at = places[there]
        for index, values in enumerate(inputs):
            features[at, index * width : (index + 1) * width] = values[there].to(kind)
        if candidates:
            for where, row in zip(at.split(8192), hidden[there].split(8192), strict=True):
                best = target.logits(row).topk(candidates, -1)
                likely[where] = best.indices.int()
                chances[where] = best.values.softmax(-1).half()
    return Seen(features, likely, chances)


def feature_scale(features: Tensor, width: int) -> Tensor:
    """What to multiply each feature by so that layers and dimensions weigh alike at the start.

    The inverse of its root mean square over a sample, within a factor of four of its layer's
    median: in Q8_0, which shares one scale over 32 weights, wider spans lose too much.
    """
    sample = features[torch.linspace(0, len(features) - 1, min(len(features), 20000)).long()]
    # Some tokens (the first of all) are a thousand times as large as others: they do not count.
    size = sample.float().abs().amax(1)
    sample = sample[size <= size.quantile(0.95)].float()
    roots = sample.square().mean(0).sqrt().view(-1, width)
    middle = roots.median(1, keepdim=True).values
    return (1.0 / torch.clamp(roots, middle / 4, middle * 4)).flatten()
