"""A control group's share of the processors counts like the processors themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trio.engine import host_cores as module
from dflash_trio.engine.host_cores import core_quota
from dflash_trio.routing import router


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/system.slice/dflash.service\n")
    monkeypatch.setattr(module, "_OWN_GROUP", own)
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    (tmp_path / "system.slice" / "dflash.service").mkdir(parents=True)
    return tmp_path


def test_without_a_quota_there_is_no_limit(group: Path) -> None:
    assert core_quota() is None
    (group / "cpu.max").write_text("max 100000\n")
    assert core_quota() is None


def test_a_share_of_a_core_is_not_counted_but_one_core_is_always_there(group: Path) -> None:
    (group / "cpu.max").write_text("250000 100000\n")
    assert core_quota() == 2
    (group / "cpu.max").write_text("50000 100000\n")
    assert core_quota() == 1


def test_the_tightest_of_the_groups_around_the_process_counts(group: Path) -> None:
    (group / "system.slice" / "cpu.max").write_text("800000 100000\n")
    (group / "system.slice" / "dflash.service" / "cpu.max").write_text("300000 100000\n")
    assert core_quota() == 3


def test_the_older_kind_of_group_counts_too(group: Path) -> None:
    (group / "cpu").mkdir()
    (group / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert core_quota() is None
    (group / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    assert core_quota() == 4


def test_a_group_outside_of_what_can_be_seen_is_left_out(group: Path) -> None:
    (group / "own").write_text("0::/../other\n")
    (group.parent / "cpu.max").write_text("100000 100000\n")
    assert core_quota() is None


def test_a_quota_narrows_the_usable_cores_and_never_widens_them(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = router.usable_cores()
    (group / "cpu.max").write_text("100000 100000\n")
    assert router.usable_cores() == 1
    (group / "cpu.max").write_text("99900000 100000\n")
    assert router.usable_cores() == every
