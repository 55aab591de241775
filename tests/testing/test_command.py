"""``dflash-shutdown-check`` as people and machines use it."""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from dflash_trio.testing.command import main, parse
from tests.support.http_client import PATIENCE
from tests.testing.harness import bad_server


def run(*words: str, fault: str = "right", answer_tokens: int = 300) -> int:
    command = shlex.join(bad_server(fault)).replace("'{port}'", "{port}")
    quick = ["--prefill-tokens", "200", "--slack", "3", "--timeout", "60"]
    return main(["--server", command, "--answer-tokens", str(answer_tokens), *quick, *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--server is missing"),
        (["--server", "run"], "{port}"),
        (["--server", "run '{port}"], "No closing quotation"),
        (["--server", "{port}", "--api", "chat,mail"], "'mail' is none of"),
        (["--server", "{port}", "--signals", "hup"], "'hup' is none of"),
        (["--server", "{port}", "--scenario", "lunch"], "no scenario is called 'lunch'"),
        (["--server", "{port}", "--header", "x"], "is not K:V"),
        (["--server", "{port}", "--extra", "[]"], "is not a JSON object"),
        (["--server", "{port}", "--slots", "0"], "slots"),
        (["--server", "{port}", "--poli", "drain"], "--poli"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err
    assert said.err.count("\n") == 1


def test_the_words_become_options() -> None:
    options, _ = parse(
        shlex.split(
            "--server 'run \"a b\" {port}' --api messages,chat --policy finalize --model m "
            "--slots 2 --ready /up --prefill-tokens 5 --answer-tokens 9 --header 'X-Key: a:b' "
            "--equal length --signals term --timeout 7 --extra {}"
        )
    )
    assert options.server == ("run", "a b", "{port}")
    assert options.apis == ("messages", "chat")
    assert options.headers == (("x-key", "a:b"),)
    assert (options.policy, options.model, options.slots) == ("finalize", "m", 2)
    assert (options.ready, options.equal, options.timeout) == ("/up", "length", 7.0)
    assert options.extra == {}


def test_the_list_has_a_scenario_per_phase_and_api(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--api", "chat,messages"]) == 0
    names = capsys.readouterr().out.split()
    assert "idle/term" in names
    assert {"chat/queued/term", "messages/queued/term"} <= set(names)
    assert len(names) == len(set(names))


def test_the_help_names_every_option_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for option in ("--server", "--policy", "--equal", "--junit", "{socket}", "Exit codes"):
        assert option in said


@pytest.mark.real
def test_a_right_server_gives_a_table_and_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--scenario", "idle/term") == 0
    said = capsys.readouterr()
    assert "| idle/term | yes" in said.out
    assert said.out.endswith("1 scenarios: 1 right\n")
    assert said.err == "idle/term: right\n"


@pytest.mark.real
def test_a_wrong_one_gives_1_and_says_so_to_machines_too(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "json"), "--junit", str(tmp_path / "xml")]
    scenarios = ["--scenario", "idle/*", "--scenario", "chat/streaming/term"]
    assert run(*scenarios, *files, "--logs", str(tmp_path / "logs"), fault="exit-3") == 1
    results = json.loads((tmp_path / "json").read_text())["results"]
    assert [result["verdict"] for result in results] == ["wrong"] * 3
    assert results[-1]["exit_code"] == 3
    active = results[-1]["clients"][0]
    assert (active["status"], active["end"], active["finish"]) == (200, "complete", "length")
    suite = ElementTree.parse(tmp_path / "xml").getroot()
    assert suite.attrib["failures"] == "3"
    for case in suite:
        assert "exit code 3" in case[0].attrib["message"]
    assert (tmp_path / "logs" / "idle-term.log").is_file()


@pytest.mark.real
def test_what_was_not_reached_is_an_error_for_machines(tmp_path: Path) -> None:
    files = ["--junit", str(tmp_path / "xml")]
    assert run("--scenario", "streaming/term", *files, fault="hasty", answer_tokens=8) == 1
    suite = ElementTree.parse(tmp_path / "xml").getroot()
    assert suite.attrib["errors"] == "1"
    assert suite[0][0].tag == "error"


def test_a_server_that_does_not_start_gives_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", "false {port}"]) == 1
    assert "the server ended with 1 while starting" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_check_ends_its_servers(number: signal.Signals) -> None:
    mark = secrets.token_hex(8)
    command = shlex.join(bad_server("ignores", mark)).replace("'{port}'", "{port}")
    words = [sys.executable, "-m", "dflash_trio.testing", "--server", command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as check:
        end = time.monotonic() + PATIENCE
        while not servers(mark) and time.monotonic() < end:
            time.sleep(0.02)
        assert servers(mark)
        check.send_signal(number)
        said, complaint = check.communicate(timeout=PATIENCE)
    assert check.returncode == 130
    assert said == b""
    assert complaint.endswith(b"dflash-shutdown-check: interrupted\n")
    assert servers(mark) == []


def servers(mark: str) -> list[psutil.Process]:
    """Servers with this word on their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]
