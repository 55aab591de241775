"""The log: a line for each request and each event, whatever is in it, and never anybody's harm."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dflash_trio import console
from dflash_trio.log_setup import printable, set_up_logging
from tests.support.http_client import PATIENCE, request
from tests.support.running import CHAT, running
from tests.support.scripted import BreaksDown, answer, endless_load, scripted_config, scripted_load

FORGED = "x\r\n12:00:00 ERROR   forged\x1b[2J\x9b\x7f\u2028\u202e\ud800"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dflash_trio")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


async def lines_of(capfd: Any, count: int) -> list[dict[str, Any]]:
    """The first ``count`` request lines of a JSON log, which come after the answers."""
    found: list[dict[str, Any]] = []
    with trio.fail_after(PATIENCE):
        while True:
            entries = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
            found += [entry for entry in entries if entry["message"] == "request"]
            if len(found) >= count:
                return found
            await trio.sleep(0.005)


async def test_each_request_has_one_line_that_says_what_became_of_it(capfd: Any) -> None:
    set_up_logging("json", "info")
    load = scripted_load(script=answer("four"), prefixes=2)
    async with running((scripted_config("m"), load)) as server:
        for _ in range(2):
            await request(
                server.port,
                "POST",
                CHAT,
                {"messages": [{"role": "user", "content": "secret words"}]},
                **{"x-request-id": "mine"},
            )
        await request(server.port, "GET", "/secret-path")
        first, second, third = await lines_of(capfd, 3)
    assert first.pop("time").endswith("Z")
    assert 0 < first.pop("ttft_s") <= first.pop("total_s")
    assert first == {
        "level": "info",
        "logger": "dflash_trio.requests",
        "message": "request",
        "request_id": "mine",
        "trace_id": None,
        "method": "POST",
        "route": CHAT,
        "model": "m",
        "outcome": "completed",
        "status": 200,
        "queue_s": 0.0,
        "prompt_tokens": 15,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "finish_reason": "stop",
        "ended_by": None,
        "fallback": None,
    }
    assert second["cached_tokens"] > 0
    assert (third["route"], third["status"], third["outcome"]) == ("other", 404, "refused")
    assert "secret" not in json.dumps([first, second, third])


async def test_a_cancelled_requests_line_has_the_tokens_that_were_made_for_it(capfd: Any) -> None:
    set_up_logging("json", "info")
    async with running((scripted_config("m"), endless_load())) as server:
        async with server.streaming():
            pass
        (line,) = await lines_of(capfd, 1)
    assert (line["outcome"], line["finish_reason"], line["status"]) == ("cancelled",) * 2 + (200,)
    assert line["completion_tokens"] > 0


async def test_a_failed_requests_line_does_not_say_that_nothing_was_made_for_it(capfd: Any) -> None:
    set_up_logging("json", "info")
    breaks = BreaksDown()
    async with running((scripted_config("m"), scripted_load(before_decode=breaks))) as server:
        async with server.streaming() as exchange:
            breaks.gate.open()
            await exchange.read_rest()
        (line,) = await lines_of(capfd, 1)
    assert (line["outcome"], line["completion_tokens"]) == ("failed", None)


@pytest.mark.parametrize("style", ["console", "json"])
def test_nothing_that_a_client_writes_ends_a_line_or_commands_a_terminal(
    style: Any, capfd: Any
) -> None:
    set_up_logging(style, "info")
    log = logging.getLogger("dflash_trio.test")
    log.info("path %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed on %s", FORGED)
    written = capfd.readouterr().err
    assert not re.search(r"[^\x20-\x7e\n]", written)
    lines = written.splitlines()
    if style == "json":
        first, second = map(json.loads, lines)
        assert first["message"] == f"path {FORGED}"
        assert FORGED in second["traceback"]
    else:
        # What is no entry of its own stands behind a bar.
        entries = [line for line in lines if not line.startswith("    | ")]
        assert len(entries) == 2
        assert entries[0].endswith(r"x\r\n12:00:00 ERROR   forged\x1b[2J\x9b\x7f\u2028\u202e\ud800")


def test_what_can_be_read_stays_as_it_is() -> None:
    assert printable("größer, 模型 …") == "größer, 模型 …"
    assert printable("a\tb\\") == "a\\tb\\"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "1>&- 2>&-", "2> >(exec true)"])
@pytest.mark.parametrize("style", ["console", "json"])
def test_a_stream_that_is_gone_or_full_harms_nobody(style: str, redirection: str) -> None:
    """Nor does it change the exit code, which a buffer left behind would."""
    code = f"""
import logging, os
from dflash_trio.console import complain, occupy_standard_streams, say
from dflash_trio.log_setup import set_up_logging
occupy_standard_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2
set_up_logging({style!r}, "info")
for _ in range(1000):
    logging.getLogger("dflash_trio.test").info("line")
complain("words"); say("words")
"""
    command = ["bash", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=False).returncode == 0


def test_a_stream_that_was_full_for_a_while_gets_what_is_said_afterwards(tmp_path: Path) -> None:
    """And nothing of before, and no descriptor is left open by a write that fails."""
    with open("/dev/full", "w", encoding="utf-8") as stream:
        open_before = len(os.listdir("/dev/fd"))
        console.write(stream, "lost")
        assert len(os.listdir("/dev/fd")) == open_before
        with (tmp_path / "log").open("wb") as log:
            os.dup2(log.fileno(), stream.fileno())
        console.write(stream, "seen")
    assert (tmp_path / "log").read_text() == "seen"


def test_a_terminal_that_takes_nothing_for_a_moment_is_not_given_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb", buffering=0) as reader, open(writing, "w", encoding="utf-8") as stream:
        console.write(stream, "x" * 2_000_000)
        assert len(reader.read(2_000_000)) < 2_000_000
        console.write(stream, "seen")
        assert reader.read(100) == b"seen"


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_locale_without_letters_gets_them_escaped(style: str) -> None:
    code = f"""
import logging
from dflash_trio.console import complain, say
from dflash_trio.log_setup import set_up_logging
set_up_logging({style!r}, "info")
logging.getLogger("dflash_trio.test").info("gr\\xf6\\xdfer")
say("gr\\xf6\\xdfer\\n"); complain("gr\\xf6\\xdfer\\n")
"""
    ascii_only = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ascii_only, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == b"gr\\xf6\\xdfer\n"
    logged, complained = done.stderr.splitlines()
    assert logged.isascii()
    assert b"gr\\" in logged
    assert complained == b"gr\\xf6\\xdfer"
