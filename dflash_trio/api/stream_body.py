"""A stream's body: a generation's events, encoded and sent as they come.

Text in the middle of an answer is encoded and written by the engine's thread, right where it comes
up. The task that owns the body sleeps meanwhile: waking the event loop and that task, and going
through the layers of the web framework and of HTTP, costs several times what the text does. The
task does all the rest: the beginning, the end, signs of life, whatever takes long to encode, and
waiting for a client that is slower than the answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import trio
from attrs import define, field

from ..engine.client import Generation
from ..generation.errors import GenerationError, InvalidRequest
from ..generation.events import Event, TextDelta
from ..generation.request import PreparedPrompt
from ..net import DirectOutput
from .answer import AnswerEvent, AnswerFailed, AnswerReader, ChoiceEnded, WholeAnswer
from .request_record import RequestRecord

log = logging.getLogger("dflash_trio.api")

MOST_AT_ONCE = 1024
"""Tokens of one write, alternatives of log probabilities included: some hundred kilobytes."""
LARGE_ANSWER = 2048
"""Tokens of an answer, alternatives of log probabilities included, from which it is rendered on a
thread. Below, rendering takes about a millisecond."""
MOST_DIRECTLY = 256
"""Tokens of one stream, alternatives of log probabilities included, that an engine's thread encodes
between two steps: some tenths of a millisecond, in which everybody waits for it."""
BODY_BYTES_PER_TOKEN = 8
"""Of a request, that count as one such token: dialects give parts of it back, or keep it."""


class AnswerEncoder(Protocol):
    """One answer in a dialect's words. Made for one request, used for a stream or a whole."""

    call_prefix: str
    """How ids of tool calls begin."""

    def opening(self) -> bytes:
        """What comes before any of the answer."""
        ...

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        """A wake-up's events as one write; may be empty."""
        ...

    def closing(self) -> bytes:
        """After every answer has ended: the last thing of a stream."""
        ...

    def failure(self, error: GenerationError) -> bytes:
        """An in-stream error: the last thing a client hears, with no faked normal end."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life while there is nothing to say."""
        ...

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        """The non-streaming answer's body. May run on a thread."""
        ...


@define(eq=False)
class StreamBody:
    """``output``: the way past the framework; ``None``: there is none. Times are seconds.

    Its parts belong to the owner, and to the engine's thread while the generation's ``direct`` is
    armed, which is while the owner waits. Made on the event loop.
    """

    _generation: Generation
    _reader: AnswerReader
    _encoder: AnswerEncoder
    _load: Load
    _record: RequestRecord
    _output: DirectOutput | None
    _keep_alive_interval: float
    _wait: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    """Around the owner's wait for something that is not written directly."""
    _last: float = field(init=False, default=-math.inf)
    """When the last text was written directly."""
    _rest_is_due: bool = field(init=False, default=False)
    _error: Exception | None = field(init=False, default=None)
    _clock: Callable[[], float] = field(
        init=False, factory=lambda: trio.lowlevel.current_clock().current_time
    )
    """trio's, for any thread."""
    _token: trio.lowlevel.TrioToken = field(init=False, factory=trio.lowlevel.current_trio_token)

    async def chunks(self, events: list[Event]) -> AsyncIterator[bytes]:
        """The body. ``events``: those that have come already."""
        # No nursery and no cancel scope may span a yield here: only the waits are timed.
        load, encoder = self._load, self._encoder
        chunk = await load.run(encoder.opening, load.of_body)
        while True:
            chunk += await load.run(partial(self._encode, events), load.of_events(events))
            if self._reader.done:
                self._record.all_said()
            if chunk:
                yield chunk
            if self._reader.done:
                return
            events, chunk = await self._next(), b""
            if not events:
                chunk = await load.run(encoder.keep_alive, load.of_all)

    async def _next(self) -> list[Event]:
        """What is to be sent next by the owner; nothing: a sign of life."""
        until = trio.current_time() + self._keep_alive_interval
        while True:
            events = waiting_events(self._generation)
            if events:
                await trio.lowlevel.checkpoint()
                return events
            # Nothing is in the channel, and no checkpoint comes until the wait for it.
            with trio.move_on_at(until) as self._wait:
                # The first text is everybody's to hear of: it goes by way of the event loop.
                if self._output is not None and self._generation.started_decoding:
                    self._generation.direct.arm(self._write)
                try:
                    events = await next_events(self._generation)
                finally:
                    self._generation.direct.disarm()
            if self._error is not None:
                raise self._error
            if self._rest_is_due and self._output is not None:
                self._rest_is_due = False
                await self._output.flush()
            elif not events and self._last + self._keep_alive_interval <= trio.current_time():
                return events
            if events:
                return events
            until = max(until, self._last + self._keep_alive_interval)

    def _write(self, events: Sequence[Event]) -> bool:
        """See TakeText. On the engine's thread."""
        output = self._output
        if output is None or self._error is not None:
            return False
        try:
            if not output.ready() or not self._load.adds_little(events):
                return False
            chunk = self._encode(events)
            if chunk:
                self._record.sent(len(chunk), last=False, in_vain=False)
                self._rest_is_due = not output.write(chunk)
        except Exception as error:
            # The owner's to raise, as if it had come there: an engine does not end by one answer.
            self._error = error
        self._last = self._clock()
        if self._rest_is_due or self._error is not None:
            with suppress(trio.RunFinishedError):  # nobody is left whom it would concern
                self._token.run_sync_soon(self._wake)
        return True

    def _wake(self) -> None:
        """There is something for the owner to do, unless it has seen that already."""
        if self._rest_is_due or self._error is not None:
            self._wait.cancel()

    def _encode(self, events: Sequence[Event]) -> bytes:
        """A wake-up's events as one write, with the end of the stream if they bring it."""
        try:
            read = self._reader.read(events)
        except AnswerFailed as failed:
            level = logging.INFO if isinstance(failed.error, InvalidRequest) else logging.ERROR
            log.log(level, "generation %d failed: %s", self._generation.id, failed)
            encoded = self._encoder.encode(failed.read) if failed.read else b""
            return encoded + self._encoder.failure(failed.error)
        if self._reader.suffices:
            self._generation.suffice()
        log_early_ends(self._generation, read)
        encoded = self._encoder.encode(read) if read else b""
        return encoded + self._encoder.closing() if self._reader.done else encoded


@define
class Load:
    """How much there is to encode of one answer, so that what takes long is done on a thread.

    Counted in tokens; each alternative of a log probability is one.
    """

    prepared: PreparedPrompt
    body_bytes: int
    _tokens: int = 0
    """Of the answer so far."""
    _channel: str = ""

    @property
    def of_body(self) -> int:
        return self.body_bytes // BODY_BYTES_PER_TOKEN

    @property
    def of_all(self) -> int:
        """Of what a dialect may have to repeat: the request, and the answer so far."""
        return self.of_tokens(self._tokens)

    @property
    def _any_text_may_end_a_part(self) -> bool:
        """Calls are found by reading the text, so that no channel tells where one begins. What was
        said before it is long where each of its tokens has alternatives; text alone is not."""
        return self.prepared.tool_format is not None and self.prepared.logprobs is not None

    @property
    def _per_token(self) -> int:
        return 1 + (self.prepared.logprobs or 0)

    def of_tokens(self, tokens: int) -> int:
        return self.of_body + tokens * self._per_token

    def of_events(self, events: Sequence[Event]) -> int:
        """Of one wake-up's. Where a part of the answer ends, a dialect may repeat all of it."""
        tokens, part_ends = 0, self._any_text_may_end_a_part
        for event in events:
            if isinstance(event, TextDelta):
                tokens += max(1, len(event.logprobs))
                part_ends = part_ends or event.channel != self._channel
                self._channel = event.channel
            else:
                part_ends = True
        self._tokens += tokens
        return self.of_all if part_ends else tokens * self._per_token

    def adds_little(self, events: Sequence[Event]) -> bool:
        """Whether these are more of the same part of the answer, and few, and can end it only where
        it is short. Counts them if so."""
        tokens = 0
        for event in events:
            if not isinstance(event, TextDelta) or event.channel != self._channel:
                return False
            tokens += max(1, len(event.logprobs))
        repeated = self._tokens if self._any_text_may_end_a_part else 0
        each = self._per_token
        if tokens * each > MOST_DIRECTLY or (repeated + tokens) * each >= LARGE_ANSWER:
            return False
        self._tokens += tokens
        return True

    async def run(self, encode: Callable[[], bytes], load: int) -> bytes:
        if load < LARGE_ANSWER:
            return encode()
        return await trio.to_thread.run_sync(encode)


async def next_events(generation: Generation) -> list[Event]:
    """Wait for something to happen, then take everything that has, as far as one write should
    hold."""
    first = await generation.events.receive()
    return [first, *waiting_events(generation)]


def waiting_events(generation: Generation) -> list[Event]:
    """What has happened, without waiting; as much of it as one write should hold."""
    events: list[Event] = []
    most = MOST_AT_ONCE // (1 + (generation.prepared.logprobs or 0))
    while len(events) < most:
        try:
            events.append(generation.events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            break
    return events


def log_early_ends(generation: Generation, events: Sequence[AnswerEvent]) -> None:
    for event in events:
        if isinstance(event, ChoiceEnded) and event.detail is not None:
            log.info(
                "generation %d ended early after %d tokens: %s",
                generation.id,
                event.usage.completion_tokens,
                event.detail,
            )
