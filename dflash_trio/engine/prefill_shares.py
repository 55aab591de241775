"""Who has which part of a step, and how the prompts that wait to be computed share it."""

from __future__ import annotations

from attrs import frozen

from .model_runner import BatchSlice
from .sequence import Sequence


@frozen
class Planned:
    """One sequence's share of a batch."""

    sequence: Sequence
    slice: BatchSlice


def prefill_shares(prefilling: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """How many tokens of each prompt go into a step of ``budget`` prefill tokens, none empty.

    Even shares, so that a long prompt cannot starve a short one; what a short one leaves over goes
    to the longer ones. With more prompts than tokens the oldest get one each. Keeps the order.
    """
    shares: dict[tuple[int, int], int] = {}
    by_need = sorted(prefilling[:budget], key=lambda s: s.to_prefill - s.computed)
    for place, sequence in enumerate(by_need):
        share = min(sequence.to_prefill - sequence.computed, budget // (len(by_need) - place))
        shares[sequence.generation_id, sequence.index] = share
        budget -= share
    return [
        (s, shares[s.generation_id, s.index])
        for s in prefilling
        if (s.generation_id, s.index) in shares
    ]
