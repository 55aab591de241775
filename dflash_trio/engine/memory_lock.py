"""Whether weights can be locked in memory (``--mlock``), as far as that is known before loading."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 1 << 14  # <linux/capability.h>

_REMEDY = "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity of systemd), or leave --mlock out"


class CannotLock(Exception):
    """The weights cannot be locked. One line with the numbers and what to do."""


def check_lockable(size: int, *, beside: int = 0) -> str | None:
    """Check that ``size`` bytes may be locked beside those of other models.

    Raises CannotLock where the limit is certainly too low. Returns a warning where it is not known
    whether the limit holds for this process. What passes may still fail: while a file is mapped
    the rest of it is locked too, and the right to lock everything counts for nothing in a user
    namespace of its own. Then the loading fails.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or size + beside <= limit:
        return None
    unlimited = _may_lock_everything()
    if unlimited:
        return None
    others = f" beside {_kib(beside)} KiB of other models" if beside else ""
    numbers = (
        f"--mlock has {_kib(size)} KiB of weights to lock{others}, and the limit of locked memory "
        f"is {limit // 1024} KiB"
    )
    if unlimited is None:
        return (
            f"{numbers}: whether it holds for this process is not known, as {_STATUS} cannot be "
            "read; if it does, the loading will fail"
        )
    raise CannotLock(f"{numbers}: {_REMEDY}")


def _may_lock_everything() -> bool | None:
    """Whether the limit is none for this process; ``None``: unknown, as anywhere but on Linux."""
    try:
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "CapEff":
                return bool(int(value, 16) & _CAP_IPC_LOCK)
    except (OSError, ValueError):
        pass
    return None


def _kib(size: int) -> int:
    return -(-size // 1024)
