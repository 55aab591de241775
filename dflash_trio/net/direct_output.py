"""Writing a part of a response's body at once, from outside of the application's task.

An ASGI application sends from its own task, through every layer of the server. For a stream of
small parts, whose origin is another thread, waking that task for each of them costs several times
what the write does.
"""

from __future__ import annotations

from typing import Protocol

from hypercorn.protocol.http_stream import HTTPStream

DIRECT_OUTPUT = "direct_output"
"""The key in ``scope["state"]`` of a request's :class:`DirectOutput`."""


class DirectOutput(Protocol):
    """One request's way past its own task.

    :meth:`ready` and :meth:`write` may be called on any thread, while the application sends
    nothing. What is written here and what the application sends go out in the order of the calls.
    """

    def ready(self) -> bool:
        """Whether :meth:`write` may be called: the response's headers are out, more of its body
        may follow, nobody else is writing, and nothing that was written here before is left over.
        """
        ...

    def write(self, data: bytes) -> bool:
        """Send a part of the body, which is not empty. Call it only when :meth:`ready` has just
        said so. False: the kernel did not take all of it. The rest goes out before anything else,
        and :meth:`flush` is to be awaited for that."""
        ...

    async def flush(self) -> None:
        """Send what is left over, waiting for the client as an application's send does: bounded by
        the stall timeout, and raising nothing when the client is gone."""
        ...


class ByteOutput(Protocol):
    """The connection's side of it: bytes, whatever they mean. The two that do not wait may be
    called on any thread."""

    def can_write_now(self) -> bool:
        """Nobody is writing, and nothing is left over."""
        ...

    def write_now(self, data: bytes) -> bool:
        """False: a rest is left over, or all of it, if somebody has begun to write since."""
        ...

    async def write_rest(self) -> None: ...


class ChunkedProtocol(Protocol):
    """The protocol's side of it: whether HTTP's chunks may be written beside it."""

    output: ByteOutput

    def takes_chunks_of(self, stream: HTTPStream) -> bool: ...


class ChunkOutput:
    """A request's DirectOutput: HTTP's chunks."""

    def __init__(self, protocol: ChunkedProtocol, stream: HTTPStream) -> None:
        self._protocol = protocol
        self._stream = stream

    def ready(self) -> bool:
        protocol = self._protocol
        return protocol.takes_chunks_of(self._stream) and protocol.output.can_write_now()

    def write(self, data: bytes) -> bool:
        return self._protocol.output.write_now(b"%x\r\n%b\r\n" % (len(data), data))

    async def flush(self) -> None:
        await self._protocol.output.write_rest()
