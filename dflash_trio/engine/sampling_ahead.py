"""Letting many sequences choose their next tokens at the same time, where a runner can."""

from __future__ import annotations

from collections.abc import Iterable

from .model_runner import ModelRunner, TokenSampler
from .prefill_shares import Planned


def sample_ahead(planned: Iterable[Planned], runner: ModelRunner) -> None:
    """Have those of a decoded batch whose next token depends on their logits alone choose it now.

    Each is asked for it next: nothing may come in between but endings, which close samplers.
    """
    if not runner.samples_ahead:
        return
    wanted: list[tuple[TokenSampler, int]] = []
    output = 0
    for item in planned:
        sampler = item.sequence.sampler
        if item.slice.outputs and sampler is not None and item.sequence.samples_freely:
            wanted.append((sampler, output))
        output += item.slice.outputs
    if len(wanted) > 1:
        runner.sample_ahead(wanted)
