"""Descriptors for clients: how many a server may open, and what it does when they run out."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Sequence

import trio
from attrs import define

logger = logging.getLogger("dflash_trio.net")

RESERVED_DESCRIPTORS = 256
"""Beside the connections: those being refused, pipes, files, the drivers of GPUs."""

SHORTAGE_RETRY_SECONDS = 0.1
"""How long accepting pauses: the client stays in the queue, and accept(2) would fail at once."""
SHORTAGE_LINE_SECONDS = 30.0
"""One line in so long: a shortage lasts as long as clients keep their connections."""

_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


def descriptor_warning(max_connections: int) -> str | None:
    """What the hard limit of open files means for so many connections; ``None``: it is enough."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = max_connections + RESERVED_DESCRIPTORS
    if _reaches(hard, wanted):
        return None
    room = hard - RESERVED_DESCRIPTORS
    lower = f", or lower --max-connections to {room}" if room > 0 else ""
    return (
        f"--max-connections {max_connections} wants {wanted} open files, {RESERVED_DESCRIPTORS} of "
        f"them for the server's own, and the hard limit is {hard}: clients beyond it wait unheard; "
        f"raise it (ulimit -Hn, LimitNOFILE= of systemd){lower}"
    )


def raise_descriptor_limit(max_connections: int) -> None:
    """Raise the soft limit of open files as far as so many connections want it, and it may go.

    It is 1024 on most systems, for the sake of programs that use select(2), which this one does
    not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_DESCRIPTORS
    if _reaches(soft, wanted):
        return
    target = wanted if _reaches(hard, wanted) else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:  # macOS has a second limit, below the hard one
        logger.warning(
            "the limit of open files stays at %d, and --max-connections %d wants %d: %s",
            *(soft, max_connections, wanted, error),
        )


def _reaches(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


@define
class ShortageLog:
    """Says that clients cannot be accepted: at once, then now and then."""

    connections: Callable[[], int]
    """How many are open."""
    _last: float | None = None

    def tell(self, error: OSError) -> None:
        now = trio.current_time()
        if self._last is not None and now - self._last < SHORTAGE_LINE_SECONDS:
            return
        self._last = now
        code = error.errno or 0
        remedy = ""
        if code == errno.EMFILE:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            remedy = f"; this process may open {soft} files (ulimit -n)"
        logger.error(
            "new clients wait: accept returned %s (%s) with %d connections open%s",
            *(errno.errorcode.get(code, code), os.strerror(code), self.connections(), remedy),
        )


class PatientListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that outlasts a shortage of descriptors or memory.

    ``trio.serve_listeners`` would do so too, but logs a traceback each time it tries again: ten a
    second, for as long as the shortage lasts.
    """

    def __init__(self, listener: trio.SocketListener, shortage: ShortageLog) -> None:
        self._listener = listener
        self._shortage = shortage

    async def accept(self) -> trio.SocketStream:
        while True:
            try:
                return await self._listener.accept()
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._shortage.tell(error)
            await trio.sleep(SHORTAGE_RETRY_SECONDS)

    async def aclose(self) -> None:
        await self._listener.aclose()


def patient_listeners(
    listeners: Sequence[trio.SocketListener], connections: Callable[[], int]
) -> list[PatientListener]:
    """The same listeners, with one log among them."""
    shortage = ShortageLog(connections)
    return [PatientListener(listener, shortage) for listener in listeners]
