"""What is known of one sequence's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from .acceptance import Acceptance
from .match_chances import MatchChances


@define(eq=False)
class DraftRecord:
    """Made for each answer when it begins, and gone with it: nothing of one request is known to
    the next."""

    tokens: Sequence[int]
    """All of the sequence, as it grows."""
    acceptance: Acceptance | MatchChances
    """How its guesses have fared lately."""
    guess: Sequence[int] = field(default=(), init=False)
    """All that was guessed for it in the step under way, whether it is verified or not."""
    matched: int = field(default=0, init=False)
    """Tokens of a match that it followed, if the draft tells."""
    proposed: int = field(default=0, init=False)
    """Tokens that were guessed for it and verified."""
    accepted: int = field(default=0, init=False)
    """Those of them that came."""


def counts_of(record: DraftRecord | None, *, drafting: bool) -> tuple[int | None, int | None]:
    """Guesses that came and that did not; ``None`` where nobody guesses."""
    if record is None:
        return (0, 0) if drafting else (None, None)
    return record.accepted, record.proposed - record.accepted
