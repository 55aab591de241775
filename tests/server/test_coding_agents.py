"""Codex CLI and Claude Code each complete a turn. Opt-in: the programs are not Python packages.

``DFLASH_CODEX`` and ``DFLASH_CLAUDE`` name the programs. Each prefills thousands of tokens on the
CPU, which takes a minute or more.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.support.running import ServerProcess, server_process

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SECONDS = 900

pytestmark = [pytest.mark.real, pytest.mark.timeout(SECONDS + 120)]


def program(variable: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"needs the program that {variable} names")
    return path


@pytest.fixture(scope="module")
def server(gemma: Path) -> Iterator[ServerProcess]:
    arguments = [
        *(str(gemma), "--port", "0", "--model-name", "gemma"),
        *("--max-ctx", "32768", "--temperature", "0"),
        *("--default-max-tokens", "256"),
        *("--chat-template-file", str(EXAMPLES / "plain-turns.jinja")),
        *("--model-card", str(EXAMPLES / "plain-turns.card.toml")),
    ]
    with server_process(arguments) as running:
        trio.run(running.until_ready)
        yield running
        assert "ERROR" not in running.log
        assert "Traceback" not in running.log


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_codex_completes_a_turn_without_an_error(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    codex = program("DFLASH_CODEX")
    server: ServerProcess = request.getfixturevalue("server")
    (tmp_path / "config.toml").write_text(
        'model = "gemma"\nmodel_provider = "local"\nmodel_context_window = 32768\n'
        '[model_providers.local]\nname = "local"\nwire_api = "responses"\nenv_key = "KEY"\n'
        f'base_url = "http://127.0.0.1:{server.port}/v1"\n'
    )
    ended = run(
        [codex, "exec", "--skip-git-repo-check", "Say hello"],
        tmp_path,
        KEY="none",
        CODEX_HOME=str(tmp_path),
        RUST_LOG="error",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "Hello!"
    assert "ERROR" not in ended.stderr


def test_claude_code_completes_a_turn_without_an_error(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    claude = program("DFLASH_CLAUDE")
    server: ServerProcess = request.getfixturevalue("server")
    ended = run(
        [claude, "-p", "Say hello", "--output-format", "json"],
        tmp_path,
        ANTHROPIC_BASE_URL=f"http://127.0.0.1:{server.port}",
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="gemma",
        ANTHROPIC_SMALL_FAST_MODEL="gemma",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["is_error"], result["stop_reason"]) == (False, "end_turn")
    assert result["result"].strip() == "Hello!"
