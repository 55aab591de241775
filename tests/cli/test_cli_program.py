"""The program's beginning: help, version, exit codes, and errors as one line."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trio import __version__
from dflash_trio.__main__ import main
from dflash_trio.cli import Launch, UsageError, parse_command_line, render_help
from dflash_trio.cli.option import Option
from dflash_trio.cli.option_table import OPTIONS, REMOVED
from dflash_trio.config import ServerConfig


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A stand-in for the server that records what it was asked to do."""
    calls: list[object] = []
    module = types.ModuleType("dflash_trio.server")

    def note(name: str, code: int) -> object:
        def call(*arguments: object) -> int:
            calls.append((name, *arguments))
            return code

        return call

    module.__dict__.update(
        run_server=note("run", 5), check_launch=note("check", 6), list_devices=note("list", 7)
    )
    monkeypatch.setitem(sys.modules, "dflash_trio.server", module)
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    return calls


def test_each_action_runs_and_its_exit_code_is_the_program_s(server: list[object]) -> None:
    config = parse_command_line(["a.gguf"], {}).config
    assert main(["a.gguf"]) == 5
    assert main(["a.gguf", "--check"]) == 6
    assert main(["--list-devices"]) == 7
    assert server == [("run", config, ()), ("check", config), ("list",)]


def test_an_error_is_one_line_on_stderr_and_exit_2(
    server: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["a.gguf", "--model-name", "x\ny"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dflash-server: error: --model-name 'x\\ny' ")
    assert err.count("\n") == 1
    assert server == []


def test_a_warning_is_one_line_on_stderr(
    server: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["a.gguf", "--model", "b.gguf"]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dflash-server: warning: load balancing is off: model block 2 (b) ")
    assert err.count("\n") == 1


def test_where_the_log_is_json_a_warning_is_logged_and_no_plain_line(
    server: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["a.gguf", "--model", "b.gguf", "--log-format", "json"]
    launch = parse_command_line(line, {})
    assert launch.warnings
    assert main(line) == 5
    assert capsys.readouterr().err == ""
    assert server == [("run", launch.config, launch.warnings)]


@pytest.mark.parametrize("line", [["--help"], ["--bogus", "--help"], ["--version", "--help"],
                                  ["a.gguf", "--port", "--help"]])  # fmt: skip
def test_help_is_there_whatever_else_is_wrong(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 0
    assert capsys.readouterr().out == render_help()


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dflash-server {__version__}\n"


def test_help_and_errors_import_nothing_heavy() -> None:
    code = (
        "import sys; from dflash_trio.__main__ import main; main(['--help']); main(['--bogus']);"
        "heavy = {'trio', 'quart', 'llama_cpp', 'hypercorn', 'numpy', 'jinja2', 'asyncio'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "dflash_trio", "--prot", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "dflash-server: error: --prot is no option (model block 1): did you mean --port?\n"
    )


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help_shows_every_option_with_its_sentence_and_default(option: Option) -> None:
    lines = render_help().splitlines()
    (start,) = (
        number
        for number, line in enumerate(lines)
        if line.startswith("  --") and line.split()[0] == option.flag
    )
    entry = [lines[start].strip()]
    for line in lines[start + 1 :]:
        if not line.startswith("      "):
            break
        entry.append(line.strip())
    text = " ".join(entry)
    assert text.startswith(option.usage)
    assert option.help in text
    assert f"Default: {option.default}." in text
    assert ("(not available yet)" in text) == (not option.available)
    assert ("is available yet)" in text) == bool(option.only_value)


def test_help_is_plain_and_fits_a_terminal() -> None:
    text = render_help()
    assert text.isascii()
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 100


# Any words at all

_WORDS = st.one_of(
    st.sampled_from([option.flag for option in OPTIONS]),
    st.sampled_from([f"--{name}" for name in REMOVED]),
    st.sampled_from(["a.gguf", "b.gguf", "-1", "0", "1", "8", "0.5", "1:0.5", "auto", "off", "on"]),
    st.sampled_from(["hip:0", "cpu:0", "rpc:x", "cuda:0,cuda:1", "q8_0", "--", "-", "", "nan"]),
    st.builds("{}={}".format, st.sampled_from([option.flag for option in OPTIONS]), st.text()),
    st.text(),
)


@settings(max_examples=1000, deadline=None)
@given(words=st.lists(_WORDS, max_size=12), env=st.sampled_from([{}, {"DFLASH_API_KEY": "k"}]))
def test_any_words_give_a_launch_or_one_printable_line(
    words: list[str], env: dict[str, str]
) -> None:
    try:
        launch = parse_command_line(words, env)
    except UsageError as error:
        launch = Launch(ServerConfig(models=()), "help", (str(error),))
    for line in launch.warnings:
        assert line.isprintable()
        assert len(line) < 4000


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8")))
def test_any_file_gives_a_launch_or_one_printable_line(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        parse_command_line(["--config", str(file)], {})
    assert str(caught.value).isprintable()
