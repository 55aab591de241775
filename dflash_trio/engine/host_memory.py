"""The host's memory: what is left of it for this process, and how large pieces come and go."""

from __future__ import annotations

import ctypes
from pathlib import Path

from attrs import frozen

_M_MMAP_THRESHOLD = -3  # <malloc.h> of glibc
_LARGE_BLOCK = 1 << 20

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LEGACY_CGROUP = _CGROUP / "memory"


@frozen
class HostMemory:
    """Bytes."""

    available: int
    """To be had without swapping. Cached pages of files count, as they can be dropped."""
    swap: int
    """Swap space that is free."""


def new_bytes(size: int) -> bytes:
    """Bytes with anything in them, for their only owner to fill in before somebody else has them:
    what C's API allows, and only then."""
    return bytes(_new_bytes(None, size))


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object


def give_large_blocks_back() -> None:
    """Have what is freed go back to the system at once, where it is a megabyte or more.

    glibc otherwise takes the first large block that is freed as a sign that more will be wanted,
    and keeps twice as much as the largest from then on: with saved conversations, tens of
    megabytes. A no-op with other libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def host_memory() -> HostMemory | None:
    """The host's memory, or what the process's group may still take of it; ``None``: unknown, as
    anywhere but on Linux."""
    meminfo = _numbers(_MEMINFO)
    if "MemAvailable" not in meminfo:
        return None
    available = meminfo["MemAvailable"] * 1024
    left = _group_left()
    return HostMemory(
        available if left is None else min(available, left), meminfo.get("SwapFree", 0) * 1024
    )


def _group_left() -> int | None:
    """What the control group may still take; ``None`` where it has no limit."""
    for folder, limit_name, used_name in (
        (_CGROUP, "memory.max", "memory.current"),
        (_LEGACY_CGROUP, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            cached = _numbers(folder / "memory.stat")
            # Files' pages count as used, and go when somebody needs the room.
            dropped = sum(cached.get(f"{kind}_file", 0) for kind in ("active", "inactive"))
            return max(0, limit - max(0, used - dropped))
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines like ``Name: 12 kB`` or ``name 12``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
