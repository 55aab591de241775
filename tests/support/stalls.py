"""Engines that stall, found in hundredths of a second where they are meant to, and nowhere else.

Bounds that are short for every step find stalls on a busy machine that nobody meant.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import pytest

from dflash_trio.engine import client as client_module
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.step_clock import StepClock
from tests.support.scripted import Gate

_clocks: dict[int, StepClock] = {}
"""By the engine thread that told it of a step last."""


@pytest.fixture
def stalls_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that wait at a ``StallingGate`` count as stalled at once."""

    def remembered(name: str) -> None:
        begin = getattr(StepClock, name)

        def begin_and_remember(self: StepClock, *arguments: int) -> None:
            _clocks[threading.get_ident()] = self
            begin(self, *arguments)

        monkeypatch.setattr(StepClock, name, begin_and_remember)

    for name in ("begin", "begin_draft"):
        remembered(name)
    monkeypatch.setattr(client_module, "STALL_CHECK_INTERVAL", 0.01)


class StallingGate(Gate):
    """What waits here stalls. Closed until opened; other steps have all their time."""

    def __init__(self, *, open: bool = False, position: int = 0) -> None:
        """``position``: what a sequence computes before it may pass."""
        super().__init__(open=open)
        self._position = position

    def __call__(self, batch: Sequence[BatchSlice]) -> None:
        if batch and not any(item.position >= self._position for item in batch):
            return
        clock = _clocks[threading.get_ident()]
        if not self._open.is_set() and clock.under_way is not None:
            clock.under_way = attrs.evolve(clock.under_way, limit=0.02)
        super().__call__(batch)
