"""The loss through the target's frozen vocabulary head, without keeping a single logit.

Logits of a few thousand positions at a time are made, turned into their gradient in place and
multiplied back at once; only the gradient of the hidden states stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 8192


class HeadLoss(torch.autograd.Function):
    """Sum over rows of -sum_k weight[k] * log p(label[k]).

    ``hidden`` [M, width]; ``head`` [vocabulary, width]; ``labels``, ``weights`` [M, k].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        for begin in range(0, len(hidden), CHUNK):
            part = slice(begin, begin + CHUNK)
            rows, wanted, weight = hidden[part], labels[part], weights[part]
            chances = torch.softmax(rows @ head.t(), -1)
            total -= (weight * chances.gather(1, wanted).float().clamp_(min=1e-30).log()).sum()
            chances *= weight.sum(1, keepdim=True).to(chances.dtype)
            chances.scatter_add_(1, wanted, -weight.to(chances.dtype))
            gradient[part] = chances @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[0].to(gradient.dtype), None, None, None


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return HeadLoss.apply(hidden, head, labels, weights)  # type: ignore[no-any-return]
