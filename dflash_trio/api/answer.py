"""An answer in no API's words: what came of a generation, piece by piece or whole.

Between the engine's events and a dialect's encoder: tells calls of tools from content, gives them
ids and numbers, and says in one word how each answer ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import attrs
from attrs import define, field, frozen

from ..generation.errors import EngineFailed, GenerationError, InvalidRequest
from ..generation.events import (
    REASONING,
    TOOL_PREFIX,
    Event,
    Failed,
    Finished,
    Retired,
    TextDelta,
    TokenLogprob,
    Usage,
)
from ..generation.request import PreparedPrompt
from ..text.tool_calls import pieces
from ..text.tool_calls.formats import FORMATS
from .content_logprobs import LogprobReader, ScoredText

EndReason = Literal["stop", "length", "tool_calls", "cancelled"]


@frozen
class ReasoningDelta:
    """More of the thinking. Never empty."""

    index: int
    text: str


@frozen
class ContentDelta:
    """More of the answer. Its text may be empty while there are log probabilities."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@frozen
class CallBegun:
    """A call of a tool. ``call`` counts those of one answer from 0."""

    index: int
    call: int
    id: str
    name: str


@frozen
class CallArguments:
    """More of the JSON text of a call's arguments. Never empty."""

    index: int
    call: int
    text: str


@frozen
class CallEnded:
    """``cut``: not by the model. A limit, a stop string or a cancellation ended the answer in it,
    though its arguments may be complete all the same."""

    index: int
    call: int
    cut: bool = False


@frozen
class ChoiceEnded:
    """One of the answers is over; nothing more comes of it."""

    index: int
    reason: EndReason
    usage: Usage
    stop_sequence: str | None = None
    detail: str | None = None
    """Why beyond the reason; see generation.events.Finished."""


AnswerEvent = ReasoningDelta | ContentDelta | CallBegun | CallArguments | CallEnded | ChoiceEnded


class AnswerFailed(Exception):
    """The engine could not go on. ``str()`` says why, ``error`` as what a client is told it;
    ``read`` is what came before."""

    def __init__(self, failed: Failed, read: list[AnswerEvent]) -> None:
        super().__init__(failed.message)
        self.read = read
        self.error = failure_of(failed)


def failure_of(failed: Failed) -> GenerationError:
    """What a generation's failure is to its client."""
    if failed.is_the_requests:
        return InvalidRequest(f"The request cannot be answered: {failed.message}.")
    return EngineFailed(failed.message)


@define
class _Choice:
    """One of the answers while it is read."""

    parser: pieces.ToolCallParser | None
    scorer: LogprobReader | None = None
    """Around the parser where there are log probabilities."""
    calls: int = 0
    open_channel: str | None = None
    """The channel of a call that is under way, for formats that keep calls apart."""
    in_call: bool = False
    has_enough: bool = False
    """It has made the one call that it may: what else the model says is not heard."""
    ended: bool = False


class AnswerReader:
    """Reads one generation's events. ``call_prefix``: how the ids of calls begin."""

    def __init__(self, prepared: PreparedPrompt, call_prefix: str) -> None:
        self._call_prefix = call_prefix
        self._failed = False
        self._parallel = prepared.parallel_calls
        tool_format = FORMATS[prepared.tool_format] if prepared.tool_format is not None else None
        self._choices = [_Choice(None) for _ in range(prepared.n)]
        if tool_format is not None:
            for choice in self._choices:
                choice.parser = tool_format.new_parser(prepared.tools)
                if prepared.logprobs is not None:
                    choice.scorer = LogprobReader(choice.parser)

    @property
    def done(self) -> bool:
        """Every answer has ended, or has failed."""
        return self._failed or all(choice.ended for choice in self._choices)

    @property
    def suffices(self) -> bool:
        """The answers are complete, though the engine goes on with some."""
        return not self.done and all(c.ended or c.has_enough for c in self._choices)

    def read(self, events: Iterable[Event]) -> list[AnswerEvent]:
        """What the events say. Raises AnswerFailed, with what was said before it."""
        read: list[AnswerEvent] = []
        for event in events:
            match event:
                case TextDelta():
                    self._delta(event, read)
                case Finished():
                    self._finish(event, read)
                case Failed():
                    self._failed = True
                    raise AnswerFailed(event, _joined(read))
                case Retired():
                    pass
        return _joined(read)

    def _delta(self, delta: TextDelta, read: list[AnswerEvent]) -> None:
        choice, index = self._choices[delta.index], delta.index
        if choice.has_enough or not (delta.text or delta.logprobs):
            # A token may show nothing yet, whatever channel it belongs to.
            return
        if choice.open_channel is not None and choice.open_channel != delta.channel:
            self._end_call(choice, index, read)
            if self._choices[delta.index].has_enough:
                return
        if delta.channel == REASONING:
            if delta.text:
                read.append(ReasoningDelta(index, delta.text))
        elif delta.channel.startswith(TOOL_PREFIX):
            if choice.open_channel is None:
                self._begin_call(choice, index, delta.channel.removeprefix(TOOL_PREFIX), read)
                choice.open_channel = delta.channel
            if delta.text:
                read.append(CallArguments(index, choice.calls - 1, delta.text))
        elif choice.parser is None:
            if delta.text or delta.logprobs:
                read.append(ContentDelta(index, delta.text, delta.logprobs))
        elif choice.scorer is not None:
            found = choice.scorer.push(delta.text, delta.logprobs)
            self._pieces(choice, index, found, read)
        else:
            self._pieces(choice, index, choice.parser.push(delta.text), read)

    def _pieces(
        self,
        choice: _Choice,
        index: int,
        found: Iterable[pieces.Piece],
        read: list[AnswerEvent],
        *,
        cut: bool = False,
    ) -> None:
        for piece in found:
            if choice.has_enough:
                return
            match piece:
                case ScoredText(text, logprobs):
                    read.append(ContentDelta(index, text, logprobs))
                case pieces.Text(text):
                    read.append(ContentDelta(index, text))
                case pieces.CallBegun(name):
                    self._begin_call(choice, index, name, read)
                case pieces.CallArguments(text):
                    read.append(CallArguments(index, choice.calls - 1, text))
                case pieces.CallEnded():
                    self._end_call(choice, index, read, cut=cut)

    def _begin_call(self, choice: _Choice, index: int, name: str, read: list[AnswerEvent]) -> None:
        read.append(CallBegun(index, choice.calls, new_id(self._call_prefix), name))
        choice.calls += 1
        choice.in_call = True

    def _end_call(
        self, choice: _Choice, index: int, read: list[AnswerEvent], *, cut: bool = False
    ) -> None:
        choice.open_channel = None
        if choice.in_call:
            choice.in_call = False
            choice.has_enough = not self._parallel
            read.append(CallEnded(index, choice.calls - 1, cut))

    def _finish(self, finished: Finished, read: list[AnswerEvent]) -> None:
        choice, index = self._choices[finished.index], finished.index
        if choice.has_enough:
            # It was over with the call. How the engine came to an end behind it is nobody's affair.
            choice.ended = True
            read.append(ChoiceEnded(index, "tool_calls", finished.usage))
            return
        cut = finished.reason != "stop" or finished.stop_sequence is not None
        if choice.parser is not None:
            reader = choice.scorer or choice.parser
            self._pieces(choice, index, reader.finish(), read, cut=cut)
        self._end_call(choice, index, read, cut=cut)
        choice.ended = True
        reason: EndReason = finished.reason
        if reason == "stop" and choice.calls and finished.stop_sequence is None:
            reason = "tool_calls"
        read.append(
            ChoiceEnded(index, reason, finished.usage, finished.stop_sequence, finished.detail)
        )


def _joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbours of one kind as one event: a wake-up's deltas cost one chunk, not many."""
    if len(events) < 2:
        return list(events)
    joined: list[AnswerEvent] = []
    for kind, group in groupby(events, _kind):
        run = list(group)
        first = run[0]
        if len(run) == 1 or kind is None:
            joined += run
            continue
        text = "".join(event.text for event in run if isinstance(event, _Delta))
        if isinstance(first, ContentDelta):
            contents = [event for event in run if isinstance(event, ContentDelta)]
            logprobs = tuple(entry for event in contents for entry in event.logprobs)
            joined.append(ContentDelta(first.index, text, logprobs))
        elif isinstance(first, _Delta):
            joined.append(attrs.evolve(first, text=text))
    return joined


_Delta = ReasoningDelta | ContentDelta | CallArguments


def _kind(event: AnswerEvent) -> tuple[object, ...] | None:
    """What events have in common that are one when they are neighbours; ``None``: nothing."""
    match event:
        case ReasoningDelta() | ContentDelta():
            return type(event), event.index
        case CallArguments():
            return CallArguments, event.index, event.call
        case _:
            return None


# ------------------------------------------------------------------------- the whole of it


@define
class Call:
    """One call of a tool."""

    id: str
    name: str
    arguments: str = ""
    """JSON text, as far as the model wrote it."""


@define
class Choice:
    """One of the answers, complete once it has ended."""

    reasoning: str = ""
    content: str = ""
    logprobs: list[TokenLogprob] = field(factory=list)
    calls: list[Call] = field(factory=list)
    ended: ChoiceEnded | None = None
    events: list[AnswerEvent] = field(factory=list)
    """All of the above in the order it came, neighbours of one kind as one, the end included."""

    @property
    def ending(self) -> ChoiceEnded:
        """How it ended. Only when it has."""
        assert self.ended is not None
        return self.ended


class WholeAnswer:
    """All of a generation's answers, put together from their events."""

    def __init__(self, n: int) -> None:
        self.choices = [Choice() for _ in range(n)]
        """Complete once they have ended."""

    @property
    def usage(self) -> Usage:
        """Of all answers together; the prompt counts once."""
        return total_usage([choice.ending for choice in self.choices])

    def add(self, events: Sequence[AnswerEvent]) -> None:
        for event in events:
            choice = self.choices[event.index]
            choice.events.append(event)
            if isinstance(event, ChoiceEnded):
                choice.ended = event
                _complete(choice)


def _complete(choice: Choice) -> None:
    """Fill in a choice from its events."""
    choice.events = _joined(choice.events)
    for event in choice.events:
        match event:
            case ReasoningDelta(_, text):
                choice.reasoning += text
            case ContentDelta(_, text, logprobs):
                choice.content += text
                choice.logprobs += logprobs
            case CallBegun(_, _, id_, name):
                choice.calls.append(Call(id_, name))
            case CallArguments(_, number, text):
                choice.calls[number].arguments += text


def total_usage(endings: Sequence[ChoiceEnded]) -> Usage:
    """The token counts of several answers to one prompt, which counts once."""
    first = endings[0].usage
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(e.usage.completion_tokens for e in endings),
        cached_tokens=first.cached_tokens,
        reasoning_tokens=sum(e.usage.reasoning_tokens for e in endings),
        thinking_closed_by=first.thinking_closed_by,
        accepted_drafts=_sum([e.usage.accepted_drafts for e in endings]),
        rejected_drafts=_sum([e.usage.rejected_drafts for e in endings]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"
