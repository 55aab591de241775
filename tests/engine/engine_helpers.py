"""What the tests of the engine share: prompts, holds, and what a generation said."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence

from attrs import define, field

from dflash_trio.engine import sequence as engine_sequence
from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.generation.events import Event, Failed, Finished, Retired, TextDelta
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.support.http_client import PATIENCE

GREEDY = SamplingParams(temperature=0.0)


def prompt(
    text: str | Sequence[int],
    max_tokens: int = 8,
    *,
    sampling: SamplingParams = GREEDY,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> PreparedPrompt:
    """``text`` is the prompt in bytes, a token each, or its tokens."""
    tokens = tuple(text.encode()) if isinstance(text, str) else tuple(text)
    return PreparedPrompt(tokens, max_tokens, sampling, stop=stop, ignore_eos=ignore_eos)


def reserve(ledger: KVLedger, prepared: PreparedPrompt) -> Hold:
    hold = ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens)
    assert hold is not None, "the test asks for more than the ledger has"
    return hold


def admit(
    waiting: list[tuple[int, PreparedPrompt]],
    ledger: KVLedger,
    scheduler: Scheduler,
    holds: dict[int, Hold],
) -> None:
    """Let the first of those who wait in, as far as there is room, as the router does."""
    while waiting:
        number, request = waiting[0]
        hold = ledger.try_reserve(request.prompt_tokens, request.max_tokens, request.n)
        if hold is None:
            return
        waiting.pop(0)
        holds[number] = hold
        scheduler.add(engine_sequence.Sequence(number, request, hold))


@define
class Story:
    """All that one generation told, checked for its order as it comes."""

    events: list[Event] = field(factory=list)

    def add(self, event: Event) -> None:
        assert not self.retired, f"{event} after Retired"
        if isinstance(event, Retired):
            assert self.ended, "Retired without an ending"
        else:
            assert not self.ended, f"{event} after {self.events[-1]}"
        self.events.append(event)

    @property
    def ended(self) -> bool:
        return any(isinstance(event, Finished | Failed) for event in self.events)

    @property
    def retired(self) -> bool:
        return any(isinstance(event, Retired) for event in self.events)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def ending(self) -> Finished | Failed:
        assert self.retired, f"not retired yet: {self.events}"
        ending = self.events[-2]
        assert isinstance(ending, Finished | Failed)
        return ending

    @property
    def finished(self) -> Finished:
        assert isinstance(self.ending, Finished), self.ending
        return self.ending

    @property
    def failed(self) -> Failed:
        assert isinstance(self.ending, Failed), self.ending
        return self.ending


def stories(deliveries: Iterable[tuple[int, Event]]) -> dict[int, Story]:
    told: dict[int, Story] = {}
    for generation_id, event in deliveries:
        told.setdefault(generation_id, Story()).add(event)
    return told


class Turnstile:
    """Lets an engine's steps through one at a time, each when the test says so."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[list[BatchSlice]] = queue.SimpleQueue()
        self._passes = threading.Semaphore(0)

    def __call__(self, batch: Sequence[BatchSlice]) -> None:
        self._arrived.put(list(batch))
        # A bound, so that a failing test cannot hang the suite.
        assert self._passes.acquire(timeout=PATIENCE)

    def next(self) -> list[BatchSlice]:
        """Wait until a step stands at the turnstile; its batch."""
        return self._arrived.get(timeout=PATIENCE)

    def let_through(self) -> None:
        """The step that stands there."""
        self._passes.release()

    def open(self) -> None:
        """Every step from now on."""
        self._passes.release(100_000)
