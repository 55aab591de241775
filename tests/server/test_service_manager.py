"""What systemd is told, read from a real datagram socket: ready, loading, stopping, alive."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from dflash_trio.config import ListenerConfig, ServerConfig
from dflash_trio.engine.model_runner import ModelLoadError
from dflash_trio.engine.worker import LoadedModel
from dflash_trio.net.listener import bind_listeners
from dflash_trio.server import Server
from dflash_trio.service_manager import LOADING_PATIENCE, ServiceManager
from tests.support.http_client import PATIENCE
from tests.support.running import RunningServer, scripted_process
from tests.support.scripted import FileGate, Gate, answer, scripted_config, scripted_load
from tests.support.stalls import StallingGate

Message = dict[str, str]


class Manager:
    """The other end: what the server said, message by message."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def heard(self) -> list[Message]:
        """What has come since the last look."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self._read())
        return messages

    def _read(self) -> Message:
        lines = self._socket.recv(65536).decode().split("\n")
        message = dict(line.split("=", 1) for line in lines)
        assert len(message) == len(lines)
        return message

    async def until(self, name: str) -> list[Message]:
        """Everything up to the first message with that name, which is the last."""
        heard = []
        with trio.fail_after(PATIENCE):
            while not heard or name not in heard[-1]:
                await trio.lowlevel.wait_readable(self._socket)
                heard.append(self._read())
        return heard


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@dflash-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "n")
    manager = Manager(name)
    yield manager
    manager.close()


def told_by(address: str, **more: str) -> ServiceManager:
    return ServiceManager.from_environment({"NOTIFY_SOCKET": address, **more})


def test_each_message_is_one_datagram(manager: Manager) -> None:
    told = told_by(manager.address)
    told.loading("größe")
    told.ready("serving a")
    told.stopping("bye\nREADY=1")
    told.stopping("bye", bound=1.5)
    assert manager.heard() == [
        {"EXTEND_TIMEOUT_USEC": str(int(LOADING_PATIENCE * 1e6)), "STATUS": "größe"},
        {"READY": "1", "STATUS": "serving a"},
        {"STOPPING": "1", "STATUS": "bye READY=1"},
        {"STOPPING": "1", "STATUS": "bye", "EXTEND_TIMEOUT_USEC": "1500000"},
    ]


def test_without_a_manager_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for env in ({}, {"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": "1000"}):
        told = ServiceManager.from_environment(env)
        told.ready("x")
        assert (told.address, told.watchdog) == (None, None)
    assert caplog.messages == []


@pytest.mark.parametrize("address", ["vsock:2:1", "relative", "@", "/"])
def test_an_address_that_is_none_ends_nothing(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_by(address)
    told.ready("x")
    assert told.address is None
    assert address in caplog.text


def test_a_manager_that_is_gone_is_told_nothing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_by(str(tmp_path / "gone"))
    told.ready("x")
    told.stopping("x")
    assert len(caplog.messages) == 1
    assert "cannot be told" in caplog.messages[0]


def test_a_manager_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "n"))
    told = told_by(manager.address)
    full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    full.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            full.sendto(b"A=1", manager.address)
    told.ready("x")  # returns
    full.close()
    manager.close()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "9" * 4000}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_the_one_of_this_process(
    given: dict[str, str], seconds: float | None
) -> None:
    assert told_by("/run/n", **given).watchdog == seconds


async def test_the_watchdog_is_fed_in_time_while_the_server_is_of_use(
    autojump_clock: trio.testing.MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager(str(tmp_path / "n"))
    told = told_by(manager.address, WATCHDOG_USEC="30000000")
    useful = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(told.feed_watchdog, lambda: useful)
        for _ in range(10):
            await trio.sleep(15)
            assert {"WATCHDOG": "1"} in manager.heard()
        useful = False
        await trio.sleep(30)
        manager.heard()
        await trio.sleep(300)
        assert manager.heard() == []
        assert len(caplog.messages) == 1
        useful = True
        await trio.sleep(30)
        assert {"WATCHDOG": "1"} in manager.heard()
        nursery.cancel_scope.cancel()
    manager.close()


async def test_a_server_tells_its_whole_life(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    with scripted_process({"name": "a"}, {"name": "b"}, drain_timeout=20) as server:
        loading = await manager.until("READY")
        server.signal()
        stopping = await manager.until("STOPPING")
        assert await server.exit_code() == 0
    *before, ready = loading
    assert ready == {"READY": "1", "STATUS": "serving a before b"}
    assert [each["STATUS"] for each in before][-1] == "loading b: 100 %"
    assert all("EXTEND_TIMEOUT_USEC" in each for each in before)
    last = stopping[-1]
    assert last["STATUS"] == "finishing 0 requests"
    # The drain's limit, the time to cut what is left, the engines' time to end, and a margin.
    assert last["EXTEND_TIMEOUT_USEC"] == str((20 + 2 + 10 + 5) * 1_000_000)
    assert "READY" not in str(stopping)


async def test_the_manager_is_told_of_a_loading_before_the_engine_says_anything(
    tmp_path: Path,
) -> None:
    manager = Manager(str(tmp_path / "n"))
    silent = threading.Event()

    def load(_: object, stopped: threading.Event) -> LoadedModel:
        silent.wait(PATIENCE)
        raise ModelLoadError("enough")

    listeners = bind_listeners("127.0.0.1", 0)
    model = scripted_config("a")
    config = ServerConfig(models=(model,), listener=ListenerConfig(port=0))
    server = Server(config, listeners, [(model, load)], manager=told_by(manager.address))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        (first,) = await manager.until("EXTEND_TIMEOUT_USEC")
        silent.set()
    manager.close()
    assert first["STATUS"] == "loading a: 0 %"


async def test_a_signal_while_loading_is_a_stop_that_was_never_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(str(tmp_path / "n"))
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    gate = FileGate(tmp_path / "gate")
    with scripted_process({"name": "a", **gate.load_fields}) as server:
        server.signal()
        heard = await manager.until("STOPPING")
        gate.open()
        assert await server.exit_code() == 0
    manager.close()
    assert "READY" not in str(heard)
    assert "EXTEND_TIMEOUT_USEC" not in heard[-1], "a drain without a limit is the manager's to end"


@contextlib.asynccontextmanager
async def watched(manager: ServiceManager, gate: Gate) -> AsyncIterator[RunningServer]:
    listeners = bind_listeners("127.0.0.1", 0)
    port = listeners.port
    assert port is not None
    model = scripted_config("a")
    config = ServerConfig(models=(model,), listener=ListenerConfig(port=0))
    load = scripted_load(before_decode=gate, script=answer("abc"))
    server = Server(config, listeners, [(model, load)], manager=manager)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        # The test waits for READY: a datagram that nobody reads may take another's place.
        yield RunningServer(port, server)
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("stalls_are_found_soon")
async def test_a_server_whose_every_model_is_unhealthy_is_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, gate = Manager(str(tmp_path / "n")), StallingGate(open=True)
    told = told_by(manager.address, WATCHDOG_USEC="60000")
    async with watched(told, gate) as server:
        await manager.until("READY")
        await manager.until("WATCHDOG")
        assert "watchdog" not in caplog.text
        gate.close()
        assert (await server.chat("x")).status == 500
        with trio.fail_after(PATIENCE):
            while "the service manager's watchdog is fed no longer" not in caplog.text:  # noqa: ASYNC110
                await trio.sleep(0.005)
        manager.heard()
        gate.open()
        await server.until(lambda status: status["models"][0]["health"]["healthy"])
        await manager.until("WATCHDOG")
    manager.close()
