"""The command ``dflash-shutdown-check``: words in, a table and an exit code out."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from .dialects import DIALECTS
from .options import SIGNAL_PATTERNS, CheckOptions, UsageError
from .report import as_json, as_junit, progress_line, table
from .runner import Result, all_right, check
from .scenarios import scenarios
from .server_under_test import ServerFailed

PROGRAM = "dflash-shutdown-check"
EXIT_RIGHT, EXIT_WRONG, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

OUR_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

DESCRIPTION = """\
Checks what a server with an OpenAI-like API does to its clients when it is told to stop.

For every scenario it starts the server anew, brings real clients into a phase (queued, prefilling,
streaming, ...), sends the signal, and judges: what each client saw, byte for byte, against an
undisturbed run; the exit code; the time it took; what was left behind."""

EPILOG = """\
Exit codes: 0 every scenario is right; 1 one is wrong, was not reached, or its API is not served;
2 the check cannot be run as asked for; 130 interrupted.

Example:
  dflash-shutdown-check --policy drain \\
    --server "dflash-server /models/small.gguf --port {port}"
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    d = CheckOptions(("{port}",))
    add("--server", metavar="CMD", help="the server's command, split as a shell would; {port} "
        "becomes a free TCP port, {socket} the path of a Unix socket")  # fmt: skip
    add("--api", metavar="A,B", default="chat", help=f"of {', '.join(DIALECTS)} (default: chat)")
    add("--policy", choices=("drain", "finalize"), default=d.policy, help="whether active answers "
        "are to be finished, or ended at once in proper form (default: drain)")  # fmt: skip
    add("--model", metavar="NAME", help="the model in requests (default: /v1/models' first)")
    add("--slots", type=int, metavar="N", help="answers that the server makes at a time (default: "
        "what /status/json says, else 1)")  # fmt: skip
    add("--ready", metavar="PATH", default=d.ready, help="answers 200 when the server can serve "
        "(default: /health)")  # fmt: skip
    add("--prefill-tokens", type=int, metavar="N", default=d.prefill_tokens,
        help="length of the long prompt, about (default: %(default)s)")  # fmt: skip
    add("--answer-tokens", type=int, metavar="N", default=d.answer_tokens,
        help="length of a usual answer (default: %(default)s)")  # fmt: skip
    add("--long-answer-tokens", type=int, metavar="N", default=d.long_answer_tokens, help="length "
        "of a longer one, for zero-window and disconnecting (default: %(default)s)")  # fmt: skip
    add("--header", metavar="K:V", action="append", default=[], help="sent with every request; "
        "may be repeated")  # fmt: skip
    add("--extra", metavar="JSON", default=json.dumps(dict(d.extra)), help="further fields of "
        "every generating request (default: %(default)s)")  # fmt: skip
    add("--equal", choices=("exact", "prefix", "length"), default=d.equal, help="how answers are "
        "compared with the undisturbed run's (default: exact)")  # fmt: skip
    add("--signals", metavar="A,B", default=",".join(SIGNAL_PATTERNS),
        help="term, int, twice, thrice (default: all)")  # fmt: skip
    add("--scenario", metavar="NAME", action="append", default=[], help="run only this phase or "
        "scenario, or what matches this pattern; may be repeated")  # fmt: skip
    add("--third-exit", type=int, metavar="CODE", default=d.third_exit, help="the exit code "
        "expected after a third signal (default: %(default)s)")  # fmt: skip
    add("--timeout", type=float, metavar="S", default=d.timeout, help="the longest that any one "
        "thing may take (default: %(default)g)")  # fmt: skip
    add("--slack", type=float, metavar="S", default=d.slack,
        help='what "at once" may take (default: %(default)g)')  # fmt: skip
    add("--jobs", type=int, metavar="N", default=d.jobs, help="scenarios side by side, each with "
        "its own server (default: 1)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything that was seen")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' output here")
    add("--list", action="store_true", help="list the scenarios and run none")
    return parser


def parse(argv: Sequence[str]) -> tuple[CheckOptions, argparse.Namespace]:
    """The check that the words ask for, and the rest of them. Raises UsageError."""
    words = _parser().parse_args(argv)
    if words.server is None and not words.list:
        raise UsageError("--server is missing")
    try:
        server = tuple(shlex.split(words.server)) if words.server is not None else ("{port}",)
    except ValueError as error:
        raise UsageError(f"--server: {error}") from error
    try:
        options = CheckOptions(
            server=server,
            apis=_listed("--api", words.api, tuple(DIALECTS)),
            policy=words.policy,
            model=words.model,
            slots=words.slots,
            ready=words.ready,
            prefill_tokens=words.prefill_tokens,
            answer_tokens=words.answer_tokens,
            long_answer_tokens=words.long_answer_tokens,
            headers=tuple(_header(text) for text in words.header),
            extra=_json_object(words.extra),
            equal=words.equal,
            signals=frozenset(_listed("--signals", words.signals, SIGNAL_PATTERNS)),
            scenarios=tuple(words.scenario),
            timeout=words.timeout,
            slack=words.slack,
            third_exit=words.third_exit,
            jobs=words.jobs,
            log_folder=words.logs,
        )
    except ValueError as error:  # from a validator
        raise UsageError(str(error)) from error
    return options, words


def _listed(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"--header: {text!r} is not K:V")
    return name.strip().lower(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError("--extra is not a JSON object")
    return value


def _say(result: Result) -> None:
    sys.stderr.write(f"{progress_line(result)}\n")
    sys.stderr.flush()


async def _check_until_signal(options: CheckOptions) -> list[Result] | None:
    """The results; ``None`` after a signal to us, which ends the servers first."""
    results: list[Result] | None = None
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def cancel_at_signal(
            *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
        ) -> None:
            with trio.open_signal_receiver(*OUR_SIGNALS) as signals:
                task_status.started()
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        await nursery.start(cancel_at_signal)
        try:
            results = await check(options, _say)
        except (UsageError, ServerFailed) as error:
            failure = error  # raised outside, where no nursery wraps it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. Blocks."""
    try:
        options, words = parse(sys.argv[1:] if argv is None else argv)
        if words.list:
            sys.stdout.write("".join(f"{scenario.name}\n" for scenario in scenarios(options)))
            return EXIT_RIGHT
        results = trio.run(_check_until_signal, options)
    except UsageError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return EXIT_USAGE
    except ServerFailed as failed:
        sys.stderr.write(f"{PROGRAM}: {failed}\n")
        return EXIT_WRONG
    if results is None:
        sys.stderr.write(f"{PROGRAM}: interrupted\n")
        return EXIT_INTERRUPTED
    sys.stdout.write(f"{table(results)}\n")
    try:
        if words.json is not None:
            words.json.write_text(as_json(results), encoding="utf-8")
        if words.junit is not None:
            words.junit.write_text(as_junit(results), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: the results cannot be written: {error}\n")
        return EXIT_WRONG
    return EXIT_RIGHT if all_right(results) else EXIT_WRONG
