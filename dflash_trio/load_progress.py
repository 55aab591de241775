"""How loading is shown: one moving line per model on a terminal, else a log line per tenth."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

log = logging.getLogger("dflash_trio.loading")

_WIDTH = 30


class LoadProgress:
    """One model's loading. ``fraction`` runs from 0.0 to 1.0; ``bar``: draw one on a terminal."""

    def __init__(self, name: str, stream: TextIO | None = None, *, bar: bool = True) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        # There is no stream at all in a process that was started with it closed.
        self._terminal = bar and self._stream is not None and self._stream.isatty()
        self._shown = -1

    def __call__(self, fraction: float) -> None:
        step = int(fraction * (_WIDTH if self._terminal else 10))
        if step <= self._shown:
            return
        self._shown = step
        if self._terminal:
            bar = "#" * step + "." * (_WIDTH - step)
            self._stream.write(f"\rloading {self._name} [{bar}] {fraction:4.0%}")
            self._stream.flush()
        else:
            log.info("loading %s: %d %%", self._name, step * 10)

    def clear(self) -> None:
        """Take the bar away, so that other lines may follow."""
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()
