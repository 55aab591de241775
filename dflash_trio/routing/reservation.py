"""Reservation: a request's hold on one model's slots and KV cells, given back exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from attrs import define, field

from ..engine.admission import Hold
from ..engine.client import Generation
from ..generation.request import PreparedPrompt
from .policy import FallbackReason
from .served_model import ServedModel

Phase = Literal["reserved", "prefill", "decode", "draining"]


@define(eq=False)
class Reservation:
    """Capacity held from before the first response header until after the last byte.

    Made by the router, owned by one request scope. Releasing before the engine has retired the
    request's sequence would show capacity that is not there; the scope sees to that.
    """

    model: ServedModel
    prepared: PreparedPrompt
    hold: Hold = field(repr=False)
    _on_release: Callable[[Reservation], None] = field(repr=False)
    _wake_waiters: Callable[[], Awaitable[None]] = field(repr=False)
    waited: float = 0.0
    """Seconds it was a waiter before."""
    fallback: FallbackReason | None = None
    """Why it is not on the primary; ``None``: it is."""
    generation: Generation | None = field(default=None, init=False, repr=False)
    released: bool = field(default=False, init=False)

    @property
    def phase(self) -> Phase:
        """For the status pages."""
        if self.generation is None:
            return "reserved"
        if self.generation.retired.is_set():
            return "draining"
        return "decode" if self.generation.started_decoding else "prefill"

    def submit(self) -> Generation:
        """Hand the prompt to the engine, once. Raises EngineFailed when the engine is dead."""
        if self.generation is not None or self.released:
            raise RuntimeError("a reservation is submitted once, while it is held")
        self.generation = self.model.client.submit(self.prepared, self.hold)
        return self.generation

    async def release(self) -> None:
        """Give the capacity back and wake the waiters. Idempotent, safe while cancelled.

        The capacity is free before the first checkpoint; waking is shielded by the router.
        """
        if self._give_back():
            await self._wake_waiters()

    def release_when_retired(self) -> None:
        """Leave the release to a retirement that may still come, from an engine that has stalled.

        Until then the capacity stays taken. Waiters see the release with their next look.
        """
        assert self.generation is not None
        self.generation.on_retired = self._give_back

    def _give_back(self) -> bool:
        if self.released:
            return False
        self.released = True
        self.model.ledger.release(self.hold)
        self._on_release(self)
        return True
