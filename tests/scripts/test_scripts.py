"""The scripts people start first: what they say when something is missing. No network here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMANDS = ["scripts/demo", "scripts/test", ".ci/run"]
TOOLS = ["bash", "dirname", "uname", "env", "mktemp", "rm"]

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="Debian's packages and paths")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing installed, under a path with a blank."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


class Machine:
    """A PATH with little on it."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def add(self, name: str, script: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def run(self, checkout: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [checkout / command],
            env={"PATH": str(self.bin), "HOME": str(self.bin), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def real_python() -> str:
    """The interpreter below this virtual environment, quoted for sh."""
    return f"exec '{getattr(sys, '_base_executable', sys.executable)}' \"$@\""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_started(command: str) -> None:
    assert os.access(ROOT / command, os.X_OK)
    assert command == ".ci/run" or f"{command} " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("script", [*COMMANDS, "scripts/lib/python.sh"])
def test_shell_syntax(script: str) -> None:
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", ROOT / script], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_python_is_one_line(checkout: Path, machine: Machine, command: str) -> None:
    result = machine.run(checkout, command)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "there is no python3: apt install python3 python3-venv" in line


def test_an_old_python_is_one_line(checkout: Path, machine: Machine) -> None:
    machine.add("python3", "exit 1")
    result = machine.run(checkout, "scripts/demo")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("scripts/demo: Python 3.11 or later is needed and python3 is older:")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_compiler_is_one_line(checkout: Path, machine: Machine, command: str) -> None:
    machine.add("python3", real_python())
    result = machine.run(checkout, command)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith("a C++ compiler is missing: apt install g++")
    assert not (checkout / ".venv").exists()


def test_no_python3_venv_is_one_line(checkout: Path, machine: Machine, tmp_path: Path) -> None:
    machine.add("g++", "exit 0")
    machine.add("python3", real_python())
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "ensurepip.py").write_text("raise ModuleNotFoundError('ensurepip')")
    result = machine.run(checkout, "scripts/demo", PYTHONPATH=str(hidden))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "apt install python3" in line
    assert line.endswith("-venv")
    assert not (checkout / ".venv").exists()


def test_a_foreign_venv_is_left_alone(checkout: Path, machine: Machine) -> None:
    machine.add("g++", "exit 0")
    machine.add("python3", real_python())
    kept = checkout / ".venv" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    result = machine.run(checkout, "scripts/demo")
    assert result.returncode == 1
    assert "move it out of the way" in result.stderr
    assert kept.read_text() == "mine"


def test_the_demo_explains_itself_without_installing(checkout: Path, machine: Machine) -> None:
    machine.add("python3", real_python())
    result = subprocess.run(
        [checkout / "scripts/demo", "--help"],
        env={"PATH": str(machine.bin)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("usage: scripts/demo")
    assert not (checkout / ".demo").exists()


# --------------------------------------------------------------------------- their Python parts


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "lib")
    monkeypatch.delenv("PORT", raising=False)


@pytest.mark.usefixtures("lib")
@pytest.mark.parametrize(
    ("extra", "port", "address"),
    [
        ([], "", ("127.0.0.1", 8080)),
        ([], "9000", ("127.0.0.1", 9000)),
        (["--port", "9001"], "9000", ("127.0.0.1", 9001)),
        (["--port=0", "--routing-queue-limit", "2"], "", ("127.0.0.1", 0)),
        (["--host", "unix:/tmp/socket"], "", ("unix:/tmp/socket", 8080)),
        (["--host=unix:/tmp/s"], "9000", ("unix:/tmp/s", 8080)),
    ],
)
def test_the_demo_launches_two_models(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], port: str, address: tuple[str, int]
) -> None:
    import demo

    from dflash_trio.cli import parse_command_line

    if port:
        monkeypatch.setenv("PORT", port)
    config = parse_command_line(demo.server_command(extra)[1:], {}).config
    assert [(m.name, str(m.target_device)) for m in config.models] == [
        ("smollm2", "cpu:0"),
        ("gemma", "cpu:1"),
    ]
    assert config.load_balancing
    assert (config.listener.host, config.listener.port) == address


@pytest.mark.usefixtures("lib")
def test_the_detail_of_a_build_is_read_from_the_log() -> None:
    import bootstrap

    log = b"Collecting trio\n  Downloading https://host/a/trio-0.35.whl (1 kB)\n"
    assert bootstrap.pip_detail(b"") == ""
    assert bootstrap.pip_detail(log) == "trio-0.35.whl"
    log += b"  Building wheel for llama-cpp-python (pyproject.toml): started\n  [2/9] c++ [3/x]\n"
    assert bootstrap.pip_detail(log) == (
        "Building wheel for llama-cpp-python (2 of 9 files compiled)"
    )


@pytest.mark.usefixtures("lib")
def test_durations_are_short() -> None:
    import bootstrap

    assert bootstrap.duration(59.9) == "59 s"
    assert bootstrap.duration(125) == "2 min 05 s"
