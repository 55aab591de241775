"""The training loop: batches of blocks behind random positions, a schedule by time, checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from . import draft
from .dataset import Seen, Texts
from .decode_attention import BACKENDS
from .draft import Blocks, Shape
from .head import head_loss
from .optimizer import Optimizer

CHECKPOINT = "draft.pt"


@dataclass(frozen=True)
class Settings:
    batch: int
    anchors: int
    length: int
    rate: float
    warm_up: int
    decay: float
    muon: bool
    soft: float
    short_blocks: float
    position_decay: float
    minutes: float
    checkpoint_every: float
    seed: int


class Batches:
    """Draws training batches on the device."""

    def __init__(
        self, texts: Texts, seen: Seen, scale: Tensor, shape: Shape, settings: Settings
    ) -> None:
        device = seen.features.device
        self.seen, self.scale, self.shape, self.settings = seen, scale, shape, settings
        self.tokens = torch.from_numpy(texts.tokens).to(device).long()
        usable = (texts.lengths - texts.greedy >= 4) & (texts.lengths <= settings.length)
        self.starts = torch.from_numpy(texts.starts[usable]).to(device)
        self.lengths = torch.from_numpy(texts.lengths[usable]).to(device)
        self.greedy = torch.from_numpy(texts.greedy[usable]).to(device)
        self.order_random = torch.Generator().manual_seed(settings.seed)
        self.random = torch.Generator(device=device).manual_seed(settings.seed + 1)
        self.order = torch.zeros(0, dtype=torch.long)
        self.next = 0

    def __len__(self) -> int:
        return len(self.starts)

    def _ids(self) -> Tensor:
        size = self.settings.batch
        if self.next + size > len(self.order):
            count = max(len(self), size)
            self.order = torch.randperm(count, generator=self.order_random) % len(self)
            self.next = 0
        self.next += size
        return self.order[self.next - size : self.next].to(self.starts.device, non_blocking=True)

    def draw(self) -> tuple[Tensor, Tensor, Blocks, Tensor, Tensor]:
        """Features [B, L, ..], first tokens [B, A], blocks, and for each of the B * A * (block - 1)
        guessed positions the labels and their weights [.., 1 + k]."""
        settings, shape = self.settings, self.shape
        device, kind = self.scale.device, self.seen.features.dtype
        ids = self._ids()
        start, length, greedy = self.starts[ids], self.lengths[ids], self.greedy[ids]
        last = len(self.tokens) - 1
        places = (start[:, None] + torch.arange(settings.length, device=device)).clamp_(max=last)
        features = self.seen.features[places] * self.scale.to(kind)

        # Anchors spread over the greedy part, one in each of A equal stretches of it.
        size = (len(ids), settings.anchors)
        jitter = torch.rand(size, generator=self.random, device=device)
        share = (torch.arange(settings.anchors, device=device) + jitter) / settings.anchors
        room = (length - greedy)[:, None]
        anchors = (greedy[:, None] - 1) + (share * room).long().clamp_(max=room - 1)
        sizes = None
        steps = torch.arange(1, shape.block, device=device)
        wanted = anchors[:, :, None] + steps
        valid = wanted < length[:, None, None]
        if settings.short_blocks:
            short = torch.rand(size, generator=self.random, device=device) < settings.short_blocks
            sizes = torch.where(short, max(2, shape.block // 2), shape.block)
            valid &= steps < sizes[:, :, None]
        weights = torch.exp(-(steps - 1) / settings.position_decay) * valid
        at = (start[:, None, None] + wanted).clamp_(max=last)
        labels = self.tokens[at].flatten()[:, None]
        shares = torch.ones_like(labels, dtype=torch.float32)
        if settings.soft:
            before = at.flatten() - 1
            labels = torch.cat((labels, self.seen.likely[before].long()), 1)
            soft = settings.soft * self.seen.chances[before].float()
            shares = torch.cat((shares * (1 - settings.soft), soft), 1)
        first = self.tokens[start[:, None] + anchors]
        blocks = Blocks(anchors, shape.block, sizes)
        return features, first, blocks, labels, shares * weights.flatten()[:, None]

    def state(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "next": self.next,
            "order_random": self.order_random.get_state(),
            "random": self.random.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.order, self.next = state["order"].cpu(), state["next"]
        self.order_random.set_state(state["order_random"].cpu())
        self.random.set_state(state["random"].cpu())


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` by torch.compile from its first call on, or plain where that fails."""
    fast = torch.compile(function, dynamic=False)
    chosen: list[Callable[..., Tensor]] = [fast]

    def call(*arguments: Any) -> Tensor:
        if chosen[0] is fast:
            try:
                return fast(*arguments)
            except Exception as error:  # torch.compile fails with whatever its back end raises
                line = str(error).strip().splitlines()[:1]
                print(f"not compiled: {type(error).__name__}: {line}", flush=True)
                chosen[0] = function
        return function(*arguments)

    return call


class Trainer:
    """Parameters, optimizer and schedule; resumes from ``folder`` where a checkpoint lies.

    Parameters begin as ``start``, or at random.
    """

    def __init__(
        self,
        shape: Shape,
        settings: Settings,
        batches: Batches,
        embedding: Tensor,
        head: Tensor,
        folder: Path,
        *,
        compile_layers: bool,
        start: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        device = str(embedding.device)
        self.shape, self.settings, self.batches, self.folder = shape, settings, batches, folder
        kind = batches.seen.features.dtype
        self.embedding, self.head = embedding.to(kind), head.to(kind)
        self.parameters = draft.new_parameters(shape, device, settings.seed)
        with torch.no_grad():
            for name, values in (start or {}).items():
                self.parameters[name].copy_(torch.from_numpy(values))
        self.optimizer = Optimizer(
            self.parameters, muon=settings.muon, decay=settings.decay, rate=settings.rate
        )
        self.table = draft.rope_table(shape, settings.length + shape.block, device)
        self.run_layer = compiled(draft.layer) if compile_layers else draft.layer
        self.steps = 0
        self.spent = 0.0
        self.curves: list[dict[str, Any]] = []
        self.resumed = self._load()

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def _load(self) -> bool:
        if not self.checkpoint.is_file():
            return False
        state = torch.load(self.checkpoint, map_location=self.embedding.device, weights_only=False)
        if state["shape"] != self.shape.as_dict():
            raise ValueError(f"{self.checkpoint} is of another draft: {state['shape']}")
        with torch.no_grad():
            for name, values in state["parameters"].items():
                self.parameters[name].copy_(values)
        self.optimizer.load(state["optimizer"])
        self.batches.load(state["batches"])
        self.batches.scale = state["scale"].to(self.batches.scale.device)
        self.steps, self.spent, self.curves = state["steps"], state["spent"], state["curves"]
        return True

    def save(self) -> None:
        unfinished = self.checkpoint.with_name(f"{CHECKPOINT}.part")
        state = {
            "shape": self.shape.as_dict(),
            "parameters": {n: p.detach() for n, p in self.parameters.items()},
            "optimizer": self.optimizer.state(),
            "batches": self.batches.state(),
            "scale": self.batches.scale,
            "steps": self.steps,
            "spent": self.spent,
            "curves": self.curves,
        }
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def factor(self, total: float) -> float:
        """Of the rate: linear over the first steps, then half a cosine over the time, to 1 %."""
        warm = min(1.0, (self.steps + 1) / max(1, self.settings.warm_up))
        share = min(1.0, self.spent / total)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))

    def loss(self) -> Tensor:
        """Of a new batch, in nats a guessed position."""
        features, first, blocks, labels, weights = self.batches.draw()
        kind = features.dtype
        with self._backends():
            hidden = draft.forward(
                self.parameters,
                self.shape,
                features,
                self.embedding[first],
                self.embedding[self.shape.mask_token],
                blocks,
                self.table,
                run_layer=self.run_layer,
            )
        rows = hidden[:, :, 1:].flatten(0, 2).to(kind)
        weights = weights / weights.sum()
        return head_loss(rows, self.head, labels, weights)

    def _backends(self) -> Any:
        if self.embedding.is_cuda:
            return sdpa_kernel(BACKENDS)
        return contextlib.nullcontext()

    def run(self, until: float, total: float, most_steps: int) -> Iterator[float]:
        """Train to the schedule's end, ``until`` (``time.monotonic``) or ``most_steps`` in all.

        Yields the mean loss about every five seconds; the caller may look, evaluate, save. Time
        outside this generator is not counted as training.
        """
        sums, count = torch.zeros((), device=self.embedding.device), 0
        begun = reported = time.monotonic()
        while self.steps < most_steps and self.spent < total and time.monotonic() < until:
            loss = self.loss()
            loss.backward()
            self.optimizer.step(self.factor(total))
            sums += loss.detach()
            count += 1
            self.steps += 1
            now = time.monotonic()
            self.spent += now - begun
            begun = now
            if now - reported >= 5 or self.steps % 20 == 0:
                # Waiting for the device now and then keeps the queue short and the clock honest.
                mean = float(sums) / count
                now = time.monotonic()
                self.spent += now - begun
                begun = now
                if now - reported >= 5:
                    yield mean
                    sums.zero_()
                    count = 0
                    begun = reported = time.monotonic()
        if count:
            yield float(sums) / count
