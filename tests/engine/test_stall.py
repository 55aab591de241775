"""A step that does not end: found in bounded time, contained, forgiven when it ends after all."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from dflash_trio.engine.client import STALL_CHECK_INTERVAL, EngineClient
from dflash_trio.engine.health import Health
from dflash_trio.engine.step_clock import STALL_UNMEASURED, StandingStill, StepClock
from dflash_trio.generation.errors import EngineFailed
from dflash_trio.generation.events import Failed, Retired
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.support.http_client import PATIENCE
from tests.support.scripted import Gate, answer, scripted_load
from tests.support.stalls import StallingGate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stepped(clock: Clock, steps: StepClock, tokens: int, seconds: float) -> None:
    steps.begin(tokens)
    clock.now += seconds
    steps.end()


def test_before_any_measurement_a_step_may_take_ten_minutes() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.begin(512)
    clock.now = 600.0
    assert steps.stalled() is None
    clock.now = 600.1
    assert steps.stalled() is not None


def test_no_step_counts_as_stalled_within_a_minute() -> None:
    clock = Clock()
    steps = StepClock(clock)
    stepped(clock, steps, 1, 0.01)
    steps.begin(1)
    clock.now += 60.0
    assert steps.stalled() is None
    clock.now += 0.1
    assert steps.stalled() is not None


def test_the_time_in_which_the_process_stood_still_is_none_of_a_steps() -> None:
    clock = Clock()
    steps, stood_still = StepClock(clock), StandingStill()
    steps.begin(1)
    clock.now = 1000.0
    stood_still.looked(late=999.0)
    assert steps.stalled(stood_still) is None
    stood_still.looked(late=0.0)
    clock.now += STALL_UNMEASURED - 2.0
    assert steps.stalled(stood_still) is None
    stood_still.looked(late=0.5)
    clock.now += 1.4
    assert steps.stalled(stood_still) is None
    clock.now += 0.2
    stood_still.looked(late=0.0)
    assert steps.stalled(stood_still) is not None


def test_a_step_that_began_after_a_halt_has_no_credit_for_it() -> None:
    clock = Clock()
    steps, stood_still = StepClock(clock), StandingStill()
    clock.now = 1000.0
    steps.begin(1)
    clock.now += 0.5
    stood_still.looked(late=999.0)
    assert steps.stalled(stood_still) is None
    stood_still.looked(late=0.0)
    clock.now = 1000.0 + STALL_UNMEASURED + 0.6
    assert steps.stalled(stood_still) is not None


def test_a_large_step_may_take_ten_times_what_its_tokens_took_at_the_slowest() -> None:
    clock = Clock()
    steps = StepClock(clock)
    for seconds in (0.5, 2.0, 0.1):  # a token
        stepped(clock, steps, 10, seconds * 10)
    steps.begin(512)
    clock.now += 10 * 512 * 2.0
    assert steps.stalled() is None
    clock.now += 1
    assert steps.stalled() is not None


def test_between_steps_nothing_is_stalled_and_a_stalled_step_is_not_measured() -> None:
    clock = Clock()
    steps = StepClock(clock)
    clock.now = 10_000.0
    assert steps.stalled() is None
    stepped(clock, steps, 1, 0.01)
    stepped(clock, steps, 1, 1000.0)
    steps.begin(1)
    assert steps.under_way is not None
    assert steps.under_way.limit == 60.0


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_a_stalled_engine_fails_its_own_takes_nobody_and_recovers_when_the_step_returns() -> (
    None
):
    gate = StallingGate()
    load = scripted_load(slots=2, before_decode=gate, script=answer("abc"))
    client = EngineClient("m", load)
    prepared = PreparedPrompt(tokens=(65, 62), max_tokens=9, sampling=SamplingParams(temperature=0))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            ready = await nursery.start(client.run)
            hold = ready.ledger.try_reserve(2, 9)
            assert hold is not None
            generation = client.submit(prepared, hold)
            returned: list[bool] = []
            generation.on_retired = lambda: returned.append(True)
            await generation.settled.wait()
            assert not generation.retired.is_set()
            assert isinstance(await generation.events.receive(), Failed)
            assert client.unhealthy_reason is not None
            assert "stalled" in client.unhealthy_reason
            with pytest.raises(EngineFailed):
                client.submit(prepared, hold)
            assert not returned
            gate.open()
            await generation.retired.wait()
            assert returned == [True]
            assert isinstance(await generation.events.receive(), Retired)
            assert client.healthy
            again = client.submit(prepared, hold)
            await again.retired.wait()
            client.stop()


async def test_a_process_that_was_halted_in_a_step_has_as_much_time_left_for_it(
    mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trio.engine.step_clock.STALL_UNMEASURED", 5.0)
    gate = Gate(open=False)
    client = EngineClient("m", scripted_load(before_decode=gate))
    prepared = PreparedPrompt(tokens=(65,), max_tokens=9, sampling=SamplingParams(temperature=0))
    async with trio.open_nursery() as nursery:
        ready = await nursery.start(client.run)
        assert client._worker is not None
        client._worker.clock._clock = mock_clock.current_time
        hold = ready.ledger.try_reserve(1, 9)
        assert hold is not None
        generation = client.submit(prepared, hold)
        assert await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)
        mock_clock.jump(1000.0)  # the look that was due comes at the end of it
        await trio.testing.wait_all_tasks_blocked()
        assert client.healthy
        for _ in range(4):
            mock_clock.jump(STALL_CHECK_INTERVAL)
            await trio.testing.wait_all_tasks_blocked()
        assert client.healthy
        for _ in range(2):
            mock_clock.jump(STALL_CHECK_INTERVAL)
            await trio.testing.wait_all_tasks_blocked()
        assert not client.healthy
        gate.open()
        await generation.retired.wait()
        client.stop()


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_an_engine_that_dies_in_a_stalled_step_stays_unhealthy() -> None:
    gate = StallingGate()

    def stall_and_die(batch: object) -> None:
        gate([])
        raise RuntimeError("gone")

    client = EngineClient("m", scripted_load(before_decode=stall_and_die))
    prepared = PreparedPrompt(tokens=(65,), max_tokens=9, sampling=SamplingParams(temperature=0))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            ready = await nursery.start(client.run)
            hold = ready.ledger.try_reserve(1, 9)
            assert hold is not None
            generation = client.submit(prepared, hold)
            await generation.settled.wait()
            gate.open()
            await generation.retired.wait()
            assert not client.healthy
            client.stop()


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_after_a_stalled_step_nothing_more_is_computed_for_those_it_failed() -> None:
    gate = StallingGate()
    steps: list[int] = []

    def count(batch: object) -> None:
        steps.append(1)
        gate([])

    client = EngineClient("m", scripted_load(before_decode=count))
    prepared = PreparedPrompt(tokens=(65,), max_tokens=999, sampling=SamplingParams(temperature=0))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            ready = await nursery.start(client.run)
            hold = ready.ledger.try_reserve(1, 999)
            assert hold is not None
            generation = client.submit(prepared, hold)
            await generation.settled.wait()
            gate.open()
            await generation.retired.wait()
            assert len(steps) == 1
            client.stop()


@pytest.mark.parametrize("lasting_first", [True, False])
def test_a_reason_that_does_not_pass_is_not_lifted_by_one_that_does(lasting_first: bool) -> None:
    client = EngineClient("m", scripted_load())
    client.health.enter(Health.HEALTHY)
    for may_recover in (not lasting_first, lasting_first):
        client.mark_unhealthy(f"may recover: {may_recover}", may_recover=may_recover)
    client._recover()
    assert client.unhealthy_reason == f"may recover: {not lasting_first}"
