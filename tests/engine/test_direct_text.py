"""Text that goes past the event loop keeps its order, and stops when its reader says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from dflash_trio.engine.client import EngineClient
from dflash_trio.engine.direct_text import DirectText
from dflash_trio.generation.events import Event, Finished, Retired, TextDelta, Usage
from tests.engine.engine_helpers import Turnstile, prompt, reserve
from tests.support.scripted import answer, scripted_load

WAIT = 20.0
"""Seconds after which a test gives up."""

A, B = TextDelta("a", 1), TextDelta("b", 2)
END = Finished("stop", Usage(1, 1))


class Reader:
    def __init__(self, *, wants: bool = True) -> None:
        self.wants = wants
        self.got: list[Event] = []

    def take(self, events: Sequence[Event]) -> bool:
        if self.wants:
            self.got += events
        return self.wants


def test_only_an_armed_reader_gets_text() -> None:
    direct, reader = DirectText(), Reader()
    assert not direct.offer([A])
    direct.arrived(1)
    direct.arm(reader.take)
    assert direct.offer([A])
    direct.disarm()
    assert not direct.offer([B])
    assert reader.got == [A]


def test_text_stays_behind_what_is_still_on_its_way_to_the_event_loop() -> None:
    direct, reader = DirectText(), Reader()
    assert not direct.offer([A, B])
    direct.arm(reader.take)
    assert not direct.offer([B])
    direct.arrived(2)
    assert not direct.offer([B])
    direct.arrived(2)
    assert direct.offer([B])
    assert reader.got == [B]


@pytest.mark.parametrize("events", [[END], [A, END], [Retired()], [A, Retired()]])
def test_endings_go_by_way_of_the_event_loop(events: list[Event]) -> None:
    direct, reader = DirectText(), Reader()
    direct.arm(reader.take)
    assert not direct.offer(events)
    assert not reader.got


def test_what_a_reader_does_not_want_goes_by_way_of_the_event_loop_and_holds_up_the_rest() -> None:
    direct, reader = DirectText(), Reader(wants=False)
    direct.arm(reader.take)
    assert not direct.offer([A])
    reader.wants = True
    assert not direct.offer([B])
    direct.arrived(2)
    assert direct.offer([B])


def test_a_reader_that_has_disarmed_is_not_in_the_middle_of_a_delivery() -> None:
    direct = DirectText()
    inside, may_go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def take(events: Sequence[Event]) -> bool:
        inside.set()
        assert may_go_on.wait(WAIT)
        done.append("taken")
        return True

    def disarm() -> None:
        direct.disarm()
        done.append("disarmed")

    direct.arm(take)
    with ThreadPoolExecutor(2) as threads:
        offered = threads.submit(direct.offer, [A])
        assert inside.wait(WAIT)
        disarmed = threads.submit(disarm)
        with pytest.raises(TimeoutError):  # it waits
            disarmed.result(0.05)
        may_go_on.set()
        assert offered.result(WAIT)
        disarmed.result(WAIT)
    assert done == ["taken", "disarmed"]


async def test_an_armed_reader_gets_text_on_the_engines_thread_and_nobody_else_does() -> None:
    turnstile = Turnstile()
    load = scripted_load(script=answer("abcd"), before_decode=turnstile)
    taken: list[tuple[bool, str]] = []
    read: list[Event] = []
    loop = threading.get_ident()

    def take(events: Sequence[Event]) -> bool:
        here = threading.get_ident() == loop
        taken.extend((here, event.text) for event in events if isinstance(event, TextDelta))
        return True

    def step() -> None:
        """Let one step through, and wait until what it brought has been told."""
        turnstile.let_through()
        turnstile.next()

    async def stepped() -> None:
        await trio.to_thread.run_sync(step, abandon_on_cancel=True)

    client = EngineClient("m", load)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(WAIT):
            ready = await nursery.start(client.run)
            prepared = prompt("p>", 40)
            generation = client.submit(prepared, reserve(ready.ledger, prepared))
            await trio.to_thread.run_sync(turnstile.next)
            await stepped()
            read.append(await generation.events.receive())
            generation.direct.arm(take)
            await stepped()
            await stepped()
            generation.direct.disarm()
            await stepped()
            turnstile.open()
            while not isinstance(read[-1], Finished):
                read.append(await generation.events.receive())
        client.stop()
    assert taken == [(False, "b"), (False, "c")]
    assert [event.text for event in read if isinstance(event, TextDelta)] == ["a", "d"]
