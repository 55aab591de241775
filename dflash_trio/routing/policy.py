"""The routing decisions, as pure functions: no clock, no waiting, no side effects.

Machinery (who waits, who is woken) lives in ``router``; this file says only who may have what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from attrs import frozen

from ..engine.admission import Fit
from ..generation.request import PreparedPrompt
from .served_model import ServedModel

OVERTAKINGS_BEFORE_HOLD = 16
SECONDS_BEFORE_HOLD = 30.0
BYTES_PER_TOKEN_BOUND = 64
"""A body with more bytes than this for each token of the largest room is refused uncounted."""


@frozen(eq=False)
class Offer:
    """One model's reading of a request: what it would take there."""

    model: ServedModel
    prepared: PreparedPrompt
    fit: Fit

    @property
    def demand(self) -> tuple[int, int, int]:
        """Arguments for the model's ledger: prompt tokens, max tokens, n."""
        return (self.prepared.prompt_tokens, self.prepared.max_tokens, self.prepared.n)

    @property
    def has_capacity(self) -> bool:
        """Whether slot and cells are free now, whoever else may have a claim to them."""
        return self.model.healthy and self.model.ledger.could_reserve(*self.demand)


class Claimant(Protocol):
    """Somebody who waits."""

    @property
    def candidates(self) -> Sequence[Offer]:
        """What :func:`choose_candidates` says now."""
        ...

    @property
    def overtaken(self) -> int: ...

    @property
    def waiting_since(self) -> float: ...


def choose_candidates(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The offers a request may be served by, in priority order; empty when it fits nowhere.

    Models with less than the usual headroom for it count only when no model has all of it, and
    unhealthy ones not at all.
    """
    there = [offer for offer in offers if offer.model.healthy]
    full = tuple(offer for offer in there if offer.fit is Fit.FULL)
    return full or tuple(offer for offer in there if offer.fit is Fit.TIGHT)


FallbackReason = Literal["busy", "room", "unhealthy"]


def fallback_reason(
    taken: ServedModel, primary: ServedModel, offers: Sequence[Offer]
) -> FallbackReason | None:
    """Why a request is served by ``taken`` and not by the primary; ``None``: it is the primary.

    ``offers``: of all models that were asked. ``room``: it does not fit the primary, or not with
    the usual headroom; ``busy``: it does, but somebody has what it needs.
    """
    if taken is primary:
        return None
    offer = next((offer for offer in offers if offer.model is primary), None)
    if offer is None or not primary.healthy:
        # Its own refusal would have ended the request: it was not asked, or is gone since.
        return "unhealthy"
    return "busy" if offer in choose_candidates(offers) else "room"


def holds(oldest: Claimant, now: float) -> ServedModel | None:
    """The model that the oldest waiter holds, if it has waited or been overtaken long enough.

    ``now`` and ``waiting_since`` in seconds on one clock. What frees there accrues to it alone.
    """
    entitled = (
        oldest.overtaken >= OVERTAKINGS_BEFORE_HOLD
        or now - oldest.waiting_since >= SECONDS_BEFORE_HOLD
    )
    if not entitled:
        return None
    return next((offer.model for offer in oldest.candidates), None)


def may_take(
    offer: Offer, *, claimant: Claimant | None, waiters: Sequence[Claimant], now: float
) -> bool:
    """Whether this claimant (``None``: a newcomer) may take capacity of the offer's model now.

    ``waiters``: everybody who waits, oldest first. Not when somebody else holds the model, and
    not when an older waiter could use the same capacity now. Says nothing about whether there is
    capacity at all.
    """
    if waiters and waiters[0] is not claimant and holds(waiters[0], now) is offer.model:
        return False
    for older in waiters:
        if older is claimant:
            break
        if any(o.model is offer.model and o.has_capacity for o in older.candidates):
            return False
    return True


def overtaken_by(
    taken: ServedModel, *, claimant: Claimant | None, waiters: Sequence[Claimant]
) -> list[Claimant]:
    """The older waiters who fit the model that this claimant just took capacity of."""
    overtaken: list[Claimant] = []
    for older in waiters:
        if older is claimant:
            break
        if any(offer.model is taken for offer in older.candidates):
            overtaken.append(older)
    return overtaken


def largest_body(models: Sequence[ServedModel]) -> int:
    """Bytes beyond which a body cannot fit any model."""
    return BYTES_PER_TOKEN_BOUND * max(model.ledger.room for model in models)
