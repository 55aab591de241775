"""The command line and the configuration file, from words to a frozen configuration.

Opens no model and imports nothing heavy, so that ``--help`` and a mistyped option answer at once.
"""

from dflash_trio.cli.command_line import Action, Launch, parse_command_line
from dflash_trio.cli.errors import UsageError
from dflash_trio.cli.help_text import render_help

__all__ = ["Action", "Launch", "UsageError", "parse_command_line", "render_help"]
