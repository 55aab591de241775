"""What is kept of prompts survives a restart; nothing damaged or foreign is ever used."""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio.engine import disk_cache, disk_entry, worker
from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.disk_cache import (
    DiskCache,
    FolderError,
    check_folder,
    make_folder,
    state_key,
)
from dflash_trio.engine.disk_entry import BadEntry, open_entry, read_head
from dflash_trio.engine.prefix_cache import PrefixCache
from dflash_trio.engine.prefix_store import Gone, Stored
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.events import Finished
from dflash_trio.generation.request import PreparedPrompt
from tests.engine.engine_helpers import prompt, reserve, stories
from tests.engine.test_prefix_cache import HEAD, Engine, cached, cold, turns
from tests.engine.test_runner_contract import NIGHT, load_llama
from tests.engine.test_worker import Lost, running
from tests.support.http_client import PATIENCE
from tests.support.scripted import scripted_load

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
STATE = bytes(range(256)) * 4
TOKENS = tuple(range(100))
KINDS = pytest.mark.parametrize("shares_cells", [True, False])


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


class Server:
    """An engine with a disk cache, from its start to its end in good order."""

    def __init__(self, folder: Path, key: bytes = KEY, **changes: Any) -> None:
        self.store = DiskCache(str(folder), key)
        self.engine = Engine(store=self.store, **changes)

    def say(self, prepared: PreparedPrompt) -> tuple[str, Finished]:
        return self.engine.say(prepared)

    def stop(self) -> None:
        self.engine.scheduler.store_idle(soon())
        self.store.close(soon())


def filled(folder: Path, count: int = 1, key: bytes = KEY, state: bytes = STATE) -> list[str]:
    """A folder with so many entries, their names in the order in which they came."""
    store = DiskCache(str(folder), key)
    old = {change.name for change in store.changes()}
    for number in range(count):
        assert store.put((number, *TOKENS), state, is_prompt=False, deadline=soon())
    store.close(soon())
    changes = [c.name for c in store.changes() if isinstance(c, Stored) and c.name not in old]
    assert len(changes) == count
    return changes


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ------------------------------------------------------------------------- over restarts


@KINDS
def test_a_conversation_goes_on_after_a_restart(folder: Path, shares_cells: bool) -> None:
    first = Server(folder, shares_cells=shares_cells)
    said, _ = first.say(prompt(HEAD, 5))
    first.stop()
    second = Server(folder, shares_cells=shares_cells)
    more = prompt(HEAD + said + "and then?", 5)
    text, finished = second.say(more)
    assert text == cold(more)
    assert cached(finished) == len(HEAD) + 4
    second.stop()
    assert len(names(folder)) == 1  # the longer conversation has taken the place of the shorter


@KINDS
def test_what_was_given_up_for_others_is_had_back_in_the_same_run(
    folder: Path, shares_cells: bool
) -> None:
    server = Server(folder, slots=1, prefixes=1, shares_cells=shares_cells)
    for letter in "abcd":
        server.say(prompt(letter * 100, 5))
    server.store.close(soon())
    assert cached(server.say(prompt("a" * 100 + "!", 5))[1]) == 100


def test_what_is_to_outlive_the_process_is_saved_however_dear_that_is(folder: Path) -> None:
    server = Server(folder, slots=1, saving_costs=1000.0)
    server.say(prompt(HEAD, 5))
    server.say(prompt("y" * 100, 5))
    assert cached(server.say(prompt(HEAD + "more", 5))[1]) == len(HEAD)
    server.stop()


def test_rows_beyond_those_that_are_kept_are_on_disk(folder: Path) -> None:
    server = Server(folder, slots=3, prefixes=1)
    for letter in "abc":
        assert len(server.engine.say_all([prompt(letter * 100, 5), prompt("z" * 100, 5)])) == 2
    server.store.close(soon())
    assert len(server.engine.scheduler._cache) == 1
    assert cached(server.say(prompt("a" * 100 + "!", 5))[1]) == 100


def test_whole_prompts_survive_as_such(folder: Path) -> None:
    first = Server(folder, slots=1, prefixes=0, prompts=2, window=0)
    first.say(prompt(HEAD, 5))
    first.stop()
    second = Server(folder, slots=1, prefixes=0, prompts=2, window=0)
    longer = prompt(HEAD + "d", 5)
    text, finished = second.say(longer)
    assert (text, cached(finished)) == (cold(longer), len(HEAD))


def test_what_asked_not_to_be_cached_is_never_on_disk(folder: Path) -> None:
    first = Server(folder, prompts=4)
    first.say(attrs.evolve(prompt("private" * 20, 5), cache_prompt=False))
    first.stop()
    assert names(folder) == set()
    first = Server(folder)
    first.say(prompt(HEAD, 5))
    first.stop()
    second = Server(folder)
    plain = attrs.evolve(prompt(HEAD + "more", 5), cache_prompt=False)
    text, finished = second.say(plain)
    assert (text, cached(finished)) == (cold(plain), 0)


def test_short_beginnings_are_not_worth_a_file(folder: Path) -> None:
    server = Server(folder)
    server.say(prompt("x" * 30, 5))
    server.stop()
    assert names(folder) == set()


def test_memory_is_used_before_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(folder)
    server.say(prompt(HEAD, 5))
    server.stop()
    monkeypatch.setattr(server.store, "load", lambda name: pytest.fail("read from disk"))
    assert cached(server.say(prompt(HEAD + "more", 5))[1]) == len(HEAD)


def test_a_long_state_is_not_read_for_a_short_beginning(folder: Path) -> None:
    first = Server(folder, max_ctx=1000)
    first.say(prompt("x" * 80 + "y" * 700, 5))
    first.stop()
    second = Server(folder, max_ctx=1000)
    assert cached(second.say(prompt("x" * 80 + "z" * 20, 5))[1]) == 0
    assert cached(second.say(prompt("x" * 80 + "y" * 300, 5))[1]) == 379


def test_what_a_window_has_forgotten_is_not_used_and_read_once_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Server(folder, window=10)
    first.say(prompt(HEAD, 5))
    first.stop()
    second = Server(folder, window=10)
    reads: list[str] = []
    load = second.store.load
    monkeypatch.setattr(second.store, "load", lambda name: (reads.append(name), load(name))[1])
    for tail in "abc":
        far = prompt(HEAD[:70] + tail * 60, 5)
        text, finished = second.say(far)
        assert (text, cached(finished)) == (cold(far), 0)
    assert len(reads) == 1
    near = prompt(HEAD + "different", 5)
    text, finished = second.say(near)
    assert (text, cached(finished)) == (cold(near), len(HEAD))


def test_a_stored_row_that_the_cells_have_no_room_for_costs_nobody_anything(folder: Path) -> None:
    first = Server(folder, slots=2, pool=400, max_ctx=400)
    first.say(prompt("x" * 300, 5))
    first.stop()
    second = Server(folder, slots=2, pool=120, max_ctx=120)
    short = prompt("x" * 100, 5)
    text, finished = second.say(short)
    assert (text, cached(finished)) == (cold(short), 0)
    assert names(folder) == set()  # no use here, ever


def test_a_worker_that_is_stopped_stores_what_it_has_and_one_whose_engine_died_nothing(
    folder: Path,
) -> None:
    load = scripted_load(prefixes=2, open_store=lambda: DiskCache(str(folder), KEY))
    with running(load) as thread:
        thread.until_ready()
        thread.submit(1, prompt(HEAD, 5))
        thread.until_retired(1)
        thread.worker.stop()
        thread.join()
    (name,) = names(folder)
    died = scripted_load(
        slots=2,
        prefixes=2,
        open_store=lambda: DiskCache(str(folder), KEY),
        before_decode=Lost(9),
    )
    with running(died) as thread:
        thread.until_ready()
        thread.submit(1, prompt(HEAD + "more", 4))
        thread.until_retired(1)
        assert thread.stories[1].finished.usage.cached_tokens == len(HEAD)
        thread.submit(2, prompt("y" * 200, 50, ignore_eos=True))
        thread.join()
    assert names(folder) == {name}


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(worker, "_STORE_BOUND", 0.2)
    load = scripted_load(slots=3, prefixes=3, open_store=lambda: DiskCache(str(folder), KEY))
    with running(load) as thread:
        thread.until_ready()
        for number in (1, 2, 3):
            thread.submit(number, prompt(str(number) * 100, 5))
        thread.until_retired(1, 2, 3)
        begun = time.monotonic()
        thread.worker.stop()
        thread.join()
        assert time.monotonic() - begun < PATIENCE / 2
    held.gate.set()


@settings(max_examples=40, deadline=None)
@given(
    turns,
    st.lists(st.booleans(), min_size=14, max_size=14),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 40)),
    st.randoms(use_true_random=False),
)
def test_answers_are_the_cold_ones_whenever_the_server_was_restarted(
    said: list[tuple[int, int, int, int | None, bool]],
    restarts: list[bool],
    slots: int,
    prefixes: int,
    prompts: int,
    shares_cells: bool,
    window: int | None,
    dice: random.Random,
) -> None:
    changes = {
        "slots": slots,
        "prefixes": prefixes,
        "prompts": prompts,
        "shares_cells": shares_cells,
        "window": window,
        "pool": None if not shares_cells else max(400, slots * 250),
    }
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), **changes)
        conversations = {who: [97 + who % 2] * 70 for who in range(4)}
        for (who, new, answer, leaves, wants), restart in zip(said, restarts, strict=False):
            if restart:
                server.stop()
                server = Server(Path(folder), **changes)
            tokens = [*conversations[who], *(97 + dice.randrange(3) for _ in range(new))][-250:]
            prepared = attrs.evolve(prompt(tokens, answer, ignore_eos=True), cache_prompt=wants)
            ((text, finished),) = server.engine.say_all([prepared], cancel_after=leaves)
            assert cold(prepared).startswith(text)
            assert finished.reason == "cancelled" or text == cold(prepared)
            conversations[who] = [*tokens, *text.encode()]
        server.stop()


# ----------------------------------------------------------------- damaged, foreign, gone


def test_a_flipped_bit_anywhere_in_a_file_is_found_before_anybody_sees_it(folder: Path) -> None:
    (name,) = filled(folder, state=b"state" * 20)
    path = folder / name
    good = path.read_bytes()
    known = DiskCache(str(folder), KEY)  # has read the index while it was good
    entry = known._index[name]
    for at in range(len(good)):
        for bit in (0, at % 7 + 1):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            known._index[name] = entry
            assert known.load(name) is None
            path.write_bytes(bad)
            fresh = DiskCache(str(folder), KEY)
            assert all(fresh.load(change.name) is None for change in fresh.changes())
            assert not path.exists()
    path.write_bytes(good)
    assert DiskCache(str(folder), KEY).load(name) == b"state" * 20


@pytest.mark.parametrize("cut", [0, 1, 30, 57, 300, -33, -32, -1])
def test_a_file_that_is_cut_short_is_dropped(
    folder: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = filled(folder)
    known = DiskCache(str(folder), KEY)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:cut])
    assert DiskCache(str(folder), KEY).changes() == []
    assert names(folder) == set()
    (folder / name).write_bytes(content[:cut])
    assert known.load(name) is None
    assert names(folder) == set()
    assert len(lines(caplog)) == 2


def test_a_file_that_has_grown_is_not_read_beyond_its_size(folder: Path) -> None:
    (name,) = filled(folder)
    known = DiskCache(str(folder), KEY)
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    assert known.load(name) is None


def test_a_file_of_other_tokens_under_the_same_name_is_dropped(folder: Path) -> None:
    first, second = filled(folder, 2)
    known = DiskCache(str(folder), KEY)
    os.replace(folder / second, folder / first)
    assert known.load(first) is None
    os.link(folder / filled(folder, 1)[0], folder / second)
    assert second not in {c.name for c in DiskCache(str(folder), KEY).changes()}


def test_what_a_prompt_meets_damaged_is_computed_instead(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Server(folder)
    first.say(prompt(HEAD, 5))
    first.stop()
    (name,) = names(folder)
    content = bytearray((folder / name).read_bytes())
    content[-100] ^= 1
    (folder / name).write_bytes(content)
    second = Server(folder)
    more = prompt(HEAD + "more", 5)
    text, finished = second.say(more)
    assert (text, cached(finished)) == (cold(more), 0)
    assert len(lines(caplog)) == 1
    assert names(folder) == set()


def test_an_entry_of_another_key_is_never_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Server(folder)
    first.say(prompt(HEAD, 5))
    first.stop()
    monkeypatch.setattr(disk_cache, "open_entry", lambda path: pytest.fail("opened"))
    second = Server(folder, OTHER_KEY)
    assert cached(second.say(prompt(HEAD, 5))[1]) == 0
    assert len(names(folder)) == 1


def test_the_name_of_a_key_does_not_stand_for_the_key(folder: Path) -> None:
    (name,) = filled(folder)
    with open_entry(str(folder / name)) as file, pytest.raises(BadEntry, match="not of this"):
        read_head(file, KEY[:31] + b"x")
    alike = KEY[:31] + b"x"  # names begin as with the other key
    assert DiskCache(str(folder), alike).changes() == []


@pytest.mark.parametrize("vanishes_before", ["index", "load"])
def test_a_file_that_vanishes_is_no_more_than_not_there(
    folder: Path, vanishes_before: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Server(folder)
    first.say(prompt(HEAD, 5))
    first.stop()
    second = Server(folder) if vanishes_before == "load" else None
    for name in names(folder):
        (folder / name).unlink()
    second = second or Server(folder)
    assert cached(second.say(prompt(HEAD, 5))[1]) == 0
    second.stop()
    assert len(names(folder)) == 1
    assert lines(caplog) == []


def test_links_and_pipes_with_an_entrys_name_are_never_followed(folder: Path) -> None:
    (name,) = filled(folder)
    known = DiskCache(str(folder), KEY)
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(folder / "elsewhere")
    assert DiskCache(str(folder), KEY).changes() == []
    assert known.load(name) is None
    assert (folder / "elsewhere").exists()
    os.mkfifo(folder / name)
    assert DiskCache(str(folder), KEY).changes() == []


def test_an_unreadable_file_costs_a_line_and_the_entry(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = filled(folder)
    store = DiskCache(str(folder), KEY)

    def refuse(path: str) -> BinaryIO:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(disk_cache, "open_entry", refuse)
    assert store.load(name) is None
    assert store.load(name) is None
    assert store.changes()[-1] == Gone(name)
    (line,) = lines(caplog)
    assert "Permission denied" in line


WANTS = [
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENFILE, "Too many open files in system"),
    MemoryError(),
]


@pytest.mark.parametrize("error", WANTS, ids=["descriptors", "files", "memory"])
@pytest.mark.parametrize("read", ["index", "load"])
def test_what_this_process_lacks_costs_no_file(
    folder: Path,
    error: Exception,
    read: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name,) = filled(folder)
    store = DiskCache(str(folder), KEY)

    def refuse(path: str) -> BinaryIO:
        raise error

    monkeypatch.setattr(disk_cache, "open_entry", refuse)
    if read == "load":
        assert store.load(name) is None
        assert store.changes()[-1] == Gone(name)
    elif not isinstance(error, MemoryError):
        assert DiskCache(str(folder), KEY).changes() == []
    monkeypatch.undo()
    assert names(folder) == {name}
    assert DiskCache(str(folder), KEY).load(name) == STATE
    assert all("cannot read" in line for line in lines(caplog))


def test_a_state_that_was_read_counts_although_its_time_cannot_be_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = filled(folder)
    store = DiskCache(str(folder), KEY)

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(disk_cache.os, "utime", refuse)
    assert store.load(name) == STATE
    assert names(folder) == {name}


# --------------------------------------------------------------------------------- writing


def test_a_folder_that_was_taken_away_is_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskCache(str(folder), KEY)
    folder.rmdir()
    assert store.put(TOKENS, STATE, is_prompt=False, deadline=soon())
    store.close(soon())
    assert store.entries == len(names(folder)) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert lines(caplog) == []


def test_a_full_disk_costs_one_line_and_leaves_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskCache(str(folder), KEY)
    write_entry = disk_entry.write_entry

    def full(file: BinaryIO, *arguments: Any) -> bool:
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    def idle() -> bool:
        with store._lock:  # in between, an entry is neither in the queue nor being written
            return not store._queue and store._writing is None

    monkeypatch.setattr(disk_cache, "write_entry", full)
    for number in range(3):
        store.put((number, *TOKENS), STATE, is_prompt=False)
        wait_until(idle)
    assert names(folder) == set()
    (line,) = lines(caplog)
    assert "No space left" in line
    monkeypatch.setattr(disk_cache, "write_entry", write_entry)
    store.put((7, *TOKENS), STATE, is_prompt=False)
    store.close(soon())
    assert store.entries == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Held:
    """Holds the writer at its first piece until let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()
        write_entry = disk_entry.write_entry

        def held(*arguments: Any) -> bool:
            self.reached.set()
            self.gate.wait(PATIENCE)
            return write_entry(*arguments)

        monkeypatch.setattr(disk_cache, "write_entry", held)


@pytest.mark.parametrize(
    ("bound", "at"), [("MOST_QUEUED_BYTES", 3 * len(STATE)), ("MOST_QUEUED", 3)]
)
def test_a_slow_disk_makes_nobody_wait_and_what_is_too_much_is_not_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str, at: int
) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(disk_cache, bound, at)
    store = DiskCache(str(folder), KEY)
    taken = [store.put((0, *TOKENS), STATE, is_prompt=False)]
    assert held.reached.wait(PATIENCE)
    begun = time.monotonic()
    taken += [store.put((n, *TOKENS), STATE, is_prompt=False) for n in range(1, 6)]
    assert time.monotonic() - begun < PATIENCE / 2
    assert taken == [True] * 4 + [False] * 2
    assert store.knows((1, *TOKENS), is_prompt=False)
    assert not store.knows((5, *TOKENS), is_prompt=False)
    held.gate.set()
    assert store.put((6, *TOKENS), STATE, is_prompt=False, deadline=soon())
    store.close(soon())
    assert store.entries == len(names(folder)) == 5


def test_the_end_takes_no_longer_than_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(monkeypatch)
    store = DiskCache(str(folder), KEY)
    for number in range(3):
        store.put((number, *TOKENS), STATE, is_prompt=False)
    assert held.reached.wait(PATIENCE)
    begun = time.monotonic()
    store.close(soon(0.1))
    assert time.monotonic() - begun < PATIENCE / 2
    held.gate.set()
    assert store._writer is not None
    store._writer.join(PATIENCE)
    assert names(folder) == set()
    assert any("2 entries unwritten" in line for line in lines(caplog))
    assert not store.put((9, *TOKENS), STATE, is_prompt=False)


def test_the_same_entry_is_written_once(folder: Path) -> None:
    (name,) = filled(folder)
    before = (folder / name).stat().st_ino
    store = DiskCache(str(folder), KEY)
    assert store.knows((0, *TOKENS), is_prompt=False)
    assert store.put((0, *TOKENS), STATE, is_prompt=False)
    store.close(soon())
    assert (folder / name).stat().st_ino == before


def test_a_conversation_takes_the_place_of_its_beginning_until_that_is_short(folder: Path) -> None:
    store = DiskCache(str(folder), KEY)
    for length in (100, 150, 601, 700):
        store.put((7,) * length, STATE, is_prompt=False, deadline=soon())
    store.put((8, *(7,) * 50), STATE, is_prompt=False, deadline=soon())
    store.close(soon())
    assert {len(e.tokens) for e in store._index.values()} == {51, 150, 700}


def test_a_whole_prompt_stays_beside_what_begins_with_it(folder: Path) -> None:
    store = DiskCache(str(folder), KEY)
    store.put(TOKENS, STATE, is_prompt=True, deadline=soon())
    store.put(TOKENS, STATE, is_prompt=False, deadline=soon())
    store.put((*TOKENS, 1), STATE, is_prompt=False, deadline=soon())
    store.put((*TOKENS, 1, 2), STATE, is_prompt=True, deadline=soon())
    store.close(soon())
    kept = {len(entry.tokens): entry.is_prompt for entry in store._index.values()}
    assert kept == {100: True, 101: False, 102: True}


# ---------------------------------------------------------------------------------- bounds


def use_at(folder: Path, name: str, seconds: float) -> None:
    os.utime(folder / name, (seconds, seconds))


def test_the_folder_is_bounded_in_entries_and_what_was_used_last_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = filled(folder, 3)
    for second, name in enumerate((a, b, c)):
        use_at(folder, name, 1000 + second)
    store = DiskCache(str(folder), KEY)
    assert store.load(a) == STATE
    monkeypatch.setattr(disk_cache, "MOST_ENTRIES", 3)
    store.put((77, *TOKENS), STATE, is_prompt=False)
    store.close(soon())
    assert names(folder) - {a, c} == set(store._index) - {a, c}
    assert b not in names(folder)
    assert Gone(b) in store.changes()
    assert store.entries == 3
    assert store.size_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_the_folder_is_bounded_in_bytes_over_all_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (foreign,) = filled(folder, key=OTHER_KEY)
    use_at(folder, foreign, 1000)
    (folder / "notes.txt").write_bytes(b"of somebody else" * 10000)
    size = (folder / foreign).stat().st_size
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 2 * size + 10)
    filled(folder, 2)
    assert foreign not in names(folder)
    assert len(names(folder)) == 3
    store = DiskCache(str(folder), KEY)
    assert not store.put(TOKENS, bytes(3 * size), is_prompt=False)  # larger than all


def test_what_others_left_unfinished_goes_after_a_while(folder: Path) -> None:
    filled(folder)
    fresh, old = folder / "a.unfinished", folder / "b.unfinished"
    for path in (fresh, old):
        path.write_bytes(b"half")
    use_at(folder, old.name, time.time() - 7200)
    DiskCache(str(folder), KEY)
    assert fresh.exists()
    assert not old.exists()


# ---------------------------------------------------------------------------------- rights


def test_folder_and_files_are_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        (name,) = filled(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702, 0o777])
def test_a_folder_open_to_others_is_refused_and_left_as_it_is(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    for use in (check_folder, lambda path: DiskCache(path, KEY)):
        with pytest.raises(FolderError, match="open to others"):
            use(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FolderError, match="is not a folder"):
        check_folder(str(file))
    for path in (file / "below", tmp_path / "none" / "below"):
        with pytest.raises(FolderError):
            check_folder(str(path))
    with pytest.raises(FolderError):
        DiskCache(str(tmp_path / "none" / "below"), KEY)
    with pytest.raises(FolderError):
        check_folder("a\0b")


def test_a_link_to_nothing_is_refused_by_what_it_names(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for use in (check_folder, make_folder):
        with pytest.raises(FolderError, match=r"link to .*nowhere, which is not there"):
            use(str(link))
    (tmp_path / "nowhere").mkdir(0o700)
    check_folder(str(link))


def test_the_check_makes_nothing(folder: Path) -> None:
    check_folder(str(folder))
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(FolderError, match="another user"):
        check_folder(str(folder))


# ------------------------------------------------------------------------------ the key


def test_the_key_changes_with_the_model_and_with_every_fact(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(5 << 20))
    os.utime(path, (1000, 1000))
    keys = [state_key([str(path)], ["a", "b"])]
    moved = path.rename(tmp_path / "moved.gguf")
    assert state_key([str(moved)], ["a", "b"]) == keys[0]
    keys += [state_key([str(moved)], facts) for facts in (["a"], ["ab"], ["a", "c"], ["b", "a"])]
    keys.append(state_key([str(moved)] * 2, ["a", "b"]))
    for at in (10, (5 << 20) - 10):
        content = bytearray(b"GGUF" + bytes(5 << 20))
        content[at] = 1
        moved.write_bytes(content)
        os.utime(moved, (1000, 1000))
        keys.append(state_key([str(moved)], ["a", "b"]))
    os.utime(moved, (1000, 1001))
    keys.append(state_key([str(moved)], ["a", "b"]))
    assert len(set(keys)) == len(keys)


# ------------------------------------------------------------------------ several at once

_STRESS = """
import sys, time, random
from dflash_trio.engine import disk_cache
from dflash_trio.engine.disk_cache import DiskCache
from dflash_trio.engine.prefix_store import Stored
folder, seed = sys.argv[1], int(sys.argv[2])
disk_cache.MOST_ENTRIES = 5
dice, known, reads = random.Random(seed), set(), 0
for _ in range(6):
    store = DiskCache(folder, b"k" * 32)
    for _ in range(30):
        head = dice.randrange(12)
        tokens = (head,) * 70
        store.put(tokens, bytes([head]) * 3000, is_prompt=False, deadline=time.monotonic() + 100)
        for change in store.changes():
            if isinstance(change, Stored):
                known.add((change.name, change.tokens))
        name, tokens = dice.choice(sorted(known)) if known else ("", ())
        state = store.load(name)
        if state is not None:
            assert state == bytes([tokens[0]]) * 3000
            reads += 1
    store.close(time.monotonic() + 100)
assert reads
"""


def test_processes_that_share_a_folder_only_ever_read_what_is_whole(folder: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _STRESS, str(folder), str(seed)], stderr=subprocess.PIPE
        )
        for seed in (1, 2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error.decode()
        assert b"drops" not in error
    assert len(names(folder)) <= 6  # each may be one ahead of the other's count
    assert not any(name.endswith(".unfinished") for name in names(folder))


def test_two_blocks_share_a_folder(folder: Path) -> None:
    one, two = Server(folder), Server(folder, OTHER_KEY)
    one.say(prompt(HEAD, 5))
    two.say(prompt(HEAD, 5))
    one.stop()
    two.stop()
    assert len(names(folder)) == 2
    assert DiskCache(str(folder), KEY).entries == 1


# --------------------------------------------------------------------------- a real model


@pytest.mark.real
def test_a_real_model_says_the_same_from_what_a_restart_left(smollm2: Path, folder: Path) -> None:
    def run(store_in: Path | None) -> tuple[str, int]:
        runner = load_llama(smollm2, slots=1, max_ctx=384, keeps_prefixes=True)
        try:
            key = state_key([str(smollm2)], runner.state_facts)
            store = DiskCache(str(store_in), key) if store_in is not None else None
            ledger = KVLedger(slots=1, pool=384, max_ctx=384, decode_headroom=8)
            scheduler = Scheduler(runner, ledger, chunk=96, prefixes=2, store=store)
            tokens = runner.vocabulary.tokenize(f"{NIGHT}\n" * 12)
            prepared = prompt(tokens, 32)
            scheduler.add(Sequence(1, prepared, reserve(ledger, prepared)))
            while not scheduler.idle:
                scheduler.step()
            story = stories(scheduler.take_events())[1]
            if store is not None:
                scheduler.store_idle(soon())
                store.close(soon())
            return story.text, cached(story.finished)
        finally:
            runner.close()

    without, _ = run(None)
    first, computed = run(folder)
    again, reused = run(folder)
    assert computed == 0
    assert reused > 64
    assert first == again == without


@pytest.mark.real
def test_another_configuration_of_a_real_model_has_another_key(smollm2: Path) -> None:
    keys = set()
    changes: list[dict[str, Any]] = [
        {},
        {"cache_type_k": "f16"},
        {"cache_type_v": "f16"},
        {"flash_attn": "auto"},
        {"rope_freq_base": 20000.0},
        {"rope_freq_scale": 0.5},
        {"keeps_prefixes": True},
        {"max_ctx": 512},
        {"slots": 2},
        {"overrides": {"llama.expert_used_count": 1}},
        {"overrides": {"llama.expert_used_count": 2}},
    ]
    for change in changes:
        runner = load_llama(smollm2, **change)
        keys.add(state_key([str(smollm2)], runner.state_facts))
        runner.close()
    assert len(keys) == len(changes)


def test_the_cache_of_an_engine_without_a_store_is_as_it_was() -> None:
    cache = PrefixCache(ScriptedRunner(), slots=1, prefixes=1, prompts=0)
    cache.store_idle(soon())
    assert len(cache) == 0
