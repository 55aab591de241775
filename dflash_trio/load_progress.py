"""How loading is shown: one moving line per model on a terminal, else a log line per tenth."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .console import write

log = logging.getLogger("dflash_trio.loading")

_WIDTH = 30
TOLD_EVERY = 10.0
"""Seconds after which growth within a tenth is told too: one may take longer than anybody waits."""


class LoadProgress:
    """One model's loading. ``fraction`` runs from 0.0 to 1.0; ``bar``: draw one on a terminal.

    ``detail`` says what is loaded, and where to. ``on_growth`` gets a line for each tenth, and
    every ``TOLD_EVERY`` seconds in which the fraction grew, however it is shown. ``clock``:
    seconds.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        *,
        bar: bool = True,
        detail: str = "",
        on_growth: Callable[[str], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = f"{name} ({detail})" if detail else name
        self._stream = stream or sys.stderr
        # There is no stream at all in a process that was started with it closed.
        self._terminal = bar and self._stream is not None and self._stream.isatty()
        self._on_growth = on_growth
        self._clock = clock
        self._shown = -1
        self._tenth = -1
        self._told = -1.0
        self._told_at = clock()

    def __call__(self, fraction: float) -> None:
        tenth = int(fraction * 10)
        if tenth > self._tenth:
            self._tenth = tenth
            line = self._tell(fraction, tenth * 10)
            if not self._terminal:
                log.info("%s", line)
        elif fraction > self._told and self._clock() - self._told_at >= TOLD_EVERY:
            self._tell(fraction, int(fraction * 100))
        step = int(fraction * _WIDTH)
        if self._terminal and step > self._shown:
            self._shown = step
            bar = "#" * step + "." * (_WIDTH - step)
            write(self._stream, f"\rloading {self._label} [{bar}] {fraction:4.0%}")

    def _tell(self, fraction: float, percent: int) -> str:
        self._told, self._told_at = fraction, self._clock()
        line = f"loading {self._label}: {percent} %"
        self._on_growth(line)
        return line

    def clear(self) -> None:
        """Take the bar away, so that other lines may follow."""
        if self._terminal:
            write(self._stream, "\r\033[K")
