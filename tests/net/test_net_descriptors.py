"""A server raises its limit of descriptors, and without them goes on, saying so in few lines."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from dflash_trio.net import descriptors
from dflash_trio.net.descriptors import (
    RESERVED_DESCRIPTORS,
    SHORTAGE_LINE_SECONDS,
    patient_listeners,
)
from tests.support.http_client import PATIENCE
from tests.support.running import ServerProcess, scripted_process

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def connected(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def answered(client: socket.socket) -> bool:
    client.sendall(ASK)
    return client.recv(1000).startswith(b"HTTP/1.1 200 ")


@contextmanager
def soft_limit(limit: int) -> Iterator[int]:
    """Of open files, for processes that begin in the block; the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_as_many_clients_as_the_option_says_are_served_under_a_low_soft_limit() -> None:
    connections = 400
    with ExitStack() as stack:
        with soft_limit(300) as hard:
            if 0 <= hard < connections + RESERVED_DESCRIPTORS:
                pytest.skip("this host's hard limit is too low")
            server = stack.enter_context(scripted_process({}, max_connections=connections))
        await server.until_ready()
        limit = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert limit == (connections + RESERVED_DESCRIPTORS, hard)
        clients = [stack.enter_context(closing(connected(server))) for _ in range(connections - 2)]
        assert answered(clients[-1])


async def test_a_shortage_is_one_line_and_whoever_waits_is_served_in_the_end() -> None:
    with scripted_process({}) as server:
        await server.until_ready()
        pid = server.process.pid
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        limit = len(os.listdir(f"/proc/{pid}/fd")) + 5
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(connected(server))) for _ in range(20)]
            with trio.fail_after(PATIENCE):
                # It is another process that writes it.
                while "new clients wait" not in server.log:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            await trio.sleep(0.5)  # some attempts more
            for client in clients[:10]:
                client.close()
            assert answered(clients[10])
        lines = [line for line in server.log.splitlines() if "accept" in line]
        assert len(lines) == 1
        assert "EMFILE" in lines[0]
        assert f"may open {limit} files" in lines[0]
        assert "Traceback" not in server.log


class Failing:
    """A listener that fails for so long, then has somebody."""

    def __init__(self, seconds: float, number: int = errno.EMFILE) -> None:
        self._end = trio.current_time() + seconds
        self._number = number

    async def accept(self) -> str:
        await trio.lowlevel.checkpoint()
        if trio.current_time() < self._end:
            raise OSError(self._number, "no")
        return "somebody"


def patient(listener: Failing) -> Any:
    return patient_listeners([cast(trio.SocketListener, listener)], lambda: 7)[0]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
async def test_a_shortage_that_lasts_is_told_now_and_then(
    number: int, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    listener = patient(Failing(2.5 * SHORTAGE_LINE_SECONDS, number))
    assert await listener.accept() == "somebody"
    assert len(caplog.records) == 3
    assert all(errno.errorcode[number] in record.getMessage() for record in caplog.records)
    assert all("7 connections" in record.getMessage() for record in caplog.records)
    assert all(record.exc_info is None for record in caplog.records)


async def test_an_error_that_is_no_shortage_gets_out() -> None:
    with pytest.raises(OSError, match="no"):
        await patient(Failing(1, errno.EINVAL)).accept()


@pytest.mark.parametrize(
    ("hard", "says"),
    [
        (1000 + RESERVED_DESCRIPTORS, None),
        (resource.RLIM_INFINITY, None),
        (1024, "--max-connections to 768"),
        (100, "the hard limit is 100"),
    ],
)
def test_a_hard_limit_that_is_too_low_is_told(
    hard: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    warning = descriptors.descriptor_warning(1000)
    if says is None:
        assert warning is None
        return
    assert warning is not None
    assert says in warning
    assert ("lower" in warning) is (hard > RESERVED_DESCRIPTORS)
    assert "--max-connections 1000 wants 1256 open files" in warning


def test_a_system_that_refuses_to_raise_the_limit_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with caplog.at_level(logging.WARNING):
        descriptors.raise_descriptor_limit(1000)
    assert "stays at 64, and --max-connections 1000 wants 1256" in caplog.text
