"""How fast a device computes prompts, and what copying a row out of it and back costs beside that.

On a CPU a row is a plain copy, and the tokens in it took a hundred times as long to compute. On a
GPU it is two transfers for each layer, in whose time a small model computes hundreds of tokens.
Which of the two holds is measured, as it differs by model, device and row.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from .model_runner import BatchSlice

PROMPT_TOKENS = 16
"""Of a step: with fewer it says nothing of how fast a prompt is."""
MANY_TOKENS = 128
"""The same where a step's own costs are many tokens': on a GPU one of 36 tokens took four times as
long for each as one of 500."""
_WEIGHT = 0.2
"""Of the newest measurement in the moving averages."""
_BACK_AND_FORTH = 2.0
"""Loading is not measured apart; it is about what saving is."""


@define
class Pace:
    """Moving averages of a runner's own times, in seconds. ``least``: prompts' tokens of a step
    that says how fast a prompt is."""

    _least: int = PROMPT_TOKENS
    _token: float = 0.0
    """A prompt's token in a step."""
    _save: float = 0.0

    @property
    def saving_costs(self) -> float:
        """Tokens that could be computed in the time of saving and loading a row; 0: not known."""
        return _BACK_AND_FORTH * self._save / self._token if self._token else 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step with ``tokens`` tokens of prompts is over."""
        if tokens >= self._least:
            self._token = _average(self._token, seconds / tokens)

    def saved(self, seconds: float) -> None:
        self._save = _average(self._save, seconds)


def prompt_tokens(batch: Sequence[BatchSlice]) -> int:
    """Tokens in a batch that belong to prompts. A decoding sequence's are those with an output of
    their own: its last token, and guesses."""
    return sum(n for item in batch if (n := len(item.tokens)) > item.outputs)


def _average(before: float, seconds: float) -> float:
    return before + _WEIGHT * (seconds - before) if before else seconds
