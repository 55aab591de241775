"""Runs scenarios: a fresh server each, clients in their phase, signals, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio
from attrs import evolve, frozen

from .client import fetch
from .options import CheckOptions
from .phases import PHASES, Phase
from .reference import Reference, take_reference
from .scenarios import PATTERNS, Scenario, scenarios
from .server_under_test import POLL_SECONDS, ServerFailed, ServerUnderTest, serve
from .stage import NotReached, Stage
from .verdicts import Verdict, judge
from .witnesses import Account, watch_refusal

LATE_START = 0.75
"""The part of the start-up after which a server whose port is not yet open counts as loading."""


QUIET_SECONDS = 5.0
"""How long a connection may rest after the server's end. A kernel whose last packets found a full
buffer tries again after pauses that double each time."""


@frozen
class Observation:
    """All that was seen in one scenario. Times are on trio's clock."""

    scenario: Scenario
    reached: str | None = None
    """How the phase is known to have been reached."""
    not_reached: str | None = None
    """Why it was not, or is not known to have been."""
    clients: tuple[Account, ...] = ()
    signals_at: tuple[float, ...] = ()
    exit_code: int | None = None
    exited_at: float | None = None
    """``None``: it had to be killed."""
    leftovers: tuple[str, ...] = ()
    log_tail: str = ""

    @property
    def seconds(self) -> float | None:
        """From the first signal to the end of the process."""
        if self.exited_at is None or not self.signals_at:
            return None
        return self.exited_at - self.signals_at[0]


@frozen
class Result:
    """A scenario's observation and what is to be thought of it."""

    observation: Observation
    verdict: Verdict

    @property
    def scenario(self) -> Scenario:
        return self.observation.scenario


async def check(
    options: CheckOptions, on_result: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Run every scenario asked for; the results in the catalogue's order.

    ``on_result`` is called as they come. Raises UsageError when there is nothing to run and
    ServerFailed when the server does not even start undisturbed. Cancelling ends the servers.
    """
    chosen = scenarios(options)
    wanted = dict.fromkeys((s.api, kind) for s in chosen if s.api for kind in s.kinds)
    reference = await take_reference(options, wanted)
    results: dict[Scenario, Result] = {}
    limiter = trio.CapacityLimiter(options.jobs)

    async def run(scenario: Scenario) -> None:
        async with limiter:
            observation = await observe(scenario, options, reference)
        results[scenario] = Result(observation, judge_with(observation, options, reference))
        on_result(results[scenario])

    if options.jobs == 1:
        for scenario in chosen:
            await run(scenario)
    else:
        async with trio.open_nursery() as nursery:
            for scenario in chosen:
                nursery.start_soon(run, scenario)
    return [results[scenario] for scenario in chosen]


def judge_with(observation: Observation, options: CheckOptions, reference: Reference) -> Verdict:
    """The verdict on an observation; an API that is not served has one of its own."""
    api = observation.scenario.api
    if api is not None and api in reference.unserved:
        return Verdict("not served", (reference.unserved[api],))
    return judge(observation, options, reference)


async def observe(scenario: Scenario, options: CheckOptions, reference: Reference) -> Observation:
    """Run one scenario. Raises nothing of its own; its server is gone when it returns."""
    observation = Observation(scenario)
    if scenario.api in reference.unserved:
        return observation
    for kind in scenario.kinds:
        if why := reference.missing.get((scenario.api or "", kind)):
            return evolve(observation, not_reached=why)
    try:
        async with serve(options, scenario.name) as server:
            if scenario.phase in PHASES:
                await server.until_ready(options)
                return await _play(scenario, options, reference, server)
            return await _signal_while_loading(scenario, options, reference, server)
    except ServerFailed as failed:
        return evolve(observation, not_reached=str(failed))


async def _play(
    scenario: Scenario, options: CheckOptions, reference: Reference, server: ServerUnderTest
) -> Observation:
    phase = PHASES[scenario.phase]()
    observation = Observation(scenario)
    async with trio.open_nursery() as nursery:
        stage = Stage(server, options, reference, scenario.api or "", nursery)
        try:
            observation = evolve(observation, reached=await _reach(phase, stage))
            await _send_signals(scenario.pattern, phase, stage)
        except NotReached as why:
            observation = evolve(observation, reached=None, not_reached=str(why))
        if server.signals_at:
            observation = await _await_end(observation, stage)
        nursery.cancel_scope.cancel()
    for witness in stage.witnesses:
        witness.exchange.close()
    return observation


async def _reach(phase: Phase, stage: Stage) -> str:
    """Enter the phase, within a bound: each of its steps may take the timeout."""
    with trio.move_on_after(3 * stage.options.timeout):
        try:
            return await phase.enter(stage)
        except OSError as error:
            raise NotReached(f"a client could not connect: {error}") from error
    raise NotReached("the clients did not get there in time")


async def _send_signals(pattern: str, phase: Phase, stage: Stage) -> None:
    server = stage.server
    signals = PATTERNS[pattern]
    for index, (pause, number) in enumerate(signals):
        if pause:
            # Bounded by half an answer: a server that goes on accepting gets its next signal all
            # the same, and while there is still something to cut.
            halves = [stage.golden(kind).making / 2 for kind in phase.kinds]
            await watch_refusal(server.address, min([stage.options.slack, *halves]))
            await trio.sleep(pause)
            if not server.alive or all(witness.finished for witness in stage.witnesses):
                raise NotReached("everything had ended after the first signal")
        elif index == 0:
            if not server.alive:
                raise NotReached("the server had ended before the signal")
            server.take_inventory()
            if why := phase.lost(stage):
                raise NotReached(why)
        next_pauses = [pause for pause, _ in signals[index + 1 : index + 2]]
        if next_pauses == [0.0]:
            await server.halt()
        server.signal(number)
        if next_pauses != [0.0]:
            server.go_on()
    if len(signals) == 1:
        with trio.move_on_after(stage.options.timeout):
            await phase.after_signal(stage)
            return
        raise NotReached("the clients could not play their part after the signal in time")


async def _await_end(observation: Observation, stage: Stage) -> Observation:
    """Wait for the process, then for what its clients still have to read."""
    server = stage.server
    code = await server.exit_code(stage.options.timeout)
    exited_at = trio.current_time() if code is not None else None
    leftovers: list[str] = []
    if code is not None:
        leftovers = await server.leftovers()
        for witness in stage.witnesses:
            witness.may_read.set()
        await _let_clients_end(stage)
    # Before a server that lives on is killed: what its clients see of that is not its doing.
    clients = (*(witness.account() for witness in stage.witnesses), *stage.accounts)
    return evolve(
        observation,
        clients=clients,
        signals_at=tuple(server.signals_at),
        exit_code=code,
        exited_at=exited_at,
        leftovers=tuple(leftovers),
        log_tail=server.log_tail(),
    )


async def _let_clients_end(stage: Stage) -> None:
    """Until every client has its end, or none has read anything for a while."""
    patience = max(QUIET_SECONDS, stage.options.slack)
    read, quiet_since = -1, trio.current_time()
    while not all(witness.finished for witness in stage.witnesses):
        now_read = sum(witness.exchange.wire_bytes for witness in stage.witnesses)
        if now_read != read:
            read, quiet_since = now_read, trio.current_time()
        elif trio.current_time() - quiet_since > patience:
            return
        await trio.sleep(POLL_SECONDS)


async def _signal_while_loading(
    scenario: Scenario, options: CheckOptions, reference: Reference, server: ServerUnderTest
) -> Observation:
    """The signal comes when the port is open and the server says that it is not ready yet; for a
    server that opens its port only when it is ready, it comes late in the usual start-up."""
    observation = Observation(scenario)
    begin = trio.current_time()
    late = reference.ready_seconds * LATE_START
    if reference.answers_while_loading:
        late = options.timeout
    while True:
        if not server.alive:
            return evolve(observation, not_reached="the server ended while starting")
        seen = await fetch(server.address, options.ready, dict(options.headers))
        if seen.status == 200:
            return evolve(observation, not_reached="the server was ready before it could be seen")
        if seen.status is not None:
            how = f"{options.ready} answered {seen.status}"
            break
        if trio.current_time() - begin >= late:
            how = f"after {late:.1f} s of {reference.ready_seconds:.1f} s usual, port not open yet"
            break
        await trio.sleep(POLL_SECONDS)
    server.take_inventory()
    server.signal(PATTERNS[scenario.pattern][0][1])
    async with trio.open_nursery() as nursery:
        stage = Stage(server, options, reference, "", nursery)
        return await _await_end(evolve(observation, reached=how), stage)


def all_right(results: Sequence[Result]) -> bool:
    """Whether every scenario that was run is right."""
    return all(result.verdict.kind == "right" for result in results)
