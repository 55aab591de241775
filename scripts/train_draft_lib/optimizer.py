"""Muon for the matrices, AdamW for the norms, on stacks of layers at once.

Muon steps along the nearest orthogonal matrix to the momentum, found by a few Newton-Schulz
iterations. The step is scaled to a root mean square of 0.2 times the rate, which is about AdamW's,
so one rate and schedule serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .draft import MATRICES

ITERATION = (3.4445, -4.775, 2.0315)


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """About U V^T of each [.., m, n]: singular values between 0.7 and 1.2 are good enough."""
    a, b, c = ITERATION
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    def __init__(
        self, parameters: Mapping[str, Tensor], *, muon: bool, decay: float, rate: float
    ) -> None:
        self.parameters = parameters
        self.by_muon = [name for name in parameters if muon and name in MATRICES]
        self.momentum = {name: torch.zeros_like(parameters[name]) for name in self.by_muon}
        self.rate = rate
        self.decay = decay
        matrices = [p for n, p in parameters.items() if n in MATRICES and n not in self.by_muon]
        rest = [p for n, p in parameters.items() if n not in MATRICES]
        self.adam = torch.optim.AdamW(
            [
                {"params": some, "weight_decay": some_decay}
                for some, some_decay in ((matrices, decay), (rest, 0.0))
                if some
            ],
            lr=rate,
            betas=(0.9, 0.98),
            fused=next(iter(parameters.values())).is_cuda,
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at ``factor`` times the rate; gradients are dropped."""
        rate = self.rate * factor
        for name in self.by_muon:
            parameter, momentum = self.parameters[name], self.momentum[name]
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 0.05)
            direction = orthogonal(parameter.grad.lerp(momentum, 0.95))
            size = 0.2 * max(parameter.shape[-2:]) ** 0.5
            parameter.mul_(1 - rate * self.decay)
            parameter.add_(direction.to(parameter.dtype), alpha=-rate * size)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, values in state["momentum"].items():
            self.momentum[name].copy_(values)
        self.adam.load_state_dict(state["adam"])
