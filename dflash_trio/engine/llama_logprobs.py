"""Log probabilities of a token and of the likeliest others, from a row of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np

from ..generation.events import TokenAlternative, TokenLogprob


def token_logprob(
    logits: Any, token: int, top: int, shown_piece: Callable[[int], bytes]
) -> TokenLogprob:
    """Natural logarithms, of the distribution at temperature 1: of ``token``, and of the ``top``
    likeliest. ``logits``: float32[vocabulary]."""
    # In double precision: the sum over a quarter of a million tokens loses digits otherwise.
    logits = logits.astype(np.float64)
    largest = logits.max()
    normaliser = largest + np.log(np.exp(logits - largest).sum())

    def alternative(candidate: int) -> TokenAlternative:
        logprob = float(logits[candidate] - normaliser)
        return TokenAlternative(candidate, shown_piece(candidate), logprob)

    likeliest: list[int] = []
    if top:
        some = np.argpartition(logits, -top)[-top:]
        # Sorted by the logit, then by the id: the same every time.
        likeliest = [int(t) for t in some[np.lexsort((some, -logits[some]))]]
    return TokenLogprob(alternative(token), tuple(map(alternative, likeliest)))
