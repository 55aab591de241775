"""Answered chats, flat, and what the draft sees of them: the target's layer inputs.

Texts lie one after another without padding. Features are made once by a run of the target over
every text and kept on the device, on a GPU in eight bits (for SmolLM2-135M 2.3 kB a token: 60 GB
for 25 million); running the target within each training step instead would about double its
arithmetic.
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


class Plain:
    """Features [N, layers * width] as they are."""

    def __init__(self, count: int, layers: int, width: int, kind: torch.dtype, device: str) -> None:
        self.values = torch.empty((count, layers * width), dtype=kind, device=device)
        self.layers, self.width, self.dtype = layers, width, kind

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def device(self) -> torch.device:
        return self.values.device

    def put(self, at: Tensor, layer: int, values: Tensor) -> None:
        begin = layer * self.width
        self.values[at, begin : begin + self.width] = values.to(self.dtype)

    def __getitem__(self, places: Tensor) -> Tensor:
        """[*places, layers * width], unscaled."""
        return self.values[places]


class Packed:
    """Features in eight bits: floating point, around each dimension's own middle.

    Of a dimension that is large and hardly varies, eight bits would say nothing without that. A
    token and layer with values beyond the type's range has a divisor of its own.
    """

    KIND = torch.float8_e4m3fn
    MOST = 440.0

    def __init__(self, count: int, sample: Sequence[Tensor], kind: torch.dtype) -> None:
        """``sample``: of each layer some rows [.., width]."""
        self.layers, self.width, self.dtype = len(sample), sample[0].shape[-1], kind
        self.device = sample[0].device
        middles, spreads = [], []
        for rows in sample:
            # As in feature_scale: the few tokens of enormous size do not count.
            size = rows.abs().amax(1)
            usual = rows[size <= size[torch.randperm(len(size))[:20000]].quantile(0.95)]
            middles.append(usual.mean(0))
            spreads.append(usual.std(0).clamp_(min=1e-6))
        self.middle, self.spread = torch.stack(middles), torch.stack(spreads)
        codes = (count, self.layers, self.width)
        # Bytes, because torch does not index the type itself on every device.
        self.codes = torch.empty(codes, dtype=torch.uint8, device=self.device)
        self.divisors = torch.empty((count, self.layers), dtype=torch.bfloat16, device=self.device)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.divisors.nbytes

    def put(self, at: Tensor, layer: int, values: Tensor) -> None:
        values = (values - self.middle[layer]) / self.spread[layer]
        divisor = (values.abs().amax(1) / self.MOST).clamp_(min=1.0).bfloat16()
        values = (values / divisor.float()[:, None]).clamp_(-448.0, 448.0)
        self.codes[at, layer] = values.to(self.KIND).view(torch.uint8)
        self.divisors[at, layer] = divisor

    def __getitem__(self, places: Tensor) -> Tensor:
        """[*places, layers * width], unscaled."""
        values = self.codes[places].view(self.KIND).to(self.dtype)
        values = values * self.divisors[places].to(self.dtype)[..., None]
        values = torch.addcmul(self.middle.to(self.dtype), values, self.spread.to(self.dtype))
        return values.flatten(-2)


@dataclass
class Seen:
    """On the device: ``features`` [N, layers * width] unscaled; ``likely`` [N, k] the target's most
    probable next tokens and ``chances`` [N, k], normed over these k."""

    features: Plain | Packed
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
    *,
    packed: bool = False,
) -> Seen:
    """Run the target over every text, ``rows`` at a time. Features are handed out in ``kind``."""
    device = target.device
    count, width = len(texts.tokens), target.sizes.width
    features: Plain | Packed | None = None
    if not packed:
        features = Plain(count, len(layers), width, kind, device)
    likely = torch.empty((count, candidates), dtype=torch.int32, device=device)
    chances = torch.empty((count, candidates), dtype=torch.float16, device=device)
    flat = torch.from_numpy(texts.tokens).to(device).long()
    order = np.argsort(texts.lengths, kind="stable")
    # Texts of one batch are alike in length. Packing is laid out by the first: a middling one.
    batches = [order[begin : begin + rows] for begin in range(0, len(order), rows)]
    batches.insert(0, batches.pop(len(batches) // 2))
    for part in batches:
        lengths = torch.from_numpy(texts.lengths[part]).to(device)
        starts = torch.from_numpy(texts.starts[part]).to(device)
        steps = torch.arange(int(texts.lengths[part].max()), device=device)
        there = steps < lengths[:, None]
        places = (starts[:, None] + steps).clamp_(max=count - 1)
        hidden, inputs = target.prefill(flat[places], layers)
        at = places[there]
        if features is None:
            features = Packed(count, [values[there] for values in inputs], kind)
        for index, values in enumerate(inputs):
            features.put(at, index, values[there])
        if candidates:
            for where, row in zip(at.split(8192), hidden[there].split(8192), strict=True):
                best = target.logits(row).topk(candidates, -1)
                likely[where] = best.indices.int()
                chances[where] = best.values.softmax(-1).half()
    assert features is not None
    return Seen(features, likely, chances)


def feature_scale(features: Plain | Packed) -> Tensor:
    """What to multiply each feature by so that layers and dimensions weigh alike at the start.

    The inverse of its root mean square over a sample, within a factor of four of its layer's
    median: in Q8_0, which shares one scale over 32 weights, wider spans lose too much.
    """
    count = min(len(features), 20000)
    sample = features[torch.linspace(0, len(features) - 1, count, device=features.device).long()]
    # Some tokens (the first of all) are a thousand times as large as others: they do not count.
    size = sample.float().abs().amax(1)
    sample = sample[size <= size.quantile(0.95)].float()
    roots = sample.square().mean(0).sqrt().view(-1, features.width)
    middle = roots.median(1, keepdim=True).values
    return (1.0 / torch.clamp(roots, middle / 4, middle * 4)).flatten()
