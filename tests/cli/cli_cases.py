"""What the tests of the command line share: short ways to parse, and a good value per option."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from dflash_trio.cli import Launch, UsageError, parse_command_line
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.option_table import OPTIONS

PER_MODEL = [option for option in OPTIONS if option.scope.per_model]
LISTENER = [option for option in OPTIONS if option.scope is Scope.LISTENER]
LAUNCH = [option for option in OPTIONS if option.scope is Scope.LAUNCH]
UNAVAILABLE = [option for option in OPTIONS if not option.available]
ONE_VALUE = [option for option in OPTIONS if option.only_value]

# One value in good form for each metavar; options that need another are named below.
_BY_METAVAR = {
    "N": "2",
    "X": "0.5",
    "S": "3",
    "GIB": "2.5",
    "PATH": "x.gguf",
    "FILE": "x.txt",
    "FILE.toml": "x.toml",
    "DIR": "/tmp/x",
    "DIR|off": "off",
    "NAME": "some-name",
    "KEY": "secret-key",
    "ADDRESS": "::1",
    "ORIGIN": "https://example.org",
    "BACKEND:N": "cuda:0",
    "BACKEND:N|auto": "vulkan:1",
    "B:N,B:N": "cuda:0,cuda:1",
    "W,W": "3,1.5",
    "T:R": "1000:0.5",
    "N|auto": "auto",
}
_OTHER_VALUES = {
    # Values on which an unused block says the most: not the only one that is available.
    "prefix-cache-slots": "8",
    "prefill-cache-slots": "4",
    "fa-window": "4096",
    "disk-prefix-cache": "/tmp/cache",
    "tool-parser": "hermes",
}

# A number just outside each bounded option's range, and words that are no number at all.
OUT_OF_RANGE = {
    "port": ("-1", "65536"),
    "routing-queue-limit": ("-1",),
    "drain-timeout": ("-1", "nan", "inf", "1e999"),
    "client-stall-timeout": ("0", "-1", "nan", "-inf"),
    "max-body-bytes": ("0", "268435457"),
    "max-connections": ("0",),
    "max-ctx": ("0", "-1", "16777217"),
    "max-concurrency": ("0", "257"),
    "kv-pool-tokens": ("0",),
    "decode-headroom": ("0",),
    "fa-window": ("-1",),
    "chunk": ("0", "65537"),
    "threads": ("0",),
    "gpu-layers": ("-1",),
    "rope-freq-base": ("0", "1e-50", "nan"),
    "rope-freq-scale": ("0", "inf"),
    "default-max-tokens": ("0",),
    "hard-limit-reply-budget": ("-1",),
    "think-max-tokens": ("-1",),
    "reasoning-effort-low": ("-1",),
    "reasoning-effort-medium": ("-1",),
    "reasoning-effort-high": ("-1",),
    "reasoning-effort-x-high": ("-1",),
    "reasoning-effort-max": ("-1",),
    "temperature": ("-0.1", "100.5", "nan", "inf"),
    "top-p": ("0", "1.01", "nan"),
    "top-k": ("-1",),
    "min-p": ("-0.1", "1.5", "nan"),
    "repeat-penalty": ("0", "-1", "inf"),
    "seed": ("-2", "9223372036854775808"),
    "prefix-cache-slots": ("-1",),
    "prefill-cache-slots": ("-1",),
    "draft-max": ("0",),
    "ddtree-budget": ("0", "256"),
    "ds4-expert-top-k": ("0",),
    "kvflash": ("0", "-1"),
    "kvflash-tau": ("0",),
    "spark-vram": ("0", "nan"),
    "spark-slots": ("0",),
    "prefill-threshold": ("-1",),
    "prefill-keep-ratio": ("0", "1.1"),
    "draft-ipc-ring-cap": ("0",),
}


def good_value(option: Option) -> list[str]:
    """The words behind an option's flag, in good form."""
    if option.takes is None:
        return []
    if option.name in _OTHER_VALUES:
        return [_OTHER_VALUES[option.name]]
    metavar = option.takes.metavar
    return [_BY_METAVAR.get(metavar) or metavar.split("|")[0]]


def parse(line: str, env: Mapping[str, str] | None = None) -> Launch:
    """Parse a line as a shell would cut it."""
    return parse_command_line(shlex.split(line), env or {})


def refusal_of(line: str | list[str], env: Mapping[str, str] | None = None) -> str:
    """The error that a line gives, which has to be one printable line."""
    words = shlex.split(line) if isinstance(line, str) else line
    with pytest.raises(UsageError) as caught:
        parse_command_line(words, env or {})
    message = str(caught.value)
    assert message.isprintable()
    assert ": " in message
    return message
