"""An engine that stalls or dies: visible, contained, and never in the way of a shutdown."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from dflash_trio.config import ModelConfig, ServerConfig
from dflash_trio.engine import client as client_module
from dflash_trio.engine.worker import Load
from dflash_trio.net.listener import bind_listeners
from dflash_trio.server import Server
from tests.support.http_client import PATIENCE, Answer, request
from tests.support.running import RunningServer, running, scripted_process, sse_events
from tests.support.scripted import Gate, answer, scripted_config, scripted_load
from tests.support.stalls import StallingGate


async def health(server: RunningServer) -> tuple[int, dict[str, object]]:
    response = await request(server.port, "GET", "/health")
    return response.status, response.json()


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_a_stall_fails_its_own_requests_is_named_and_passes_when_the_step_returns() -> None:
    stall = StallingGate(position=6)
    loads = [
        (scripted_config("first"), scripted_load(before_decode=stall, script=answer("abcdefgh"))),
        (scripted_config("second"), scripted_load(script=answer("2"))),
    ]
    async with running(*loads) as server:
        whole: list[Answer] = []

        async def ask() -> None:
            whole.append(await server.chat("x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            # A stalled engine does not stall the status pages.
            status = await server.until(lambda s: not s["models"][0]["health"]["healthy"])
        assert "stalled" in status["models"][0]["health"]["reason"]
        assert whole[0].status == 500
        assert "stalled" in whole[0].error["message"]
        code, body = await health(server)
        assert (code, body["status"]) == (200, "degraded")
        assert "first" in str(body["unhealthy"])
        # The other model goes on, and the stalled one shows no capacity.
        assert (await server.chat("x")).json()["model"] == "second"
        assert status["models"][0]["slots"]["reserved"] == 1
        assert (await server.status())["models"][0]["slots"]["available"] == 0
        stall.open()
        await server.until(lambda s: s["models"][0]["health"]["healthy"])
        await server.until_idle()
        assert await health(server) == (200, {"status": "ok"})
        assert (await server.chat("x")).json()["model"] == "first"


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_waiters_that_fit_only_the_stalled_model_get_503_and_a_stream_gets_an_error() -> None:
    stall = StallingGate(position=6)
    load = scripted_load(before_decode=stall, script=answer("abcdefgh"))
    async with running((scripted_config("only"), load)) as server:
        answers: dict[str, Answer] = {}

        async def ask(name: str, stream: bool) -> None:
            answers[name] = await server.chat("x", stream=stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "active", True)
            await server.until(lambda s: s["models"][0]["in_flight"]["decode"] == 1)
            nursery.start_soon(ask, "waiting", False)
        assert "stalled" in sse_events(answers["active"].text)[-1]["error"]["message"]
        assert "[DONE]" not in answers["active"].text
        assert answers["waiting"].status == 503
        assert answers["waiting"].error["code"] == "model_unhealthy"
        assert (await health(server))[0] == 503
        assert (await server.chat("x")).status == 503
        stall.open()
        await server.until(lambda s: s["models"][0]["health"]["healthy"])


async def test_an_engine_that_does_not_end_is_abandoned_with_a_line_and_exit_1() -> None:
    stuck = {"name": "stuck", "step_seconds": 600.0}
    # Until what cannot be written is cut, and for the engine to end.
    bounds = {
        "dflash_trio.routing.drain.CUT_GRACE": 0.2,
        "dflash_trio.engine.client.WORKER_STOP_BOUND": 0.5,
    }
    with scripted_process(stuck, bounds=bounds) as server:
        await server.until_ready()
        async with server.chatting("x"):
            await server.until(lambda s: s["models"][0]["slots"]["reserved"] == 1)
            server.signal()
            # Another number: two pending signals of one number are one to the kernel.
            server.signal(signal.SIGINT)
            assert await server.exit_code() == 1
    assert "stuck did not end in time and was abandoned" in server.log


async def test_a_load_that_cannot_be_stopped_is_left_behind_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 0.2)
    gate = Gate(open=False)
    load = scripted_load(on_runner=lambda _: gate([]))
    server = unstarted((scripted_config("slow"), load))
    codes: list[int] = []
    try:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_code, server, codes)
                await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)
                os.kill(os.getpid(), signal.SIGTERM)
        assert codes == [0]
        assert server.abandoned_engines == ["slow"]
    finally:
        gate.open()


def unstarted(*loads: tuple[ModelConfig, Load]) -> Server:
    """A server on a free port, for tests that signal this very process."""
    config = ServerConfig(models=tuple(model for model, _ in loads), load_balancing=True)
    return Server(config, bind_listeners("127.0.0.1", 0), list(loads))


async def keep_code(server: Server, codes: list[int]) -> None:
    codes.append(await server.run())


async def test_a_signal_between_two_loads_ends_the_start_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 2 * PATIENCE)
    gate = Gate(open=False)
    second_began: list[object] = []
    loads = [
        (scripted_config("first"), scripted_load(on_runner=lambda _: gate([]))),
        (scripted_config("second"), scripted_load(on_runner=second_began.append)),
    ]
    server = unstarted(*loads)
    codes: list[int] = []
    with trio.fail_after(PATIENCE):  # less than the bound of an engine that does not end
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_code, server, codes)
            await trio.to_thread.run_sync(gate.reached.wait, PATIENCE)
            os.kill(os.getpid(), signal.SIGTERM)
            gate.open()
    assert codes == [0]
    assert not server.abandoned_engines
    assert not second_began


async def test_a_signal_that_came_before_anybody_listened_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WORKER_STOP_BOUND", 2 * PATIENCE)
    bound = bind_listeners("127.0.0.1", 0)
    config = ServerConfig(models=(scripted_config("m"),))
    loads = [(config.models[0], scripted_load())]
    with trio.fail_after(PATIENCE):
        assert await Server(config, bound, loads, early_signals=[signal.SIGTERM]).run() == 0
