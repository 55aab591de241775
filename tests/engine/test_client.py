"""The event loop's side of an engine, with real threads in real time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

import dflash_trio.engine.client as client_module
from dflash_trio.engine.client import EngineClient, Generation
from dflash_trio.engine.loop_mailbox import LoopMailbox, MailboxClosed
from dflash_trio.engine.model_runner import EngineError, LoadingStopped, ModelLoadError
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.worker import Died, Ended, Load, LoadedModel, Outgoing, Ready
from dflash_trio.generation.errors import EngineFailed
from dflash_trio.generation.events import Failed, Retired, TextDelta
from dflash_trio.generation.request import PreparedPrompt
from tests.engine.engine_helpers import Story, Turnstile, prompt, reserve
from tests.support.http_client import PATIENCE
from tests.support.scripted import Gate, answer, scripted_load

WAIT = PATIENCE
"""Seconds after which a test gives up."""


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("engine ")]


async def until(condition: Callable[[], bool]) -> None:
    """Poll for what no event tells: the state of a thread that is on its own."""
    with trio.fail_after(WAIT):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


@asynccontextmanager
async def serving(load: Load, name: str = "scripted") -> AsyncIterator[EngineClient]:
    client = EngineClient(name, load)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(WAIT):
            await nursery.start(client.run)
        try:
            yield client
        finally:
            client.stop()
    assert not client.abandoned
    await until(lambda: not engine_threads())


def submit(client: EngineClient, prepared: PreparedPrompt) -> Generation:
    assert client.ready is not None
    return client.submit(prepared, reserve(client.ready.ledger, prepared))


async def story_of(generation: Generation) -> Story:
    """Everything it tells, to the end."""
    story = Story()
    with trio.fail_after(WAIT):
        while not story.retired:
            story.add(await generation.events.receive())
    with pytest.raises(trio.WouldBlock):
        generation.events.receive_nowait()
    return story


# ------------------------------------------------------------------------------- generating


async def test_a_generation_tells_its_text_its_end_and_its_retirement() -> None:
    async with serving(scripted_load(script=answer("hello"))) as client:
        generation = submit(client, prompt("q>", 50))
        story = await story_of(generation)
    assert story.text == "hello"
    assert story.finished.reason == "stop"
    assert generation.retired.is_set()
    assert generation.ended
    assert generation.started_decoding


async def test_many_generations_at_once_each_hear_only_their_own() -> None:
    texts = {name: name * 3 for name in "abcd"}

    def script(history: bytes, length: int) -> int | None:
        return answer(texts[history[:1].decode()])(history, length)

    async with serving(scripted_load(slots=4, script=script)) as client:
        generations = {name: submit(client, prompt(f"{name}>", 50)) for name in texts}
        for name, generation in generations.items():
            assert (await story_of(generation)).text == texts[name]


async def test_a_step_is_one_delivery_to_the_loop() -> None:
    deliveries: list[object] = []
    turnstile = Turnstile()
    async with serving(scripted_load(slots=3, before_decode=turnstile)) as client:
        handle = client._handle

        def record(message: object) -> None:
            deliveries.append(message)
            handle(message)  # type: ignore[arg-type]

        client._handle = record  # type: ignore[method-assign]
        first = submit(client, prompt("a", 4))
        await trio.to_thread.run_sync(turnstile.next)
        others = [submit(client, prompt("a", 3)) for _ in range(2)]
        turnstile.open()
        for generation in (first, *others):
            await story_of(generation)
        assert client.statistics.steps == 4
    assert sum(isinstance(message, list) for message in deliveries) == 4


async def test_started_decoding_turns_true_with_the_first_token() -> None:
    turnstile = Turnstile()
    async with serving(scripted_load(before_decode=turnstile)) as client:
        generation = submit(client, prompt("abc", 2))
        await trio.to_thread.run_sync(turnstile.next)
        assert not generation.started_decoding
        turnstile.open()
        assert isinstance(await generation.events.receive(), TextDelta)
        assert generation.started_decoding
        await story_of(generation)


async def test_a_request_that_no_longer_listens_holds_nobody_up() -> None:
    async with serving(scripted_load(slots=2)) as client:
        deaf, other = submit(client, prompt("abc", 30)), submit(client, prompt("abc", 30))
        deaf.events.close()
        assert (await story_of(other)).finished.usage.completion_tokens == 30
        with trio.fail_after(WAIT):
            await deaf.retired.wait()


async def test_a_request_that_reads_nothing_does_not_stop_the_engine() -> None:
    async with serving(scripted_load(slots=2)) as client:
        slow, other = submit(client, prompt("abc", 300)), submit(client, prompt("abc", 300))
        await story_of(other)
        with trio.fail_after(WAIT):
            await slow.retired.wait()
        assert len((await story_of(slow)).text) == 300


async def test_statistics_never_wait_for_a_step() -> None:
    gate = Gate(open=False)
    client = EngineClient("scripted", scripted_load(before_decode=gate))
    assert client.statistics.steps == 0
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        generation = submit(client, prompt("abc", 2))
        await until(gate.reached.is_set)
        assert client.statistics.steps == 0
        gate.open()
        await story_of(generation)
        assert client.statistics.steps == 2
        client.stop()


# ----------------------------------------------------------------------------- cancellation


async def test_a_cancelled_generation_is_retired_and_its_neighbour_goes_on() -> None:
    turnstile = Turnstile()
    async with serving(scripted_load(slots=2, before_decode=turnstile)) as client:
        leaving, staying = submit(client, prompt("abc", 90)), submit(client, prompt("abc", 9))
        await trio.to_thread.run_sync(turnstile.next)
        leaving.cancel()
        leaving.cancel()
        assert not leaving.retired.is_set(), "the step still runs"
        turnstile.open()
        assert (await story_of(leaving)).finished.reason == "cancelled"
        assert (await story_of(staying)).finished.usage.completion_tokens == 9


async def test_cancelling_what_has_ended_asks_nothing_of_the_engine() -> None:
    async with serving(scripted_load()) as client:
        generation = submit(client, prompt("abc", 2))
        await story_of(generation)
        asked: list[int] = []
        generation._cancel = asked.append
        generation.cancel()
        assert not asked


async def test_a_cancellation_does_not_wait_for_the_step_under_way() -> None:
    gate = Gate(open=False)
    async with serving(scripted_load(before_decode=gate)) as client:
        generation = submit(client, prompt("abc", 2))
        await until(gate.reached.is_set)
        generation.cancel()  # would hang here
        gate.open()
        assert (await story_of(generation)).text == ""


# ------------------------------------------------------------------------ shutdown and failure


async def test_finalizing_ends_every_generation_properly() -> None:
    gate = Gate(open=False)
    async with serving(scripted_load(slots=2, before_decode=gate)) as client:
        running = submit(client, prompt("abc", 900))
        await until(gate.reached.is_set)
        client.finalize_all()
        late = submit(client, prompt("abc", 900))
        gate.open()
        for generation in (running, late):
            assert (await story_of(generation)).finished.detail == "server_shutdown"
        assert client.healthy


async def test_finalizing_what_was_never_run_does_nothing() -> None:
    EngineClient("scripted", scripted_load()).finalize_all()


async def test_stopping_fails_and_retires_what_still_generates() -> None:
    gate = Gate(open=False)
    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=2, before_decode=gate, on_runner=runners.append)
    async with serving(load) as client:
        generation = submit(client, prompt("abc", 900))
        await until(gate.reached.is_set)
        client.stop()
        gate.open()
        assert isinstance((await story_of(generation)).ending, Failed)
    assert runners[0].closed
    assert client.unhealthy_reason is None, "being stopped is no illness"


async def test_after_a_stop_nothing_can_be_submitted() -> None:
    async with serving(scripted_load()) as client:
        assert client.ready is not None
        prepared = prompt("abc")
        hold = reserve(client.ready.ledger, prepared)
        client.stop()
        with pytest.raises(EngineFailed, match="stopping"):
            client.submit(prepared, hold)
    with pytest.raises(EngineFailed, match="stopping"):
        client.submit(prepared, hold)


async def test_before_it_is_loaded_nothing_can_be_submitted() -> None:
    client = EngineClient("scripted", scripted_load())
    ready = scripted_load()(lambda _: None, threading.Event())
    prepared = prompt("abc")
    with pytest.raises(EngineFailed, match="not loaded"):
        client.submit(prepared, reserve(ready.ledger, prepared))
    assert not client.healthy


async def test_an_engine_that_fails_fails_its_own_and_takes_no_more_until_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = iter(range(100))

    def fail(_: object) -> None:
        if next(steps) == 3:
            raise EngineError("the device fell off")

    runners: list[ScriptedRunner] = []
    load = scripted_load(slots=3, before_decode=fail, on_runner=runners.append)
    with caplog.at_level(logging.ERROR):
        async with serving(load) as client:
            generations = [submit(client, prompt("abc", 90)) for _ in range(2)]
            for generation in generations:
                story = await story_of(generation)
                assert "the device fell off" in story.failed.message
                # From the very moment that capacity may be given back.
                assert not client.healthy
            assert client.unhealthy_reason == "the engine died: the device fell off"
            with pytest.raises(EngineFailed, match="the device fell off"):
                submit(client, prompt("abc"))
            with trio.fail_after(WAIT):
                await client._ended.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert not client._stop_requested.is_set()
            assert runners[0].closed
    assert "scripted is unhealthy" in caplog.text


async def test_a_submission_that_crosses_with_the_death_of_the_engine_is_failed_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate(open=False)

    def fail(batch: object) -> None:
        gate(())
        raise EngineError("lost")

    with caplog.at_level(logging.CRITICAL):
        async with serving(scripted_load(slots=2, before_decode=fail)) as client:
            first = submit(client, prompt("abc"))
            await until(gate.reached.is_set)
            crossing = submit(client, prompt("abc"))
            gate.open()
            assert isinstance((await story_of(first)).ending, Failed)
            assert isinstance((await story_of(crossing)).ending, Failed)


async def test_cancelling_a_generation_of_a_dead_engine_is_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: object) -> None:
        raise EngineError("lost")

    with caplog.at_level(logging.CRITICAL):
        async with serving(scripted_load(before_decode=fail)) as client:
            generation = submit(client, prompt("abc"))
            with trio.fail_after(WAIT):
                await client._ended.wait()
            generation.cancel()
            assert generation.retired.is_set()


async def test_the_first_reason_for_being_unhealthy_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.CRITICAL):
        async with serving(scripted_load()) as client:
            client.mark_unhealthy("first")
            client.mark_unhealthy("second")
            assert client.unhealthy_reason == "first"


async def test_a_delivery_that_cannot_be_handled_is_logged_and_the_program_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: float) -> None:
        raise RuntimeError("no terminal")

    client = EngineClient("scripted", scripted_load(), on_progress=broken)
    with caplog.at_level(logging.ERROR):
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            assert (await story_of(submit(client, prompt("abc", 2)))).text
            client.stop()
    assert "could not be handled" in caplog.text


# --------------------------------------------------------------------------------- loading


def stubborn_load(begun: threading.Event) -> Load:
    """Loads until it is told to stop."""

    def load(progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        progress(0.5)
        begun.set()
        assert stopped.wait(WAIT)
        raise LoadingStopped

    return load


async def test_loading_reports_its_progress_and_starts_with_the_facts() -> None:
    fractions: list[float] = []
    client = EngineClient("scripted", scripted_load(), on_progress=fractions.append)
    async with trio.open_nursery() as nursery:
        ready = await nursery.start(client.run)
        assert isinstance(ready, Ready)
        assert ready is client.ready
        assert ready.info.architecture == "scripted"
        client.stop()
    assert fractions == [0.0, 1.0]


async def test_a_load_that_fails_is_raised_from_start_and_leaves_no_thread() -> None:
    def load(progress: object, stopped: object) -> LoadedModel:
        raise ModelLoadError("no such tensor")

    client = EngineClient("scripted", load)
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with trio.open_nursery() as nursery:
            with pytest.raises(ModelLoadError, match="no such tensor"):
                await nursery.start(client.run)
            assert not client.healthy
            raise ZeroDivisionError  # the nursery itself is unharmed
    assert caught.group_contains(ZeroDivisionError)
    assert not caught.group_contains(ModelLoadError)
    await until(lambda: not engine_threads())


async def test_stopping_while_loading_gives_the_loading_up() -> None:
    begun = threading.Event()
    client = EngineClient("scripted", stubborn_load(begun))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await until(begun.is_set)
            client.stop()
    assert client.ready is None
    assert not client.abandoned
    await until(lambda: not engine_threads())


async def test_cancelling_while_loading_gives_the_loading_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = threading.Event()
    client = EngineClient("scripted", stubborn_load(begun))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await until(begun.is_set)
            nursery.cancel_scope.cancel()
    assert not client.abandoned
    assert caplog.text == ""
    await until(lambda: not engine_threads())


async def test_stopped_before_it_runs_it_loads_nothing() -> None:
    def load(progress: object, stopped: object) -> LoadedModel:
        raise AssertionError("loaded all the same")

    client = EngineClient("scripted", load)
    client.stop()
    with trio.fail_after(WAIT):
        await client.run()
    assert client.ready is None


async def test_cancelling_a_running_engine_ends_its_thread_without_calling_it_ill(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners: list[ScriptedRunner] = []
    client = EngineClient("scripted", scripted_load(on_runner=runners.append))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            nursery.cancel_scope.cancel()
    assert runners[0].closed
    assert not client.abandoned
    assert caplog.text == ""
    await until(lambda: not engine_threads())


async def test_an_engine_that_dies_before_it_is_ready_is_a_failed_load() -> None:
    client = EngineClient("scripted", scripted_load())
    client._handle(Died("no memory for the scheduler", while_loading=False))
    assert client._load_error == "no memory for the scheduler"
    assert client._loaded.is_set()


# ------------------------------------------------------------------- threads that do not end


async def test_a_thread_that_does_not_end_is_abandoned_after_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 0.2)
    gate = Gate(open=False)
    runners: list[ScriptedRunner] = []
    client = EngineClient("stuck", scripted_load(before_decode=gate, on_runner=runners.append))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            generation = submit(client, prompt("abc", 9))
            await until(gate.reached.is_set)
            before = time.monotonic()
            client.stop()
    assert 0.2 <= time.monotonic() - before < WAIT / 2
    assert client.abandoned
    assert not generation.retired.is_set(), "the device may still be working for it"
    gate.open()
    # It comes back after all: what it held is given back, and it ends.
    with trio.fail_after(WAIT):
        await generation.retired.wait()
        await client._ended.wait()
    assert runners[0].closed
    await until(lambda: not engine_threads())


def test_a_thread_that_outlives_the_event_loop_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 0.05)
    gate = Gate(open=False)
    runners: list[ScriptedRunner] = []
    client = EngineClient("late", scripted_load(before_decode=gate, on_runner=runners.append))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            submit(client, prompt("abc", 9))
            await until(gate.reached.is_set)
            client.stop()

    trio.run(main)
    assert client.abandoned
    (thread,) = engine_threads()
    gate.open()
    deadline = time.monotonic() + WAIT
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not engine_threads()
    assert runners[0].closed
    assert capfd.readouterr().err == ""
    assert caplog.text == ""
    assert thread is not threading.current_thread()


def test_a_load_that_outlives_the_event_loop_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def load(progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        begun.set()
        assert go_on.wait(WAIT)
        progress(0.5)
        raise AssertionError("told progress to nobody")

    client = EngineClient("late", load)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await until(begun.is_set)
            client.stop()

    trio.run(main)
    assert client.abandoned
    go_on.set()
    deadline = time.monotonic() + WAIT
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not engine_threads()
    assert capfd.readouterr().err == ""
    assert caplog.text == ""


async def test_whatever_the_thread_leaves_unsaid_is_said_when_it_ends() -> None:
    # A generation that the thread never heard of, as after a submission that came too late.
    client = EngineClient("scripted", scripted_load())
    client._handle(Ready(None, None, None, ()))  # type: ignore[arg-type]
    client._worker = client_module.EngineWorker("scripted", scripted_load(), lambda _: None)
    ready = scripted_load()(lambda _: None, threading.Event())
    prepared = prompt("abc")
    lost = client.submit(prepared, reserve(ready.ledger, prepared))
    client._handle(Ended())
    assert await lost.events.receive() == Failed("the engine ended")
    assert await lost.events.receive() == Retired()
    assert lost.retired.is_set()


async def test_abandoning_a_thread_fails_and_settles_whom_it_will_say_nothing_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 0.2)
    gate = Gate(open=False)
    client = EngineClient("stuck", scripted_load(before_decode=gate))
    with trio.fail_after(WAIT):
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            generation = submit(client, prompt("abc", 9))
            await until(gate.reached.is_set)
            client.stop()
        assert client.abandoned
        assert client.unhealthy_reason is not None
        assert "abandoned" in client.unhealthy_reason
        assert generation.settled.is_set()
        assert not generation.retired.is_set()
        failed = generation.events.receive_nowait()
        assert isinstance(failed, Failed)
        assert "abandoned" in failed.message
        gate.open()
        await client._ended.wait()
    await until(lambda: not engine_threads())


async def test_a_client_that_is_cancelled_at_once_leaves_nobody_at_its_mailbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[LoopMailbox[Outgoing]] = []

    class Known(LoopMailbox[Outgoing]):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(client_module, "LoopMailbox", {Outgoing: Known})
    client = EngineClient("m", scripted_load())
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.run()
    assert not client.abandoned
    with pytest.raises(MailboxClosed):
        made[0].post(Ended())
