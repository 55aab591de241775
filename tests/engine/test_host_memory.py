"""What the host has left is the least of what the kernel and the control group say."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dflash_trio.engine import host_memory as module
from dflash_trio.engine.host_memory import HostMemory, host_memory

MIB = 2**20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  8192 kB\nSwapFree:  1024 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(module, "_LEGACY_CGROUP", tmp_path / "memory")
    return tmp_path


def test_without_a_limit_it_is_what_the_kernel_says(group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert host_memory() == HostMemory(8 * MIB, MIB)


def test_a_group_s_limit_counts_and_pages_of_files_are_free_in_it(group: Path) -> None:
    (group / "memory.max").write_text(f"{4 * MIB}\n")
    (group / "memory.current").write_text(f"{3 * MIB}\n")
    assert host_memory() == HostMemory(MIB, MIB)
    (group / "memory.stat").write_text(f"anon 1\nactive_file {MIB}\ninactive_file {MIB}\n")
    assert host_memory() == HostMemory(3 * MIB, MIB)


def test_the_older_kind_of_group_counts_too(group: Path) -> None:
    legacy = group / "memory"
    legacy.mkdir()
    (legacy / "memory.limit_in_bytes").write_text(f"{2 * MIB}\n")
    (legacy / "memory.usage_in_bytes").write_text("0\n")
    assert host_memory() == HostMemory(2 * MIB, MIB)


def test_a_host_that_does_not_say_is_unknown(group: Path) -> None:
    (group / "meminfo").unlink()
    assert host_memory() is None


def test_new_bytes_are_ones_own_to_fill() -> None:
    first, second = module.new_bytes(1000), module.new_bytes(1000)
    ctypes.memset(first, 1, 1000)
    ctypes.memset(second, 2, 1000)
    assert first == b"\1" * 1000
    assert second == b"\2" * 1000
