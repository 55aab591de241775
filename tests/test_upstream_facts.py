"""Facts about other projects that this one leans on. An upgrade that changes one fails here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import inspect
import re

import hypercorn.trio.tcp_server
import llama_cpp.llama_cpp as llama
import pytest
import quart.asgi
import trio
from hypercorn.config import Config
from quart_trio.asgi import TrioASGIHTTPConnection

from dflash_trio.engine.llama_abi import native_flag_reader


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("trio", "0.35"),
        ("hypercorn", "0.18"),
        ("quart", "0.22"),
        ("quart-trio", "0.12"),
        ("h11", "0.16"),
        ("llama-cpp-python", "0.3.36"),
    ],
)
def test_the_measured_versions_are_installed(name: str, version: str) -> None:
    installed = importlib.metadata.version(name)
    assert re.match(re.escape(version) + r"(\.|$)", installed), installed


def test_hypercorn_has_http2_on_and_small_headers_by_default() -> None:
    assert "h2" in Config.alpn_protocols
    assert Config.h11_max_incomplete_size == 16 * 1024
    assert Config.keep_alive_timeout == 5


def test_hypercorn_shields_its_sends_for_ever_and_takes_a_protocol_by_assignment() -> None:
    source = inspect.getsource(hypercorn.trio.tcp_server.TCPServer)
    assert "cancel_scope.shield = True" in source
    assert "self.protocol = ProtocolWrapper(" in source


def test_quart_sends_headers_before_it_enters_the_body() -> None:
    source = inspect.getsource(quart.asgi.ASGIHTTPConnection._send_response)
    assert source.index("http.response.start") < source.index("async with response.response")


def test_quart_trio_cancels_the_request_when_the_client_leaves() -> None:
    source = inspect.getsource(TrioASGIHTTPConnection.handle_messages)
    assert "nursery.cancel_scope.cancel()" in source


async def test_a_condition_notifies_all_and_hands_its_lock_on_in_order() -> None:
    condition = trio.Condition()
    order: list[int] = []

    async def wait(number: int) -> None:
        async with condition:
            await condition.wait()
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        async with condition:
            condition.notify_all()
    assert order == [0, 1, 2]


async def test_leaving_a_condition_is_no_checkpoint() -> None:
    condition = trio.Condition()
    async with condition:
        with trio.CancelScope() as scope:
            scope.cancel()
            await condition.__aexit__(None, None, None)
        assert not scope.cancelled_caught
        await condition.acquire()


async def test_callbacks_from_threads_run_in_the_order_they_were_posted() -> None:
    seen: list[int] = []
    token = trio.lowlevel.current_trio_token()
    done = trio.Event()

    def post() -> None:
        for number in range(100):
            token.run_sync_soon(seen.append, number)
        token.run_sync_soon(done.set)

    await trio.to_thread.run_sync(post)
    await done.wait()
    assert seen == list(range(100))


def test_strlen_reads_one_byte_flags_as_an_abort_callback_should() -> None:
    flag = ctypes.create_string_buffer(b"\0\0", 2)
    data = ctypes.cast(flag, ctypes.c_void_p)
    read = native_flag_reader()
    assert read(data) is False
    flag[0] = b"\1"
    assert read(data) is True


def test_the_bindings_still_lack_what_is_bound_by_hand() -> None:
    for name in ("gguf_init_from_file", "ggml_backend_dev_count"):
        assert not hasattr(llama, name)
        assert getattr(llama._lib, name)
