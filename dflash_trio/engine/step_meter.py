"""How long an engine's steps take, part by part, and how its answers' text is spaced.

Written by the worker's thread only. What it costs is a few readings of the clock for each step and
one look-up for each piece of text, on that thread: nothing here is the event loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..generation.events import Event, Retired, TextDelta
from ..generation.histogram import Histogram
from ..generation.status import EngineTimings

# From a small model's step on a GPU to a large prefill chunk on a slow CPU.
DECODE_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# From one greedy token to many samplers over a large vocabulary.
WORK_BOUNDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
# From a look into the prompt to a draft model's many steps on a CPU.
DRAFT_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
GAP_BOUNDS = (
    0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


class StepMeter:
    """One engine's timings. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._draft = Histogram(DRAFT_BOUNDS)
        self._decode = Histogram(DECODE_BOUNDS)
        self._sample = Histogram(WORK_BOUNDS)
        self._deliver = Histogram(WORK_BOUNDS)
        self._inter_token = Histogram(GAP_BOUNDS)
        self._decode_began = 0.0
        self._decode_ended: float | None = None
        self._delivery_began = 0.0
        # When text of each answer was last delivered, by generation and the answer's index.
        # Bounded by the slots: a generation leaves with its retirement.
        self._told: dict[int, dict[int, float]] = {}

    def drafted(self, seconds: float) -> None:
        """Guesses for a step have been made, which took so long."""
        self._draft.observe(seconds)

    def decode_begins(self) -> None:
        self._decode_began = self._clock()

    def decode_ended(self) -> None:
        self._decode_ended = now = self._clock()
        self._decode.observe(now - self._decode_began)

    def step_ended(self) -> None:
        """The outputs of the last decode have been taken. Nothing, if nothing was decoded."""
        if self._decode_ended is not None:
            self._sample.observe(self._clock() - self._decode_ended)
            self._decode_ended = None

    def delivery_begins(self) -> None:
        self._delivery_began = self._clock()

    def delivered(self, events: Iterable[tuple[int, Event]]) -> None:
        """These have been handed over. Several pieces of an answer in one delivery are one."""
        now = self._clock()
        self._deliver.observe(now - self._delivery_began)
        for generation_id, event in events:
            if isinstance(event, TextDelta):
                answers = self._told.get(generation_id)
                if answers is None:
                    answers = self._told[generation_id] = {}
                last = answers.get(event.index, now)
                if last < now:
                    self._inter_token.observe(now - last)
                answers[event.index] = now
            elif isinstance(event, Retired):
                self._told.pop(generation_id, None)

    def timings(self) -> EngineTimings:
        """A snapshot; from any thread."""
        return EngineTimings(
            draft=self._draft.snapshot(),
            decode=self._decode.snapshot(),
            sample=self._sample.snapshot(),
            deliver=self._deliver.snapshot(),
            inter_token=self._inter_token.snapshot(),
        )
