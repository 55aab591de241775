"""``--help``, written from the option table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from dflash_trio.cli.launch_options import LAUNCH_OPTIONS, LISTENER_OPTIONS
from dflash_trio.cli.model_options import MODEL_OPTIONS
from dflash_trio.cli.option import Option
from dflash_trio.cli.single_model_options import SINGLE_MODEL_OPTIONS

COLUMNS = 79
_INDENT = " " * 6

_INTRODUCTION = """\
usage: dflash-server [MODEL.gguf] [options] [--model PATH [options]]...

Serves one or several GGUF models behind one HTTP address.

Each --model starts a block, and the model options behind it are that model's,
up to the next --model. What stands before the first --model belongs to the
first block; the first path may also stand alone. --option=value works,
abbreviations do not. A value that begins with two dashes is written with =.
Without --load-balancing only the primary model loads.
"""

_GROUPS: tuple[tuple[str, str, Sequence[Option]], ...] = (
    ("Whole-launch options", "Anywhere, once.", LAUNCH_OPTIONS),
    ("Listener options", "In the first block only.", LISTENER_OPTIONS),
    ("Model options", "In any block, for that block's model.", MODEL_OPTIONS),
    (
        "Single-model options",
        "As model options, and refused beside --load-balancing.",
        SINGLE_MODEL_OPTIONS,
    ),
)

_ENDING = """\
Devices are cuda:N, hip:N, vulkan:N, metal:N, sycl:N and cpu:N; --list-devices
shows this host's. cpu:N is one group of CPU threads, and N only tells blocks
apart.

Environment:
  DFLASH_API_KEY
      One more key that clients may send.

Configuration file (--config FILE.toml): the options above without their
dashes. Launch options at the top level, listener options in [listener], each
block a [[model]] table; flags are true or false, repeatable options arrays.
Relative paths start at the working folder. Beside a file, the command line
adds or overrides launch and listener options.

  log-level = "info"
  [listener]
  port = 8080
  [[model]]
  model = "/models/small.gguf"
  alias = ["fast"]
  max-ctx = 4096

Exit codes: 0 after a shutdown, also while loading; 1 when a model cannot be
loaded or an engine that served does not end; 2 for a launch that cannot start
as written; 130 at a third signal.

Examples:
  One model on the default address:
    dflash-server /models/small.gguf

  Two models, the one on the GPU first, the CPU one when it is busy:
    dflash-server --load-balancing --load-balancing-primary-gpu cuda:0 \\
      --port 8080 --routing-queue-limit 32 \\
      --model /models/large.gguf --model-name large --target-device cuda:0 \\
      --max-ctx 8192 --max-concurrency 4 \\
      --model /models/small.gguf --model-name small --target-device cpu:0 \\
      --max-ctx 4096

  Check a configuration file without serving:
    dflash-server --config /etc/dflash.toml --check
"""


def render_help() -> str:
    """The whole help, in plain ASCII, at most 79 columns wide."""
    groups = "\n".join("\n".join(_group(*group)) for group in _GROUPS)
    return f"{_INTRODUCTION}\n{groups}\n{_ENDING}"


def _group(title: str, note: str, options: Sequence[Option]) -> Iterator[str]:
    yield f"{title}. {note}"
    for option in options:
        yield from _entry(option)
    yield ""


def _entry(option: Option) -> Iterator[str]:
    mark = ""
    if not option.available:
        mark = " (not available yet)"
    elif option.only_value:
        mark = f" (only {option.only_value} is available yet)"
    yield from textwrap.wrap(
        f"  {option.usage}{mark}", COLUMNS, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    limits = (
        f" {option.takes.limits[:1].upper()}{option.takes.limits[1:]}."
        if (option.takes and option.takes.limits)
        else ""
    )
    yield from textwrap.wrap(
        f"{option.help}{limits} Default: {option.default}.",
        COLUMNS,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
    )
