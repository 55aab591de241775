"""The stall guard, the abort and the lingering close, on bare sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from dflash_trio.net import StallGuardedStream, stream
from tests.net.net_helpers import NEVER, linger_at_most, pass_and_read
from tests.support.http_client import PATIENCE

FAMILIES = ["tcp", "unix"]
TINY = 4096


@asynccontextmanager
async def stream_pair(
    family: str, tmp_path: Path, *, stall_timeout: float = NEVER
) -> AsyncIterator[tuple[StallGuardedStream, trio.SocketStream]]:
    """Our side of an accepted connection, and a peer with a tiny receive buffer."""
    kind = trio.socket.AF_INET if family == "tcp" else trio.socket.AF_UNIX
    with trio.socket.socket(kind) as listener, trio.socket.socket(kind) as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY)
        await listener.bind(("127.0.0.1", 0) if family == "tcp" else str(tmp_path / "s"))
        listener.listen()
        await client.connect(listener.getsockname())
        accepted, _ = await listener.accept()
        guarded = StallGuardedStream(trio.SocketStream(accepted), stall_timeout=stall_timeout)
        async with guarded:
            yield guarded, trio.SocketStream(client)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_reader_that_takes_nothing_breaks_the_stream_after_the_stall_timeout(
    family: str, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stream_pair(family, tmp_path, stall_timeout=0.6) as (ours, _):
        started = trio.current_time()
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError, match="took no data"):
            await ours.send_all(bytes(10_000_000))
        assert 0.6 <= trio.current_time() - started < 1.5
        assert ours.stalled
        assert ours.closed
        assert ours.bytes_sent > 0


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_slow_reader_keeps_the_stream(
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: trio.testing.MockClock,
) -> None:
    # Several looks per stall timeout, as there are with the real values.
    monkeypatch.setattr(stream, "QUEUE_POLL_SECONDS", 0.1)
    async with stream_pair(family, tmp_path, stall_timeout=2.0) as (ours, peer):
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, bytes(10_000_000))
            for _ in range(40):
                await pass_and_read(mock_clock, 0.1, peer, 4000)
            nursery.cancel_scope.cancel()
        assert not ours.stalled
        assert not ours.closed
        assert ours.last_progress > started + 2.0


async def test_a_shrinking_queue_counts_as_progress_where_no_byte_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    sizes = iter(range(1000, 0, -1))
    monkeypatch.setattr(stream, "unsent_bytes", lambda _: next(sizes))
    monkeypatch.setattr(stream, "QUEUE_POLL_SECONDS", 0.05)
    async with stream_pair("tcp", tmp_path, stall_timeout=0.2) as (ours, _):
        with trio.move_on_after(1.0) as scope:
            await ours.send_all(bytes(10_000_000))
        assert scope.cancelled_caught
        assert not ours.stalled


async def test_without_a_queue_size_accepted_bytes_decide_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "unsent_bytes", lambda _: None)
    async with stream_pair("tcp", tmp_path, stall_timeout=0.2) as (ours, _):
        with pytest.raises(trio.BrokenResourceError):
            await ours.send_all(bytes(10_000_000))


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_kernels_queue_is_readable_and_shrinks_when_the_peer_reads(
    family: str, tmp_path: Path
) -> None:
    async with stream_pair(family, tmp_path) as (ours, peer):
        with trio.move_on_after(0.2):
            await ours.send_all(bytes(10_000_000))
        full = stream.unsent_bytes(ours.socket)
        assert full is not None
        assert full > 0
        with trio.fail_after(PATIENCE):
            while (stream.unsent_bytes(ours.socket) or 0) >= full:
                await peer.receive_some(65536)


@pytest.mark.parametrize("family", FAMILIES)
async def test_output_is_pending_until_the_peers_side_has_taken_it(
    family: str, tmp_path: Path
) -> None:
    async with stream_pair(family, tmp_path) as (ours, peer):
        assert not ours.output_pending()
        total = 0
        # More than the peer's side takes by itself.
        while sent := ours.send_now(bytes(TINY)):
            total += sent
        assert ours.output_pending()
        while total:
            total -= len(await peer.receive_some())
        with trio.fail_after(PATIENCE):
            # The kernels settle it between them: nobody sets an event.
            while ours.output_pending():  # noqa: ASYNC110
                await trio.sleep(0.001)
        ours.send_now(b"x")
        ours.abort()
        assert not ours.output_pending()


@pytest.mark.parametrize("family", FAMILIES)
async def test_abort_cuts_a_shielded_send_and_a_receive(family: str, tmp_path: Path) -> None:
    outcomes: list[str] = []

    async def shielded(name: str, call: Callable[[], Awaitable[object]]) -> None:
        """As hypercorn does it, in a scope that is cancelled already."""
        with trio.CancelScope() as scope:
            scope.cancel()
            with trio.CancelScope(shield=True):
                try:
                    await call()
                except trio.ClosedResourceError:
                    outcomes.append(name)

    async with stream_pair(family, tmp_path) as (ours, peer):
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shielded, "send", lambda: ours.send_all(bytes(10_000_000)))
                nursery.start_soon(shielded, "receive", ours.receive_some)
                await trio.testing.wait_all_tasks_blocked(0.1)
                assert outcomes == []
                ours.abort()
        assert sorted(outcomes) == ["receive", "send"]
        ours.abort()
        if family == "tcp":  # a reset, not an orderly end
            with pytest.raises(trio.BrokenResourceError):
                await read_to_the_end(peer)


async def read_to_the_end(peer: trio.abc.ReceiveStream) -> None:
    while await peer.receive_some(65536):
        pass


async def test_everything_arrives_in_order_and_is_counted(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    async with stream_pair("tcp", tmp_path) as (ours, peer):
        got = bytearray()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def send() -> None:
                await ours.send_all(data)
                await ours.send_eof()
                await ours.send_eof()

            while part := await peer.receive_some(65536):
                got += part
        assert bytes(got) == data
        assert ours.bytes_sent == len(data)
        with pytest.raises(trio.ClosedResourceError):
            await ours.send_all(b"more")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reader", [True, False], ids=["with a reader", "without"])
async def test_lingering_lets_a_peer_read_our_last_words_while_it_still_sends(
    family: str, reader: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=NEVER)
    async with stream_pair(family, tmp_path) as (ours, peer):
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def client() -> None:
                    await peer.send_all(bytes(5_000_000))
                    assert await peer.receive_some(100) == b"last words"
                    assert await peer.receive_some(100) == b""
                    await peer.aclose()

                if reader:
                    nursery.start_soon(read_until_closed, ours)
                    await trio.testing.wait_all_tasks_blocked(0.02)
                await ours.send_all(b"last words")
                ours.begin_linger()
                ours.begin_linger()
                if not reader:
                    await ours.aclose()
                    assert ours.closed


async def read_until_closed(ours: StallGuardedStream) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await read_to_the_end(ours)


async def test_lingering_ends_soon_when_the_peer_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_at_most(monkeypatch, quiet=0.3, altogether=NEVER)
    async with stream_pair("tcp", tmp_path) as (ours, peer):
        with trio.fail_after(PATIENCE):
            ours.begin_linger()
            assert await peer.receive_some(1) == b""  # our end is out already
            assert not ours.closed
            await ours.aclose()


async def test_lingering_is_bounded_when_the_peer_never_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=0.5)
    async with stream_pair("tcp", tmp_path) as (ours, peer):
        ours.begin_linger()
        started = trio.current_time()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def drip() -> None:
                with suppress(trio.BrokenResourceError):
                    while True:
                        await peer.send_all(b"x")
                        await trio.sleep(0.02)

            with trio.fail_after(PATIENCE):
                await ours.aclose()
            assert trio.current_time() - started >= 0.5


@pytest.mark.parametrize("cut", ["abort", "cancel"])
async def test_lingering_is_cut_by_abort_and_by_cancellation(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_at_most(monkeypatch, quiet=NEVER, altogether=NEVER)
    async with stream_pair("tcp", tmp_path) as (ours, _):
        ours.begin_linger()
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.aclose)
                await trio.testing.wait_all_tasks_blocked(0.02)
                if cut == "abort":
                    ours.abort()
                else:
                    nursery.cancel_scope.cancel()
        assert ours.closed


@pytest.mark.parametrize("way", ["abort", "aclose"])
async def test_a_descriptor_that_a_thread_writes_to_is_closed_only_after_that(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another connection's as soon as it is closed."""
    writing, may_go_on = threading.Event(), threading.Event()
    open_while_writing: list[bool] = []

    def write(fd: int, data: bytes, length: int) -> int:
        writing.set()
        assert may_go_on.wait(PATIENCE)
        open_while_writing.append(os.fstat(fd) is not None)
        return length

    monkeypatch.setattr(stream, "_write", write)
    async with stream_pair("tcp", tmp_path) as (ours, _), trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, ours.send_now, b"abc")
        assert await trio.to_thread.run_sync(writing.wait, PATIENCE)
        # The closing below holds up the event loop, so the writer is let on by a thread.
        threading.Timer(0.05, may_go_on.set).start()
        if way == "abort":
            ours.abort()
        else:
            await ours.aclose()
        assert open_while_writing == [True]
        assert ours.closed
    monkeypatch.undo()
    assert ours.send_now(b"abc") == 0


async def test_a_stall_timeout_is_positive() -> None:
    left, right = trio.socket.socketpair()
    with left, right, pytest.raises(ValueError, match="positive"):
        StallGuardedStream(trio.SocketStream(left), stall_timeout=0)
