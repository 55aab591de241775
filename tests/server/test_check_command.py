"""``--check`` and the banner of a start, as processes: a check binds nothing, and a terminal that
is gone or knows ASCII only changes nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.written_models import write_model
from tests.support.running import server_process


def check(
    *arguments: str, redirection: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = shlex.join([sys.executable, "-m", "dflash_trio", *arguments, "--check"])
    return subprocess.run(
        ["sh", "-c", f"exec {command} {redirection}"],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model.gguf"))


def test_a_port_that_is_taken_is_none_of_the_checks_business(model: str) -> None:
    """The running server has it, when its next configuration is checked."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = check(model, f"--port={port}")
    assert (result.returncode, result.stderr) == (0, b"")
    assert f"http://127.0.0.1:{port} (whether it is free was not checked)" in result.stdout.decode()


def test_a_socket_file_is_neither_made_nor_removed(model: str, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    assert check(model, f"--host=unix:{path}").returncode == 0
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert check(model, f"--host=unix:{path}").returncode == 0
    assert path.exists()


def test_what_only_binding_can_tell_refuses_a_start_and_no_check(
    model: str, tmp_path: Path
) -> None:
    """systemd makes a ``RuntimeDirectory`` at the start, so a check must not want it."""
    host = f"unix:{tmp_path / 'missing' / 's.sock'}"
    result = check(model, f"--host={host}")
    assert (result.returncode, result.stderr) == (0, b"")
    command = [sys.executable, "-m", "dflash_trio", model, f"--host={host}"]
    start = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert start.returncode == 2
    assert f"cannot listen on {host}: no such directory" in start.stderr.decode()


def test_a_configuration_file_is_checked_alike(model: str, tmp_path: Path) -> None:
    file = tmp_path / "launch.toml"
    file.write_text(f'[[model]]\nmodel = "{model}"\nmodel-name = "from-file"\n')
    result = check("--config", str(file), "--log-format=json")
    document = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (0, b"")
    assert [each["name"] for each in document["models"]] == ["from-file"]


def test_a_refusal_is_the_same_line_for_people_and_machines(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    plain, machine = check(missing), check(missing, "--log-format=json")
    assert (plain.returncode, plain.stdout) == (machine.returncode, machine.stdout) == (2, b"")
    assert plain.stderr == machine.stderr
    assert plain.stderr.decode().startswith("dflash-server: error: model block 1 (missing): ")
    assert plain.stderr.count(b"\n") == 1


@pytest.mark.parametrize("checks", [("--check",), ()])
def test_no_draft_for_a_model_that_cannot_take_tokens_back_before_anything_loads(
    tmp_path: Path, checks: tuple[str, ...]
) -> None:
    hybrid = str(write_model(tmp_path / "hybrid.gguf", "qwen35"))
    command = [sys.executable, "-m", "dflash_trio", hybrid, "--draft=prompt-lookup", "--port=0"]
    result = subprocess.run([*command, *checks], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == (
        f"dflash-server: error: model block 1 (hybrid): {hybrid} (qwen35) keeps a recurrent state "
        "and cannot take tokens back, as drafts want it: leave --draft prompt-lookup out\n"
    )


def test_guesses_that_are_never_made_are_warned_of_for_people_and_machines(model: str) -> None:
    words = (model, "--draft=prompt-lookup", "--draft-max=200", "--target-device=cpu:0")
    line = "--draft-max 200: at most 62 tokens are guessed at a time here"
    plain, machine = check(*words), check(*words, "--log-format=json")
    assert plain.returncode == machine.returncode == 0
    assert line in plain.stdout.decode()
    (warning,) = json.loads(machine.stdout)["warnings"]
    assert line in warning


@pytest.mark.real
async def test_guesses_that_are_never_made_are_warned_of_once_at_a_start(smollm2: Path) -> None:
    arguments = [str(smollm2), "--port=0", "--max-ctx=512", "--target-device=cpu:0"]
    arguments += ["--draft=prompt-lookup", "--draft-max=200"]
    with server_process(arguments) as server:
        await server.until_ready()
        server.signal()
        assert await server.exit_code() == 0
    assert server.log.count("--draft-max 200: at most 62 tokens are guessed at a time here") == 1


@pytest.mark.parametrize(
    ("redirection", "style"),
    [(">&-", "json"), (">/dev/full", "console"), ("2>&-", "json"), (">&- 2>&-", "console")],
)
def test_a_terminal_that_is_gone_changes_no_verdict(
    model: str, redirection: str, style: str
) -> None:
    result = check(model, f"--log-format={style}", redirection=redirection)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr


def test_a_locale_that_cannot_spell_a_name_gets_it_escaped(model: str) -> None:
    result = check(model, "--model-name", "größe", env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"1. gr\\xf6\\xdfe (primary)" in result.stdout


@pytest.mark.real
async def test_a_start_says_what_it_comes_to_and_when_it_is_ready(
    smollm2: Path, tmp_path: Path
) -> None:
    link = tmp_path / "größe.gguf"
    link.symlink_to(smollm2)
    arguments = [str(link), "--port=0", "--max-ctx=512", "--kv-pool-tokens=400"]
    arguments += ["--target-device=cpu:0"]
    with server_process(arguments, env={"PYTHONIOENCODING": "ascii"}) as server:
        await server.until_ready()
        server.signal()
        assert await server.exit_code() == 0
    lines = [re.sub(r"^\S+ ", "", line) for line in server.log.splitlines()]
    # What is on the way to being ready comes in this order, each once.
    wanted = [
        r"INFO    dflash-server \S+: one model",
        r"INFO    1\. gr\\xf6\\xdfe: llama on cpu:0, context 512, 1 slot, 400 KV cells, about \d+ ",
        r"WARNING model block 1 \(gr.*--kv-pool-tokens 400 is less than one context of 512",
        r"INFO    loading gr\\xf6\\xdfe \(94 MiB to cpu:0\): 100 %",
        r"INFO    gr\\xf6\\xdfe is ready: ",
        r"INFO    ready after \d+\.\d s: gr\\xf6\\xdfe",
    ]
    found = [[i for i, line in enumerate(lines) if re.match(each, line)] for each in wanted]
    assert [len(each) for each in found] == [1] * len(wanted), server.log
    assert [each[0] for each in found] == sorted(each[0] for each in found)
    assert server.log.count("less than one context") == 1
