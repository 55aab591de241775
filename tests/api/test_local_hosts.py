"""The guard of a server on loopback without keys: it holds however the address was spelled."""

from __future__ import annotations

import socket

import pytest
import trio
from werkzeug.datastructures import Headers

from dflash_trio.api.access import AccessPolicy
from dflash_trio.config import ListenerConfig, ServerConfig
from dflash_trio.net.listener import bind_listeners
from dflash_trio.server import Server
from tests.support.http_client import request
from tests.support.running import poll_health
from tests.support.scripted import scripted_config, scripted_load

NAME = "this-machine"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name of 127.0.0.1, without a resolver."""
    real = socket.getaddrinfo

    def fake(host: str, *args: object, **kwargs: object) -> object:
        return real("127.0.0.1" if host == NAME else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", NAME])
async def test_what_is_bound_counts_and_not_how_it_is_spelled(host: str) -> None:
    bound = bind_listeners(host, 0)
    port = bound.port
    assert port is not None
    assert bound.addresses == (f"http://127.0.0.1:{port}",)
    model = scripted_config()
    config = ServerConfig((model,), ListenerConfig(host=host, port=0))
    server = Server(config, bound, [(model, scripted_load())])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await poll_health(port)
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"host": f"{host}.evil.example"}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"host": "localhost"}, 200),
            ({"host": f"127.0.0.1:{port}"}, 200),
            ({"host": f"{host}:{port}"}, 200),
            ({"host": f"{host.upper()}.:{port}", "origin": f"http://{host}:{port}"}, 200),
        ):
            answered = await request(port, "GET", "/v1/models", **headers)
            assert answered.status == status, headers
        nursery.cancel_scope.cancel()


def test_a_host_without_a_name_is_not_local() -> None:
    policy = AccessPolicy((), local_only=True)
    for host in (".", ":80", "@", "[", "[]"):
        assert policy.refusal("GET", "/props", Headers({"Host": host})) is not None, host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.9", "[::1]:8080", "[::ffff:127.0.0.1]"])
def test_loopback_addresses_are_local(host: str) -> None:
    policy = AccessPolicy((), local_only=True)
    assert policy.refusal("GET", "/props", Headers({"Host": host})) is None
