"""What a service manager is told of the server's life: systemd's notification protocol.

The protocol is one datagram of ``NAME=value`` lines to the socket named by ``NOTIFY_SOCKET``.
Without that variable nothing happens here. Nothing that goes wrong with it ends the server: a
manager that cannot be told is told nothing, with one warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping

import trio
from attrs import define, field

log = logging.getLogger("dflash_trio")

LOADING_PATIENCE = 300.0
"""Seconds that loading may go on after its latest sign of progress: asked for at each of them.

A silence may be longer and healthy, when llama.cpp reads a large file from a slow disk before it
reports anything. So this lengthens a limit that the unit has; it does not replace a long one."""
_SEND_BOUND = 0.1
"""Seconds that a full queue of the manager's may hold up the event loop, for each message."""


@define(eq=False)
class ServiceManager:
    """Tells the manager, if there is one. Every call returns at once and raises nothing."""

    address: bytes | None = None
    """The socket's; ``None``: there is no manager."""
    watchdog: float | None = None
    """Seconds within which it wants to hear that the server is alive; ``None``: it does not."""
    _complained: bool = field(default=False, init=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> ServiceManager:
        """The manager that started this process, as its variables say."""
        name = env.get("NOTIFY_SOCKET", "")
        if not name:
            return cls()
        if name[0] not in "/@" or len(name) == 1:
            log.warning("NOTIFY_SOCKET %s is no address that can be told anything: ignored", name)
            return cls()
        # An abstract socket has a NUL where the variable, which cannot hold one, has an @.
        raw = os.fsencode(name)
        return cls(b"\0" + raw[1:] if name[0] == "@" else raw, _watchdog(env))

    def loading(self, what: str) -> None:
        """Loading goes on; a limit for the start runs out ``LOADING_PATIENCE`` from now at the
        earliest."""
        self._tell(f"EXTEND_TIMEOUT_USEC={_microseconds(LOADING_PATIENCE)}", f"STATUS={what}")

    def ready(self, what: str) -> None:
        """Requests are served from now on."""
        self._tell("READY=1", f"STATUS={what}")

    def stopping(self, what: str, bound: float | None = None) -> None:
        """The server ends, within ``bound`` seconds if it has such a bound."""
        lines = ["STOPPING=1", f"STATUS={what}"]
        if bound is not None:
            lines.append(f"EXTEND_TIMEOUT_USEC={_microseconds(bound)}")
        self._tell(*lines)

    async def feed_watchdog(self, useful: Callable[[], bool]) -> None:
        """Say so while the event loop runs and ``useful()``. Runs until cancelled.

        A loop that hangs says nothing by itself. One whose server is of no use any more stops
        saying so, and the manager starts another.
        """
        if self.watchdog is None:
            return
        fed = True
        while True:
            was_fed, fed = fed, useful()
            if fed:
                self._tell("WATCHDOG=1")
            elif was_fed:
                log.error("no model is healthy: the service manager's watchdog is fed no longer")
            await trio.sleep(self.watchdog / 3)

    def _tell(self, *lines: str) -> None:
        if self.address is None:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_SEND_BOUND)
                sock.sendto(message.encode("utf-8", "replace"), self.address)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("the service manager cannot be told anything: %s", error)


def _watchdog(env: Mapping[str, str]) -> float | None:
    with contextlib.suppress(ValueError, OverflowError):
        # For another process of the service, when its id is given.
        if env.get("WATCHDOG_PID") and int(env["WATCHDOG_PID"]) != os.getpid():
            return None
        interval = int(env.get("WATCHDOG_USEC", "0")) / 1e6
        return interval if interval > 0 else None
    log.warning("WATCHDOG_USEC or WATCHDOG_PID is no number: there is no watchdog")
    return None


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
