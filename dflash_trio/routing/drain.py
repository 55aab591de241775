"""DrainController: the phases of a shutdown, one signal each.

    serving --1st--> draining --2nd or drain timeout--> finalizing --2 s--> cutting
                                                                      3rd: exit 130 at once

Draining: nothing new is taken, everybody who waits is told so, models that drain finish their
requests and the others end theirs properly. Finalizing: every generation ends properly now.
Cutting: what still could not be written is given up, and the engines are told to end. Whoever runs
the controller exits when the connections have ended; the phases only make sure that they do.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Literal, NoReturn, Protocol

import trio

from .router import Router

log = logging.getLogger("dflash_trio.drain")

CUT_GRACE = 2.0
"""Seconds from finalizing to cutting: for terminal events to be written."""

Phase = Literal["serving", "draining", "finalizing", "cutting"]

LAWFUL: Mapping[Phase, frozenset[Phase]] = {
    "serving": frozenset({"draining"}),
    "draining": frozenset({"finalizing"}),
    "finalizing": frozenset({"cutting"}),
    "cutting": frozenset(),
}
"""From each phase, the phases that may follow. A process that has nothing left exits from any."""


class Connections(Protocol):
    """What a shutdown asks of the listener floor."""

    def stop_accepting(self) -> None: ...
    def close_idle(self) -> None: ...
    def abort_connections(self) -> None: ...


class DrainController:
    """Turns signals into phases.

    ``drain_timeout``: seconds from the first signal to finalizing, or ``None`` for no limit.
    ``exit_now``: ends the process with code 130, for the third signal.
    """

    def __init__(
        self,
        router: Router,
        connections: Connections,
        *,
        drain_timeout: float | None,
        exit_now: Callable[[], NoReturn],
    ) -> None:
        self.phase: Phase = "serving"
        self.draining = trio.Event()
        """Set with the first signal."""
        self.hurried = trio.Event()
        """Set with the second: nothing is waited for that can be done without."""
        self._router = router
        self._connections = connections
        self._drain_timeout = drain_timeout
        self._exit_now = exit_now

    async def watch(self, signals: AsyncIterable[int], *, received: int = 0) -> None:
        """React to each signal until cancelled, which its owner does when nothing is left.

        ``received``: how many came before anybody watched; they count.
        """
        async with trio.open_nursery() as timers:
            for number in range(1, received + 1):
                await self._react(number, timers)
            async for _ in signals:
                received += 1
                await self._react(received, timers)

    async def _react(self, received: int, timers: trio.Nursery) -> None:
        if received == 1:
            await self.begin()
            if self._drain_timeout is not None:
                timers.start_soon(self._finalize_and_cut, self._drain_timeout)
        elif received == 2:
            self.hurried.set()
            timers.start_soon(self._finalize_and_cut, 0)
        else:
            self._exit_now()

    def _enter(self, phase: Phase) -> bool:
        """Go on to ``phase`` if that may follow; whether it does. Signals and timers may cross."""
        if phase not in LAWFUL[self.phase]:
            return False
        self.phase = phase
        return True

    async def begin(self) -> None:
        """Take nothing new; let what runs come to its end as each model's policy says."""
        if not self._enter("draining"):
            return
        log.info("shutting down: %d requests in flight", len(self._router.reservations))
        self._connections.stop_accepting()
        for model in self._router.models:
            if model.config.sigterm_policy == "finalize":
                model.client.finalize_all()
        await self._router.drain()
        self._connections.close_idle()
        self.draining.set()

    async def _finalize_and_cut(self, delay: float) -> None:
        await trio.sleep(delay)
        if self._enter("finalizing"):
            log.info("ending %d requests now", len(self._router.reservations))
            for model in self._router.models:
                model.client.finalize_all()
        await trio.sleep(CUT_GRACE)
        self._enter("cutting")
        self._connections.abort_connections()
        # Nobody is left to generate for. An engine that hangs in a step is abandoned after its
        # bound, and with that the requests that still wait for it to let go of them.
        for model in self._router.models:
            model.client.stop()
