"""How much processor time the process's control group lets it have. Linux; elsewhere no limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def core_quota() -> int | None:
    """Whole cores of processor time that are granted, at least 1; ``None``: no limit.

    A container or a service that may use two cores' worth of time still sees every core of its
    host. Threads beyond that worth are stopped in the middle of a step, and all others of the step
    wait for them, so a fraction of a core is not counted.
    """
    quotas = [quota for quota in _quotas() if quota > 0]
    return max(1, int(min(quotas))) if quotas else None


def _quotas() -> Iterator[float]:
    for group in _groups():
        words = _text(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and words[1] != "0":
            yield int(words[0]) / int(words[1])
    legacy = _CGROUP / "cpu"
    quota, period = _text(legacy / "cpu.cfs_quota_us"), _text(legacy / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and period != "0":  # -1: no limit
        yield int(quota) / int(period)


def _groups() -> Iterator[Path]:
    """The process's own group and those around it: each may have a limit."""
    yield _CGROUP
    for line in _text(_OWN_GROUP).splitlines():
        if line.startswith("0::/"):
            group = _CGROUP
            for name in line.removeprefix("0::/").split("/"):
                if name in ("", ".", ".."):  # a group outside of what this process may see
                    return
                group /= name
                yield group


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
