"""Binding: what is listened on, and the one clear line when that is not possible."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from dflash_trio.net import BindError, bind_listeners, listener
from dflash_trio.net.listener import SEND_BUFFER_BYTES, loopback_in_numbers
from tests.net.net_helpers import PLAIN_REQUEST, Client, running_server
from tests.support.http_client import PATIENCE


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_port_0_takes_a_free_port_and_says_which() -> None:
    listeners = bind_listeners("127.0.0.1", 0)
    assert listeners.port
    assert listeners.addresses == (f"http://127.0.0.1:{listeners.port}",)
    listeners.close()
    listeners.close()
    assert listeners.closed


def test_addresses_say_https_with_tls() -> None:
    listeners = bind_listeners("127.0.0.1", 0, tls=True)
    assert listeners.addresses == (f"https://127.0.0.1:{listeners.port}",)
    listeners.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_addresses_are_served_with_and_without_brackets(host: str) -> None:
    listeners = bind_listeners(host, 0)
    assert listeners.addresses == (f"http://[::1]:{listeners.port}",)
    async with running_server(listeners=listeners) as server:
        async with Client(await trio.open_tcp_stream("::1", listeners.port or 0)) as client:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200
        assert server.app.requests[0]["client"][0] == "::1"


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Make the name "twofold" stand for *addresses*."""
    real = socket.getaddrinfo

    def fake(host: str, port: int, *args: object, **kwargs: object) -> list[object]:
        if host != "twofold":
            return real(host, port, *args, **kwargs)  # type: ignore[arg-type, return-value]
        return [item for address in addresses for item in real(address, port, *args, **kwargs)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


def test_a_name_is_bound_on_all_its_addresses_with_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.1")
    listeners = bind_listeners("twofold", 0)
    assert listeners.addresses == (
        f"http://127.0.0.1:{listeners.port}",
        f"http://127.0.0.2:{listeners.port}",
    )
    listeners.close()


@pytest.mark.parametrize(
    ("host", "on_loopback"),
    [("127.1", True), ("0x7f000001", True), ("2130706433", True), ("0.0.0.0", False)],
)
def test_loopback_is_judged_by_what_is_bound(host: str, on_loopback: bool) -> None:
    listeners = bind_listeners(host, 0)
    assert listeners.on_loopback == on_loopback
    listeners.close()
    assert loopback_in_numbers(host) == on_loopback


def test_a_name_is_on_loopback_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for addresses, on_loopback in (
        (("127.0.0.1", "127.0.0.2"), True),
        (("127.0.0.1", "0.0.0.0"), False),
    ):
        with monkeypatch.context() as patch:
            resolve_to(patch, *addresses)
            # Of two that overlap only one could be bound on one port.
            patch.setattr(listener, "_listen_tcp", bind_anywhere)
            listeners = bind_listeners("twofold", 0)
        assert listeners.on_loopback == on_loopback
        listeners.close()


def bind_anywhere(family: int, address: str, port: int, backlog: int) -> socket.socket:
    sock = socket.socket(family)
    sock.bind((address, 0))
    return sock


def test_only_the_resolver_knows_about_a_name(tmp_path: Path) -> None:
    for name in ("localhost", "no-such-host.invalid", "x" * 300, "1.2.3.4.5"):
        assert loopback_in_numbers(name) is None
    assert loopback_in_numbers("::1")
    assert not loopback_in_numbers("::")
    listeners = bind_listeners(f"unix:{tmp_path}/s", 0)
    assert not listeners.on_loopback
    listeners.close()


def test_an_address_this_machine_lacks_is_skipped_if_another_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_to(monkeypatch, "192.0.2.77", "127.0.0.1")
    listeners = bind_listeners("twofold", 0)
    assert listeners.addresses == (f"http://127.0.0.1:{listeners.port}",)
    listeners.close()
    with pytest.raises(BindError, match=r"192\.0\.2\.77:0: this machine does not have"):
        bind_listeners("192.0.2.77", 0)


def test_a_busy_port_is_named() -> None:
    first = bind_listeners("127.0.0.1", 0)
    assert first.port is not None
    message = f"^cannot listen on 127.0.0.1:{first.port}: the address is already in use$"
    with pytest.raises(BindError, match=message):
        bind_listeners("127.0.0.1", first.port)
    first.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300, "1.2.3.4.5"])
def test_an_unknown_host_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BindError, match="unknown host") as caught:
        bind_listeners(host, 0)
    assert host in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
def test_a_number_that_is_no_port_is_named(port: int) -> None:
    with pytest.raises(BindError, match=str(port)):
        bind_listeners("127.0.0.1", port)


async def test_accepted_connections_have_the_bounded_send_buffer() -> None:
    listeners = bind_listeners("127.0.0.1", 0)
    [listener] = listeners.trio_listeners()
    client = await trio.open_tcp_stream("127.0.0.1", listeners.port or 0)
    accepted = await listener.accept()
    size = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert size in {SEND_BUFFER_BYTES, 2 * SEND_BUFFER_BYTES}  # Linux doubles it
    await client.aclose()
    await accepted.aclose()
    listeners.close()


async def test_a_unix_socket_is_served_and_its_file_removed(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    listeners = bind_listeners(f"unix:{path}", 0)
    assert listeners.addresses == (f"unix:{path}",)
    assert listeners.port is None
    async with running_server(listeners=listeners) as server:
        async with Client(await trio.open_unix_socket(path)) as client:
            await client.send(PLAIN_REQUEST)
            assert (await client.answer()).status == 200
            server.server.stop_accepting()
            assert not path.exists()
            with pytest.raises(OSError, match=r"No such file"):
                await trio.open_unix_socket(path)
        with trio.fail_after(PATIENCE):
            await server.ended.wait()


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_unix_sockets_mode_is_what_was_asked_for(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    listeners = bind_listeners(f"unix:{path}", 0, unix_mode=mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    listeners.close()


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = bind_listeners(f"unix:{path}", 0)
    listeners.close()
    assert not path.exists()


def test_a_unix_socket_somebody_answers_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = bind_listeners(f"unix:{path}", 0, backlog=0)
    for _ in range(3):  # the last finds the queue full, which means alive too
        with pytest.raises(BindError, match=f"unix:{path}: the address is already in use"):
            bind_listeners(f"unix:{path}", 0)
    assert path.exists()
    first.close()


def test_a_successors_socket_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = bind_listeners(f"unix:{path}", 0)
    path.rename(tmp_path / "moved")
    second = bind_listeners(f"unix:{path}", 0)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(BindError, match="exists and is not a socket"):
        bind_listeners(f"unix:{path}", 0)
    assert path.read_text() == "data"


def test_impossible_unix_paths_are_explained(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="no such directory"):
        bind_listeners(f"unix:{tmp_path}/missing/s", 0)
    with pytest.raises(BindError, match="the path is too long"):
        bind_listeners(f"unix:{tmp_path}/{'s' * 200}", 0)
    with pytest.raises(BindError, match="no path"):
        bind_listeners("unix:", 0)
    (tmp_path / "file").touch()
    with pytest.raises(BindError, match="not a directory"):
        bind_listeners(f"unix:{tmp_path}/file/s", 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_forbidden_directory_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BindError, match="permission denied"):
        bind_listeners(f"unix:{tmp_path}/s", 0)
