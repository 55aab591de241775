"""The way from ``argv`` to a launch: read, merge with the file, decide what loads, check, build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import frozen

from dflash_trio.cli.block_grammar import read_arguments
from dflash_trio.cli.build_config import build_config
from dflash_trio.cli.config_file import beside_file, read_config_file
from dflash_trio.cli.errors import refusal
from dflash_trio.cli.given import ParsedLaunch
from dflash_trio.cli.refusals import check_launch_options, check_selection
from dflash_trio.cli.selection import select_blocks, unused_warning
from dflash_trio.config import ServerConfig

Action = Literal["serve", "check", "list-devices", "help", "version"]

_NOTHING = ServerConfig(models=())


@frozen
class Launch:
    """What a command line asks for."""

    config: ServerConfig
    """Complete for ``serve`` and ``check``; without models for the other actions."""
    action: Action
    warnings: tuple[str, ...] = ()
    """One printable line each."""


def parse_command_line(argv: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Read the words behind the program's name, and ``DFLASH_API_KEY`` from ``env``.

    Raises UsageError for a launch that cannot start as written. Opens the small files that the
    launch names (configuration, keys, templates, certificates) and the cards of the models that
    load, and no model.
    """
    # Never a value: a word with two dashes is none. So help is there for whoever has just got
    # something else wrong.
    if "--help" in argv:
        return Launch(_NOTHING, "help")
    if "--version" in argv:
        return Launch(_NOTHING, "version")
    parsed = read_arguments(argv)
    config_file = parsed.launch.get("config")
    if config_file is not None:
        parsed = beside_file(read_config_file(config_file.value), parsed, config_file.value)
    check_launch_options(parsed)
    action = _action(parsed)
    if action == "list-devices":
        return Launch(_NOTHING, action)
    selection = select_blocks(parsed)
    check_selection(selection)
    config = build_config(parsed, selection, env)
    warning = unused_warning(selection)
    return Launch(config, action, (warning,) if warning else ())


def _action(parsed: ParsedLaunch) -> Action:
    check, list_devices = parsed.launch.get("check"), parsed.launch.get("list-devices")
    if check is not None and list_devices is not None:
        raise refusal("--check and --list-devices exclude each other", "give one of them")
    if list_devices is not None:
        return "list-devices"
    return "check" if check is not None else "serve"
