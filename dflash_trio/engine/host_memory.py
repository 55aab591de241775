"""What memory the host has left for this process. Linux; elsewhere nothing is known."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

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


def host_memory() -> HostMemory | None:
    """The host's memory, or what the process's group may still take of it; ``None``: unknown."""
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
