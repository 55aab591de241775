"""Loading is shown by a bar or by lines, and a terminal that goes away does not stop it."""

from __future__ import annotations

import io
import logging

import pytest

from dflash_trio.load_progress import LoadProgress


class Terminal(io.StringIO):
    """A terminal, which may hang up."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_terminal_gets_a_bar_that_says_what_is_loaded() -> None:
    terminal = Terminal()
    progress = LoadProgress("small", terminal, detail="94 MiB to cpu:0")
    for fraction in (0.0, 0.5, 0.5, 1.0):
        progress(fraction)
    progress.clear()
    drawn = terminal.getvalue().split("\r")
    assert drawn[1] == f"loading small (94 MiB to cpu:0) [{'.' * 30}]   0%"
    assert drawn[2] == f"loading small (94 MiB to cpu:0) [{'#' * 15}{'.' * 15}]  50%"
    assert drawn[4] == "\033[K"
    assert len(drawn) == 5


def test_without_a_terminal_each_tenth_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "dflash_trio"):
        progress = LoadProgress("small", io.StringIO())
        for fraction in (0.0, 0.01, 0.19, 0.2, 1.0):
            progress(fraction)
    assert caplog.messages == [f"loading small: {n} %" for n in (0, 10, 20, 100)]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_each_tenth_is_told_however_it_is_shown(stream: io.StringIO) -> None:
    told: list[str] = []
    progress = LoadProgress("small", stream, on_growth=told.append)
    for fraction in (0.0, 0.05, 0.34, 1.0):
        progress(fraction)
    assert told == [f"loading small: {n} %" for n in (0, 30, 100)]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_growth_within_a_tenth_is_told_every_ten_seconds_and_a_standstill_is_not(
    stream: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    now = 0.0
    progress = LoadProgress("small", stream, on_growth=told.append, clock=lambda: now)
    with caplog.at_level(logging.INFO, "dflash_trio"):
        for at, fraction in ((0, 0.0), (9, 0.01), (10, 0.02), (19, 0.03), (20, 0.03), (90, 0.03)):
            now = at
            progress(fraction)
    assert told == [f"loading small: {n} %" for n in (0, 2, 3)]
    assert len(caplog.messages) <= 1, "the log gets tenths only"


def test_a_terminal_that_hangs_up_stops_nothing() -> None:
    terminal = Terminal()
    told: list[str] = []
    progress = LoadProgress("small", terminal, on_growth=told.append)
    progress(0.0)
    terminal.gone = True
    progress(0.5)
    progress(1.0)
    progress.clear()
    assert len(told) == 3
