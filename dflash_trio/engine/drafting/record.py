"""What is known of one sequence's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from .acceptance import Acceptance


@define(eq=False)
class DraftRecord:
    """Made for each answer when it begins, and gone with it: nothing of one request is known to
    the next."""

    tokens: Sequence[int]
    """All of the sequence, as it grows."""
    acceptance: Acceptance
    """How its guesses have fared lately."""
    proposed: int = field(default=0, init=False)
    """Tokens that were guessed for it and verified."""
    accepted: int = field(default=0, init=False)
    """Those of them that came."""
