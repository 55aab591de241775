"""How loading is shown: one moving line per model on a terminal, else a log line per tenth."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from .console import write

log = logging.getLogger("dflash_trio.loading")

_WIDTH = 30


class LoadProgress:
    """One model's loading. ``fraction`` runs from 0.0 to 1.0; ``bar``: draw one on a terminal.

    ``detail`` says what is loaded, and where to. ``on_tenth`` gets a line for each tenth, however
    it is shown.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        *,
        bar: bool = True,
        detail: str = "",
        on_tenth: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._label = f"{name} ({detail})" if detail else name
        self._stream = stream or sys.stderr
        # There is no stream at all in a process that was started with it closed.
        self._terminal = bar and self._stream is not None and self._stream.isatty()
        self._on_tenth = on_tenth
        self._shown = -1
        self._tenth = -1

    def __call__(self, fraction: float) -> None:
        tenth = int(fraction * 10)
        if tenth > self._tenth:
            self._tenth = tenth
            line = f"loading {self._label}: {tenth * 10} %"
            self._on_tenth(line)
            if not self._terminal:
                log.info("%s", line)
        step = int(fraction * _WIDTH)
        if self._terminal and step > self._shown:
            self._shown = step
            bar = "#" * step + "." * (_WIDTH - step)
            write(self._stream, f"\rloading {self._label} [{bar}] {fraction:4.0%}")

    def clear(self) -> None:
        """Take the bar away, so that other lines may follow."""
        if self._terminal:
            write(self._stream, "\r\033[K")
