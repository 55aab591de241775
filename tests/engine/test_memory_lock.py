"""What the limit of locked memory lets ``--mlock`` do, where it is known."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dflash_trio.engine import memory_lock
from dflash_trio.engine.memory_lock import CannotLock, check_lockable

KIB = 1024
LIMIT = 64 * KIB


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The process's own page, of a process that may lock 64 KiB."""
    path = tmp_path / "status"
    path.write_text("Name:\tserver\nCapEff:\t000001fffeffbfff\nThreads:\t1\n")
    monkeypatch.setattr(memory_lock, "_STATUS", path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    return path


@pytest.mark.parametrize(("size", "beside"), [(0, 0), (LIMIT, 0), (LIMIT - KIB, KIB)])
def test_what_is_within_the_limit_passes(status: Path, size: int, beside: int) -> None:
    assert check_lockable(size, beside=beside) is None


def test_what_is_beyond_it_is_refused_with_the_numbers(status: Path) -> None:
    with pytest.raises(CannotLock, match=r"65 KiB of weights to lock, and the limit .* is 64 KiB"):
        check_lockable(LIMIT + 1)
    with pytest.raises(CannotLock, match=r"60 KiB .* beside 5 KiB of other models"):
        check_lockable(60 * KIB, beside=5 * KIB)


def test_no_limit_and_the_right_to_lock_everything_pass(
    status: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status.write_text("CapEff:\t0000000000004000\n")
    assert check_lockable(2**40) is None
    status.write_text("CapEff:\t0000000000000000\n")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert check_lockable(2**40) is None


@pytest.mark.parametrize("content", [None, "Name:\tserver\n", "CapEff:\tx\n"])
def test_where_it_is_not_known_a_warning_says_so(status: Path, content: str | None) -> None:
    if content is None:
        status.unlink()
    else:
        status.write_text(content)
    warning = check_lockable(LIMIT + 1)
    assert warning is not None
    assert "65 KiB" in warning
    assert "not known" in warning
