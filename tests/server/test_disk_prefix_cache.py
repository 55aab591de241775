"""``--disk-prefix-cache``: what a server computed is there for the next one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.server.test_startup import launch, refused
from tests.support.http_client import PATIENCE, request
from tests.support.running import ServerProcess, chat_body, server_process

pytestmark = pytest.mark.real

EXACT = ("--cache-type-k=q8_0", "--cache-type-v=q8_0", "--flash-attn=on", "--target-device=cpu:0")
ALONE = "--threads=1"
"""Threads that wait for each other take ages when something else has one's core."""
QUESTION = (
    "Tell me about the old clock tower, the sleeping city and the long history of the sea. " * 6
)


async def ask(server: ServerProcess, question: str, **fields: Any) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were cached."""
    body = chat_body(question, temperature=0, max_tokens=12, **fields)
    answer = await request(server.port, "POST", "/v1/chat/completions", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    said = json.loads(answer.body)
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["message"]["content"], cached


async def kept(server: ServerProcess) -> dict[str, int]:
    status = await server.status()
    found: dict[str, int] = status["models"][0]["prefix_cache"]
    return found


def stored(folder: Path) -> list[Path]:
    """What is whole. What is being written has another name."""
    return list(folder.glob("*.kv"))


async def until_stored(server: ServerProcess, folder: Path) -> None:
    """Wait until something is on the disk, and until the server says so."""
    with trio.fail_after(PATIENCE):
        # It is a thread of another process that writes: nobody sets an event.
        while not stored(folder):  # noqa: ASYNC110
            await trio.sleep(0.005)
        # What is told is of the last step, and no step comes by itself.
        while not (await kept(server))["disk_bytes"]:
            await ask(server, "Go on.", cache_prompt=False)


@pytest.mark.parametrize("policy", ["drain", "finalize"])
async def test_the_next_server_goes_on_where_the_last_one_was(
    smollm2: Path, tmp_path: Path, policy: str
) -> None:
    folder = tmp_path / "kept"
    arguments = [
        *(str(smollm2), "--port=0", "--max-ctx=1024", ALONE, *EXACT),
        *(f"--disk-prefix-cache={folder}", f"--on-sigterm={policy}"),
    ]
    with server_process(arguments) as server:
        await server.until_ready()
        first, cached = await ask(server, QUESTION)
        assert cached == 0
        await ask(server, f"Keep this secret. {QUESTION}", cache_prompt=False)
        await until_stored(server, folder)  # who asked for no cache made room
        server.signal()
        assert await server.exit_code() == 0
        assert "Traceback" not in server.log
    assert len(list(folder.iterdir())) == 1
    with server_process(arguments) as server:
        await server.until_ready()
        again, cached = await ask(server, QUESTION)
        assert (again, cached > 100) == (first, True)
        found = await kept(server)
        assert found["disk_entries"] == 1
        assert found["disk_bytes"] == next(folder.iterdir()).stat().st_size
        server.signal()
        assert await server.exit_code() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_folder_that_cannot_be_used_is_refused_before_anything_loads(
    smollm2: Path, tmp_path: Path, check: tuple[str, ...]
) -> None:
    file, open_to_all = tmp_path / "file", tmp_path / "open"
    file.touch()
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o755)
    for path, says in (
        (file, "is not a folder"),
        (open_to_all, "open to others"),
        (tmp_path / "none" / "below", "cannot be made"),
    ):
        line = refused(launch(str(smollm2), f"--disk-prefix-cache={path}", *check))
        assert f"--disk-prefix-cache {path}" in line
        assert says in line


def test_a_folder_that_would_stay_empty_is_refused(smollm2: Path, tmp_path: Path) -> None:
    line = refused(
        launch(str(smollm2), f"--disk-prefix-cache={tmp_path / 'a'}", "--prefix-cache-slots=0")
    )
    assert "--prefix-cache-slots" in line


def test_the_check_makes_no_folder(smollm2: Path, tmp_path: Path) -> None:
    result = launch(str(smollm2), f"--disk-prefix-cache={tmp_path / 'a'}", "--check")
    assert result.returncode == 0
    assert not (tmp_path / "a").exists()
