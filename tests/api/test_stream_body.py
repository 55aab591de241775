"""Text in the middle of a stream is written where it comes up; all else is its owner's to send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio
import trio.testing

from dflash_trio.api.answer import AnswerEvent, AnswerReader, CallBegun, ContentDelta
from dflash_trio.api.stream_body import LARGE_ANSWER, MOST_DIRECTLY, Load, StreamBody
from dflash_trio.engine.client import Generation
from dflash_trio.generation.events import (
    REASONING,
    Event,
    Finished,
    Retired,
    TextDelta,
    TokenAlternative,
    TokenLogprob,
    Usage,
)
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.support.http_client import PATIENCE


class Encoder:
    """Texts as they are, between signs of what else there is."""

    call_prefix = "call_"
    begins_call = -1
    """The thread that encoded the beginning of a call."""

    def opening(self) -> bytes:
        return b"<"

    def encode(self, events: list[AnswerEvent]) -> bytes:
        if any(isinstance(event, CallBegun) for event in events):
            self.begins_call = threading.get_ident()
        texts = [e.text if isinstance(e, ContentDelta) else "|" for e in events]
        if "bug" in texts:
            raise ZeroDivisionError
        return "".join(texts).encode()

    def closing(self) -> bytes:
        return b">"

    def keep_alive(self) -> bytes:
        return b"~"


class Record:
    def sent(self, body_bytes: int, *, last: bool, in_vain: bool) -> None:
        pass

    def all_said(self) -> None:
        pass


class Output:
    """What was written directly; ``accepts``: bytes that still fit."""

    def __init__(self, told: list[bytes]) -> None:
        self._told = told
        self.open = True
        self.accepts = 1000
        self.rest = b""
        self.flushes = trio.Event()
        self.may_flush = trio.Event()

    def ready(self) -> bool:
        return self.open and not self.rest

    def write(self, data: bytes) -> bool:
        assert self.ready()
        self._told.append(b"direct " + data[: self.accepts])
        self.rest = data[self.accepts :]
        return not self.rest

    async def flush(self) -> None:
        self.flushes.set()
        await self.may_flush.wait()
        self._told.append(b"rest " + self.rest)
        self.rest = b""


class Stage:
    """``fields``: of what was asked for."""

    def __init__(self, **fields: Any) -> None:
        self.prepared = PreparedPrompt((1,), 99, SamplingParams(), **fields)
        send, receive = trio.open_memory_channel[Event](100)
        self.generation = Generation(1, self.prepared, receive, send=send, cancel=lambda _: None)
        self.told: list[bytes] = []
        self.encoder = Encoder()
        self.output = Output(self.told)
        self.body = StreamBody(
            self.generation,
            AnswerReader(self.prepared, "call_"),
            self.encoder,  # type: ignore[arg-type]
            Load(self.prepared, 0),
            Record(),  # type: ignore[arg-type]
            self.output,
            15.0,
        )

    async def run(self) -> None:
        self.deliver(text("a"))
        async for chunk in self.body.chunks([await self.generation.events.receive()]):
            self.told.append(chunk)

    def deliver(self, *events: Event) -> None:
        """What the engine's client does with a delivery, on either side of it."""
        with ThreadPoolExecutor(1) as engine:
            self.engine = engine.submit(threading.get_ident).result()
            taken = engine.submit(self.generation.direct.offer, events).result()
        if not taken:
            self.generation.deliver_all(events)


def text(words: str, index: int = 0, channel: str = "content") -> TextDelta:
    return TextDelta(words, 1, channel, index=index)


def end(index: int = 0) -> Finished:
    return Finished("stop", Usage(1, 1), index=index)


settled = trio.testing.wait_all_tasks_blocked


async def told(*steps: Callable[[Stage], object], **fields: Any) -> list[bytes]:
    """What a stream says when these things happen, each once it has nothing else to do."""
    stage = Stage(**fields)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.run)
        for step in steps:
            await settled()
            step(stage)
        await settled()
        nursery.cancel_scope.cancel()
    return stage.told


async def test_text_is_written_without_its_owner_and_the_end_by_it() -> None:
    said = await told(
        lambda s: s.deliver(text("b")),
        lambda s: s.deliver(text("c"), text("d")),
        lambda s: s.deliver(text("e"), end(), Retired()),
    )
    assert said == [b"<a", b"direct b", b"direct cd", b"e|>"]


async def test_the_first_text_goes_by_way_of_the_event_loop_also_after_the_headers() -> None:
    stage = Stage()
    heard: list[bool] = []
    stage.generation.on_first_token = lambda: heard.append(True)

    async def run() -> None:
        async for chunk in stage.body.chunks([]):
            stage.told.append(chunk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for words in "ab":
            await settled()
            stage.deliver(text(words))
        await settled()
        nursery.cancel_scope.cancel()
    assert (stage.told, heard) == ([b"<", b"a", b"direct b"], [True])


async def test_what_comes_behind_something_that_waits_waits_too() -> None:
    def both(stage: Stage) -> None:
        stage.deliver(text("b"), end(1))
        stage.deliver(text("c"))  # before the owner has had a turn

    said = await told(both, lambda s: s.deliver(text("d")), n=2)
    assert said == [b"<a", b"b|c", b"direct d"]


async def test_another_part_of_the_answer_is_its_owners_to_begin() -> None:
    said = await told(lambda s: s.deliver(text("b", channel=REASONING)))
    assert said == [b"<a", b"|"]


async def test_what_a_call_ends_is_repeated_on_neither_the_engines_thread_nor_the_loops() -> None:
    token = TokenAlternative(1, b"a", -1.0)
    logprobs = (TokenLogprob(token, (token,) * 20),)
    stage = Stage(logprobs=20, tool_format="hermes")

    async def say(words: str) -> None:
        stage.deliver(TextDelta(words, 1, logprobs=logprobs))
        while stage.generation.events.statistics().tasks_waiting_receive == 0:
            await trio.lowlevel.checkpoint()  # a thread may be at it

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.run)
            await settled()
            await say("b")
            assert stage.told[-1] == b"direct b"  # short as yet
            for _ in range(LARGE_ANSWER // 21):
                await say("c")
            await say("<tool_call>")
            await say('{"name": "f", "arguments":')
            nursery.cancel_scope.cancel()
    assert stage.encoder.begins_call not in (-1, stage.engine, threading.get_ident())


async def test_the_engines_thread_encodes_no_more_than_little_between_two_steps() -> None:
    token = TokenAlternative(1, b"a", -1.0)
    entry = TokenLogprob(token, (token,) * 20)
    few = MOST_DIRECTLY // 21
    stage = Stage(logprobs=20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.run)
        for words, entries in (("b", few), ("c", few + 1), ("d", few)):
            await settled()
            stage.deliver(TextDelta(words, 1, logprobs=(entry,) * entries))
        await settled()
        nursery.cancel_scope.cancel()
    assert stage.told == [b"<a", b"direct b", b"c", b"direct d"]


async def test_where_it_cannot_be_written_at_once_its_owner_sends_it() -> None:
    def shut(stage: Stage) -> None:
        stage.output.open = False
        stage.deliver(text("b"))
        stage.deliver(text("c"))

    assert await told(shut) == [b"<a", b"bc"]


async def test_a_client_that_is_slower_holds_up_what_follows_in_one_piece() -> None:
    def fill(stage: Stage) -> None:
        stage.output.accepts = 1
        stage.deliver(text("bcd"))

    def more(stage: Stage) -> None:
        assert stage.output.flushes.is_set()
        stage.deliver(text("e"))
        stage.deliver(text("f"))

    said = await told(
        fill,
        more,
        lambda s: s.output.may_flush.set(),
        lambda s: s.deliver(text("g")),
    )
    assert said == [b"<a", b"direct b", b"rest cd", b"ef", b"direct g"]


async def test_an_encoder_that_fails_fails_its_stream() -> None:
    stage = Stage()
    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.run)
            await settled()
            stage.deliver(text("bug"))
            stage.deliver(text("b"))
    assert stage.told == [b"<a"]


async def test_signs_of_life_come_when_nothing_was_written_for_long(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.run)
        await trio.sleep(14)
        stage.deliver(text("b"))
        await trio.sleep(14)
        assert stage.told == [b"<a", b"direct b"]
        await trio.sleep(2)
        assert stage.told == [b"<a", b"direct b", b"~"]
        await trio.sleep(15)
        assert stage.told == [b"<a", b"direct b", b"~", b"~"]
        nursery.cancel_scope.cancel()
