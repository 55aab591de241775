"""Every command in the README and the pages is run, or the page says why it is not.

A line of ``dflash-server`` is parsed by the real parser, and checked as by ``--check`` where its
devices are here; those of the scripts are held against their parsers; every ``curl`` and every
Python block is run against a real server; the tutorial is gone through from its first step to its
last. Models, ports and folders are put in the place of the page's, and threads are fewer.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from dflash_trio.cli import parse_command_line
from dflash_trio.cli.command_line import Launch
from dflash_trio.launch_checks import resolve_launch
from dflash_trio.testing.command import parse as parse_shutdown_check
from tests.docs.blocks import BLOCKS, COMMANDS, ROOT, Block
from tests.support.running import ServerProcess, server_process

TUTORIAL = "quickstart.md"
SERVER = ("dflash-server", "dflash_server", ".venv/bin/dflash-server")
DRAFT = ROOT / "dflash_trio" / "drafts" / "smollm2-135m-instruct-dflash.gguf"
FILES_OF_THE_PAGES = re.compile(r"(?<![\w/.])(?:/models/|\.demo/models/)?[\w./-]*\.gguf")

RUN = [block for block in COMMANDS if not block.why_not_run and not block.run_by]
ASKING = [
    block
    for block in RUN
    if block.page != TUTORIAL
    and (block.is_python or any(words[0] == "curl" for words in block.commands))
]


# ------------------------------------------------------------------------------- the rules


def test_every_block_that_is_not_run_has_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints them; a block that is run elsewhere is run by a test that knows its page."""
    reasons = [f"  {b} is not run: {b.why_not_run}" for b in COMMANDS if b.why_not_run]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *reasons, ""]))
    for block in COMMANDS:
        assert not block.note.startswith("not run") or len(block.why_not_run) > 10, str(block)
        if block.run_by:
            assert block.page in (ROOT / block.run_by).read_text(encoding="utf-8"), str(block)


def test_no_reason_stands_in_front_of_anything_but_a_block() -> None:
    """One that a paragraph was put behind would excuse nothing."""
    for path in {ROOT / "README.md", *(ROOT / "docs").glob("*.md")}:
        text = path.read_text(encoding="utf-8")
        for block in BLOCKS:
            if block.page == path.name:
                text = text.replace(block.text, "")
        given = len(re.findall(r"^<!-- (?:not run|run by|file): ", text, re.MULTILINE))
        found = [block for block in BLOCKS if block.page == path.name and block.note]
        used = [b for b in found if re.match(r"not run: |run by: |file: ", b.note)]
        assert given == len(used), path.name


@pytest.mark.parametrize("block", RUN, ids=str)
def test_every_line_is_one_that_is_checked_here(block: Block) -> None:
    if block.is_python or block.page == TUTORIAL:
        return
    for words in block.commands:
        assert words[0] in {*SERVER, *CHECKS, "curl"}, (
            f"{block}: nothing here runs {words[0]}: check it, or say <!-- not run: why -->"
        )


# ----------------------------------------------------------------- lines that are parsed


def launch_of(words: Sequence[str]) -> Launch:
    """The launch of a command's words behind the program. UsageError if it is none."""
    return parse_command_line([word.replace("{port}", "8080") for word in words], {})


def server_lines() -> Iterator[tuple[str, list[str]]]:
    for block in COMMANDS:
        if block.is_shell:
            for words in block.commands:
                program = next((i for i, word in enumerate(words) if word in SERVER), None)
                if program in (0, 1) and "docker" not in words:
                    behind = words[program + 1 :]
                    ends = (i for i, word in enumerate(behind) if re.match(r"[0-9]?>|[&|]", word))
                    yield str(block), behind[: next(ends, len(behind))]


SERVER_LINES = list(server_lines())


def test_the_pages_have_launches() -> None:
    assert len(SERVER_LINES) > 15


@pytest.mark.parametrize(("where", "words"), SERVER_LINES, ids=lambda value: value)
def test_every_server_line_is_a_launch_that_this_server_would_make(
    where: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "--config" in words:
        files = {b.note.removeprefix("file: "): b for b in BLOCKS if b.note.startswith("file: ")}
        path = words[words.index("--config") + 1]
        if path not in files:
            pytest.skip("its file is that of another test: tests/server/test_running_page.py")
        here = files[path].text
        (tmp_path / path).write_text(here)
    else:
        here = ""
    for name in ("docs", "dflash_trio"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    placed = [
        word.replace("/etc/dflash", str(tmp_path)).replace("/var/lib/dflash", str(tmp_path))
        for word in words
    ]
    launch = launch_of(placed)
    everything = " ".join(words) + here
    if re.search(r"(cuda|hip|vulkan|metal|sycl):\d", everything) or "--tls-cert" in words:
        return  # what is left to check needs the GPU, or a certificate
    smollm2: Path = request.getfixturevalue("smollm2")
    for place in FILES_OF_THE_PAGES.findall(everything):
        file = tmp_path / place.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.symlink_to(DRAFT if "draft" in place.lower() else smollm2)
    launch = launch_of([re.sub(r"^/models/", "models/", word) for word in placed])
    if launch.action in ("serve", "check"):
        assert resolve_launch(launch.config).models


def parsed_by(module: str) -> Callable[[Sequence[str]], object]:
    def check(words: Sequence[str]) -> object:
        return importlib.import_module(module).parser().parse_args(words)

    return check


def measured(words: Sequence[str]) -> object:
    """scripts/bench, and the servers that it is to start."""
    arguments = importlib.import_module("bench_lib.arguments").parser().parse_args(words)
    for server in arguments.server:
        command = shlex.split(server.partition("=")[2])
        program = os.path.basename(command[0])
        assert program in ("dflash-server", "llama-server")
        if program == "dflash-server":
            launch_of(command[1:])
    if arguments.ours:
        launch_of(["m.gguf", *shlex.split(arguments.ours)])
    return arguments


def shutdown_checked(words: Sequence[str]) -> object:
    options, _ = parse_shutdown_check(words)
    if options.server[0] == "dflash-server":
        launch_of(options.server[1:])
    return options


def takes_nothing(words: Sequence[str]) -> object:
    assert list(words) == []
    return words


CHECKS: dict[str, Callable[[Sequence[str]], object]] = {
    "dflash-shutdown-check": shutdown_checked,
    "scripts/bench": measured,
    "scripts/soak": parsed_by("soak_lib.command"),
    "scripts/fuzz": parsed_by("fuzz_lib.command"),
    "scripts/train-draft": parsed_by("train_draft_lib.command"),
    "scripts/build-llama-server": takes_nothing,
}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (str(block), words)
        for block in COMMANDS
        if block.is_shell
        for words in block.commands
        if words[0] in CHECKS
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_script_has_the_options_that_the_pages_give_it(
    where: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    try:
        CHECKS[words[0]](words[1:])
    except SystemExit as error:
        pytest.fail(f"{where}: {' '.join(words)}: exit {error.code}")


# -------------------------------------------------------------------- blocks that are run


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[ServerProcess]:
    words = [str(smollm2), "--port=0", "--target-device=cpu:0", "--threads=1", "--max-ctx=2048"]
    # Short, whatever the page asks for: only that it is asked and answered is looked at.
    with server_process([*words, "--max-concurrency=2", "--default-max-tokens=24"]) as process:
        trio.run(process.until_ready)
        yield process


def environment(folder: Path, **more: str) -> dict[str, str]:
    """In which nothing hangs, and curl says by its exit code what went wrong."""
    (folder / ".curlrc").write_text("max-time = 60\nfail\n")
    return {**os.environ, "CURL_HOME": str(folder), "PYTHONPATH": str(ROOT), **more}


def ran(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def first_lines(text: str, folder: Path, count: int) -> list[str]:
    """Of what one command says that does not end by itself."""
    command = ["sh", "-e", "-c", f"exec {text}"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        # Curl's own bound ends it where nothing comes.
        lines = [process.stdout.readline() for _ in range(count)]
        process.kill()
    return lines


def with_curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")


@pytest.mark.real
@pytest.mark.parametrize("block", ASKING, ids=str)
def test_what_clients_are_told_to_send_is_answered(
    block: Block, server: ServerProcess, tmp_path: Path
) -> None:
    text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    if block.is_python:
        result = ran([sys.executable, "-c", text], tmp_path)
        assert result.returncode == 0, result.stderr
        return
    with_curl()
    if "/status/stream" in text:  # which has no end
        event, data = first_lines(text, tmp_path, 2)
        assert event == "event: status\n"
        assert data.startswith("data: {")
        return
    result = ran(["sh", "-e", "-c", text], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


# ------------------------------------------------------------------------- the tutorial


SLEEPS_BEHIND_A_STREAM = re.compile(r"> (\S+) &\nsleep \d+$", re.MULTILINE)
UNTIL_IT_HAS_BEGUN = r"""> \1 &
left=1200
until [ -s \1 ]; do sleep 0.05; left=$((left - 1)); [ $left -gt 0 ] || exit 1; done"""


class Desk:
    """The tutorial's folder: a ``.venv`` with our program, and the two models."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder = folder
        program = folder / ".venv" / "bin" / "dflash-server"
        program.parent.mkdir(parents=True)
        # llama.cpp's threads wait for each other, for long where others are at work too.
        program.write_text(
            '#!/bin/sh\ncase "$*" in *--config*) ;; *) set -- --threads=1 "$@" ;; esac\n'
            f'exec "{sys.executable}" -m dflash_trio "--port=$TEST_PORT" "$@"\n'
        )
        program.chmod(0o755)
        (folder / ".demo" / "models").mkdir(parents=True)
        for name, path in models.items():
            (folder / ".demo" / "models" / name).symlink_to(path)

    def run(self, block: Block, port: int) -> str:
        """What it says, on both streams."""
        text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        # A reader sleeps for as long as a stream may take to begin. Here it is seen to have begun,
        # in a file that no earlier block has left.
        for name in SLEEPS_BEHIND_A_STREAM.findall(text):
            (self.folder / name).unlink(missing_ok=True)
        text = SLEEPS_BEHIND_A_STREAM.sub(UNTIL_IT_HAS_BEGUN, text)
        assert not re.search(r"^sleep ", text, re.MULTILINE), block
        if "&\n" in text and "wait" not in text:
            text += 'kill "$!" || true\n'  # nobody waits for the long answer
        command = [sys.executable, "-c", text] if block.is_python else ["sh", "-c", text]
        result = ran(command, self.folder, TEST_PORT=str(port))
        assert result.returncode == 0, f"{block}: {result.stdout}{result.stderr}"
        return result.stdout + result.stderr

    def goes_through(self, blocks: Sequence[Block], port: int) -> None:
        """Each does something, and what the page shows of it was said."""
        said = ""
        for block in blocks:
            if block.language == "text":
                shown = said.replace("\r", "")
                assert shown == block.text, f"{block} shows what was not said: {shown}"
            else:
                said = self.run(block, port)
                assert said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_server(block: Block) -> bool:
    """Whether it stays in its terminal."""
    return (
        block.is_shell
        and len(block.commands) == 1
        and block.commands[0][0] == ".venv/bin/dflash-server"
        and "--check" not in block.commands[0]
    )


SECOND_REQUEST = next(b for b in BLOCKS if b.page == "README.md" and b.run_by)
"""The README's, which the demo answers as the tutorial's second server does."""


@pytest.mark.real
def test_the_tutorial_leads_to_two_models(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_curl()
    desk = Desk(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    # Each server with what is done while it runs, in the order of the page; at the end what starts
    # one itself.
    steps: list[tuple[Block | None, list[Block]]] = []
    for block in (block for block in BLOCKS if block.page == TUTORIAL):
        if block.why_not_run or "cuda" in block.text:
            continue
        if block.note.startswith("file: "):
            (tmp_path / block.note.removeprefix("file: ")).write_text(block.text)
        elif is_server(block):
            steps.append((block, []))
        elif "server=$!" in block.text:
            steps.append((None, [block]))
        elif block.is_shell or block.is_python or block.language == "text":
            steps[-1][1].append(block)
    assert [launch is not None for launch, _ in steps] == [True, True, True, False]
    for launch, asked in steps:
        if launch is None:
            desk.goes_through(asked, free_port())
            continue
        (words,) = launch.commands
        threads = [] if "--config" in words else ["--threads=1"]
        with server_process(["--port=0", *threads, *words[1:]]) as process:
            trio.run(process.until_ready)
            desk.goes_through(asked, process.port)
            if "--load-balancing" in words:
                said = desk.run(SECOND_REQUEST, process.port)
                assert "x-dflash-model: gemma" in said
                assert "x-dflash-fallback: busy" in said
            process.signal()
            assert trio.run(process.exit_code) == 0
