"""``dflash-server`` and ``python -m dflash_trio``: the program's beginning and its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PROGRAM = "dflash-server"
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the words behind the program's name ask for, and return the exit code."""
    if argv is None:
        # Nothing is bound and nothing is written yet: a signal just ends the process. Not by an
        # exception, which an import may swallow; before the imports, which take a moment.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))

    from dflash_trio import __version__
    from dflash_trio.cli import UsageError, parse_command_line, render_help
    from dflash_trio.console import complain, occupy_standard_streams, say

    occupy_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        launch = parse_command_line(words, os.environ)
    except UsageError as error:
        complain(f"{PROGRAM}: error: {error}\n")
        return EXIT_USAGE
    if launch.action == "help":
        say(render_help())
        return 0
    if launch.action == "version":
        say(f"{PROGRAM} {__version__}\n")
        return 0
    # As JSON, where each line is to be an object: then the server logs them.
    logged = launch.action == "serve" and launch.config.log_format == "json"
    for warning in () if logged else launch.warnings:
        complain(f"{PROGRAM}: warning: {warning}\n")

    # The server brings trio, quart and llama.cpp with it: help and refusals do without.
    from dflash_trio.server import check_launch, list_devices, run_server

    if launch.action == "list-devices":
        return list_devices()
    if launch.action == "check":
        return check_launch(launch.config)
    return run_server(launch.config, launch.warnings if logged else ())


if __name__ == "__main__":
    sys.exit(main())
