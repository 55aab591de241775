"""Shell completion: made from the table of options, up to date, and right in the shells that are
here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trio.cli.option_table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "scripts" / "completion"
NAMES = ("dflash-server.bash", "_dflash-server", "dflash-server.fish")
AVAILABLE = {option.flag for option in OPTIONS if option.available}


def test_the_files_are_what_the_table_of_options_makes() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts/lib'); import completions as c; "
        "old = {p.name: p.read_text(encoding='utf-8') for p in c.FOLDER.iterdir()}; "
        "sys.exit(old != dict(c.scripts()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert result.returncode == 0, "run .venv/bin/python scripts/lib/completions.py"


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


@pytest.mark.parametrize(
    ("name", "file"), [("bash", NAMES[0]), ("zsh", NAMES[1]), ("fish", NAMES[2])]
)
def test_each_shell_can_read_its_file(name: str, file: str) -> None:
    subprocess.run([shell(name), "-n", FOLDER / file], check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("a.gguf", "b.txt", "launch.toml"):
        (tmp_path / name).touch()
    return tmp_path


BASH = r"""
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
spec=$(complete -p "${COMP_LINE%% *}") || exit 9
[[ $spec == "complete -F _dflash_server "* ]] || exit 8
_dflash_server
printf '%s\n' "${COMPREPLY[@]}"
"""


def bash(folder: Path, line: str) -> list[str]:
    command = [shell("bash"), "-c", BASH, "bash", FOLDER / NAMES[0], line]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return sorted(result.stdout.split("\n")[:-1])


def fish(folder: Path, line: str) -> list[str]:
    command = [shell("fish"), "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"']
    result = subprocess.run(
        [*command, FOLDER / NAMES[2], line], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return sorted(each.split("\t")[0] for each in result.stdout.splitlines())


@pytest.mark.parametrize("program", ["dflash-server", "dflash_server"])
def test_bash_offers_every_option_that_is_available(folder: Path, program: str) -> None:
    assert set(bash(folder, f"{program} a.gguf --")) == AVAILABLE


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("dflash-server --log-f", ["--log-format"]),
        ("dflash-server --log-format ", ["console", "json"]),
        ("dflash-server --log-format=j", ["json"]),
        ("dflash-server --log-format=", ["console", "json"]),
        ("dflash-server --log-format json ", ["a.gguf", "models"]),
        ("dflash-server x.gguf --model ", ["a.gguf", "models"]),
        ("dflash-server --config ", ["launch.toml", "models"]),
        ("dflash-server --tls-cert b", ["b.txt"]),
        ("dflash-server --target-device cu", ["cuda:0"]),
        ("dflash-server --target-device cuda:", ["0"]),
        ("dflash-server --target-device=cuda:", ["0"]),
        ("dflash-server --disk-prefix-cache ", ["models", "off"]),
        ("dflash-server --port ", []),
        ("dflash-server --nothing-like-it", []),
    ],
)
def test_bash_offers_what_may_stand_there(folder: Path, line: str, offers: list[str]) -> None:
    found = bash(folder, line)
    assert [each for each in found if each] == offers


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("dflash-server --log-f", ["--log-format"]),
        ("dflash_server --log-format ", ["console", "json"]),
        ("dflash-server --log-format=j", ["--log-format=json"]),
        ("dflash-server --tls-cert b", ["b.txt"]),
        ("dflash-server --target-device cu", ["cuda:0"]),
        ("dflash-server --port ", []),
    ],
)
def test_fish_offers_what_may_stand_there(folder: Path, line: str, offers: list[str]) -> None:
    assert fish(folder, line) == offers
