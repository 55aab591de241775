"""RequestScope: one request's life, from before its reservation to after its last byte.

Opened around the whole handling of a request, by the connection and not by the response: the web
framework may drop a response body between its headers and its first byte without running any of
the body's own clean-up, so a body must never own a reservation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import trio

from ..engine.client import Generation
from ..generation.request import GenerationRequest
from .reservation import Reservation
from .router import Router

RETIRE_BOUND = 900.0
"""Seconds for an engine to retire a cancelled sequence. The engine's own watch over its steps ends
the wait long before, for all but the slowest devices; this is for when even that fails."""


class RequestObserver(Protocol):
    """Is told of a request's way, on the event loop, as it happens. Must not raise or wait."""

    def waits(self) -> None: ...
    def reserved(self, reservation: Reservation) -> None: ...
    def first_token(self) -> None: ...


class RequestScope:
    """Holds at most one reservation and sees to it that it is given back at the right time.

    Leaving the scope, however that comes about, cancels a generation that still runs, waits for
    the engine to have retired it and only then releases. If the engine stalls, or does not retire
    it within ``retire_bound`` seconds, the model is unhealthy instead of showing capacity that is
    not there, and the release is left to the retirement, should it ever come.
    """

    def __init__(
        self,
        router: Router,
        *,
        retire_bound: float = RETIRE_BOUND,
        observer: RequestObserver | None = None,
    ) -> None:
        self._router = router
        self._observer = observer
        self._retire_bound = retire_bound
        self._reservation: Reservation | None = None
        self._body_bytes = 0
        self._closed = False
        self._at_close: list[Callable[[], None]] = []

    @property
    def router(self) -> Router:
        return self._router

    @property
    def reservation(self) -> Reservation | None:
        return self._reservation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def hold_body(self, body_bytes: int) -> None:
        """Count the request's body as held until it is known what becomes of the request.

        See Router.hold_body.
        """
        self._router.hold_body(body_bytes)
        self._body_bytes += body_bytes

    async def reserve(self, request: GenerationRequest) -> Reservation:
        """Hold capacity for ``request``, once; see :meth:`Router.reserve` for the errors."""
        if self._closed or self._reservation is not None:
            raise RuntimeError("a scope reserves once, while it is open")
        try:
            waits = self._observer.waits if self._observer is not None else None
            return await self._router.reserve(request, self._adopt, waits)
        finally:
            self._drop_body()

    def _adopt(self, reservation: Reservation) -> None:
        self._reservation = reservation
        if self._observer is not None:
            self._observer.reserved(reservation)

    def at_close(self, callback: Callable[[], None]) -> None:
        """Call it when the request is over, however that comes about. It must not raise."""
        self._at_close.append(callback)

    def submit(self) -> Generation:
        """Start generating on the reservation. Raises EngineFailed when the engine is dead."""
        assert self._reservation is not None, "reserve first"
        generation = self._reservation.submit()
        if self._observer is not None:
            generation.on_first_token = self._observer.first_token
        return generation

    async def close(self) -> None:
        """Cancel what still runs, wait for its retirement, give back. Idempotent.

        Call it as soon as the response's last byte was handed to the kernel; leaving the scope
        calls it in any case.
        """
        if self._closed:
            return
        self._closed = True
        self._drop_body()
        while self._at_close:
            self._at_close.pop()()
        reservation = self._reservation
        if reservation is None:
            return
        generation = reservation.generation
        if generation is not None and not generation.retired.is_set():
            generation.cancel()
            # Shielded for retire_bound at most: capacity must not be shown free while the device
            # still works for this request. Ends at once when the engine is found to have stalled.
            with trio.move_on_after(self._retire_bound, shield=True):
                await generation.settled.wait()
            if not generation.retired.is_set():
                reservation.model.client.mark_unhealthy(
                    f"a cancelled sequence was not retired within {self._retire_bound:g} s",
                    may_recover=True,
                )
                reservation.release_when_retired()
                return
        await reservation.release()

    def _drop_body(self) -> None:
        self._router.drop_body(self._body_bytes)
        self._body_bytes = 0
