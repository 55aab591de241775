"""The words behind scripts/bench, and the contestants that they name."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from urllib.parse import urlsplit

from attrs import frozen

from .contestants import Contestant, Options, bare_loop, behind_url, by_command
from .process import ROOT

LLAMA_SERVER = ROOT / ".llama-server" / "llama-server"
OURS, THEIRS, BARE = "dflash-server", "llama-server", "bare loop"
_GGML_NAMES = {"cuda": "CUDA", "hip": "ROCm", "vulkan": "Vulkan", "sycl": "SYCL", "metal": "MTL"}


@frozen
class Entry:
    """A contestant before it is started."""

    name: str
    command: tuple[str, ...] = ()
    """Its words, or for the bare loop the server's options; empty: ``url``."""
    url: str = ""
    kind: str = "server"
    """``server``, ``ours`` or ``bare``."""

    def start(self, options: Options) -> AbstractAsyncContextManager[Contestant]:
        if self.url:
            return behind_url(self.name, self.url, options)
        if self.kind == "bare":
            return bare_loop(self.name, self.command, options)
        return by_command(self.name, self.command, options, ours=self.kind == "ours")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Streaming load on OpenAI-compatible servers that take turns, in one run. "
        "Exit code 0: measured; 1: something failed or it was stopped; 2: wrong arguments.",
        epilog="docs/performance.md says what each figure means.",
    )
    who = parser.add_argument_group("who is measured")
    who.add_argument(
        "--server",
        action="append",
        default=[],
        metavar='NAME="COMMAND {port}"',
        help="start a server; ready when /health answers 200. May be repeated",
    )
    who.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs already. May be repeated",
    )
    who.add_argument(
        "--compare-llama-server",
        type=Path,
        metavar="MODEL",
        help="start this project's server and llama-server with this GGUF file, the same context, "
        "slots and threads",
    )
    who.add_argument(
        "--bare",
        type=Path,
        metavar="MODEL",
        help="also our engine's bare step loop on this GGUF file, as a ceiling",
    )
    who.add_argument("--baseline", metavar="NAME", help="what ratios are to (default: llama-server "
                     "where it is compared with, else the first)")  # fmt: skip
    how = parser.add_argument_group("how --compare-llama-server and --bare start things")
    how.add_argument("--ctx", type=_positive, default=2048, help="tokens a slot (default 2048)")
    how.add_argument("--slots", type=_positive, help="default: the most streams")
    how.add_argument("--threads", type=_positive, help="default: the usable cores")
    how.add_argument("--device", default="cpu:0", help="as of --target-device (default cpu:0)")
    how.add_argument(
        "--prefix-cache-slots", type=_count, default=8, help="of this project's server (default 8)"
    )
    how.add_argument(
        "--ours", default="", metavar="OPTIONS", help="more or other options of this server"
    )
    how.add_argument(
        "--theirs", default="", metavar="OPTIONS", help="more or other options of llama-server"
    )
    how.add_argument("--llama-server", type=Path, default=LLAMA_SERVER, metavar="PATH",
                     help="default: what scripts/build-llama-server builds")  # fmt: skip
    what = parser.add_argument_group("what is asked")
    what.add_argument("--streams", type=_numbers, default=[1, 4, 8], metavar="N,N,...",
                      help="at a time, one after the other (default 1,4,8)")  # fmt: skip
    what.add_argument("--words", type=_positive, default=24, help="of each prompt (default 24)")
    what.add_argument("--shared-words", type=_count, default=0, help="in front of all (default 0)")
    what.add_argument("--prompts", type=Path, metavar="FILE.json",
                      help="a list of prompts to ask in turn, instead of words")  # fmt: skip
    what.add_argument("--tokens", type=_positive, default=96, help="of each answer (default 96)")
    what.add_argument("--requests", type=_positive, default=1, metavar="R",
                      help="per stream and round, one after the other (default 1)")  # fmt: skip
    what.add_argument("--temperature", type=float, default=0.0, help="default 0")
    what.add_argument("--api", choices=("chat", "completions"), default="chat")
    what.add_argument("--model-name", help="default: the first that a server lists")
    what.add_argument(
        "--no-ignore-eos", action="store_true", help="for servers that do not know ignore_eos"
    )
    what.add_argument("--seed", type=int, help="of the prompts (default: a new one, printed)")
    rounds = parser.add_argument_group("for how long")
    rounds.add_argument("--warm-up", type=_count, default=1, help="rounds of each (default 1)")
    rounds.add_argument("--margin", type=_above_zero, default=0.05,
                        help="width of the ratios' 95 %% intervals (default 0.05)")  # fmt: skip
    rounds.add_argument("--min-pairs", type=_positive, default=6, help="default 6")
    rounds.add_argument("--max-pairs", type=_positive, default=40, help="default 40")
    rounds.add_argument("--max-minutes", type=float, metavar="M",
                        help="for all; shared evenly, two pairs at least")  # fmt: skip
    rounds.add_argument("--start-timeout", type=float, default=300.0, metavar="S",
                        help="seconds until a server must be ready (default 300)")  # fmt: skip
    rounds.add_argument("--sample-seconds", type=float, default=1.0, metavar="S",
                        help="between two looks at the memory (default 1)")  # fmt: skip
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, for machines")
    out.add_argument("--plot", type=Path, metavar="FILE.svg", help="throughput and TTFT")
    out.add_argument("--device-note", metavar="TEXT", help="to stand beside the figures")
    return parser


def prompts_in(path: Path | None) -> tuple[str, ...]:
    """Those of ``--prompts``. Raises ValueError with what is wrong with the file."""
    if path is None:
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--prompts {path}: {error}") from None
    if not (isinstance(found, list) and found and all(isinstance(each, str) for each in found)):
        raise ValueError(f"--prompts {path} is not a list of prompts")
    return tuple(found)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _above_zero(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number


def _numbers(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def entries(arguments: argparse.Namespace) -> list[Entry]:
    """Who takes part, in order. ValueError says what is wrong with the words."""
    found = []
    slots = arguments.slots or max(arguments.streams)
    for path in (arguments.compare_llama_server, arguments.bare):
        if path is not None and not path.is_file():
            raise ValueError(f"there is no {path}")
    if arguments.compare_llama_server is not None:
        if not os.access(arguments.llama_server, os.X_OK):
            raise ValueError(
                f"there is no {arguments.llama_server}: run scripts/build-llama-server, or give "
                "--llama-server"
            )
        found.append(_ours(arguments, arguments.compare_llama_server, slots))
        found.append(_theirs(arguments, arguments.compare_llama_server, slots))
    for text in arguments.server:
        name, command = _named(text, "--server")
        words = shlex.split(command)
        if not any("{port}" in word for word in words):
            raise ValueError(f"--server {name} has no {{port}} in its command")
        found.append(Entry(name, tuple(words)))
    for text in arguments.url:
        name, url = _named(text, "--url")
        if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
            raise ValueError(f"--url {name}: {url!r} is not http://HOST:PORT")
        found.append(Entry(name, url=url))
    if arguments.bare is not None:
        if slots < max(arguments.streams):
            raise ValueError("--bare needs as many --slots as there are streams")
        found.append(_bare(arguments, slots))
    names = [entry.name for entry in found]
    if not names:
        raise ValueError("name a --server, a --url, --bare or --compare-llama-server")
    if len(set(names)) < len(names):
        raise ValueError("two have the same name")
    if arguments.baseline is not None and arguments.baseline not in names:
        raise ValueError(f"--baseline: there is no {arguments.baseline!r}")
    return found


def baseline_of(arguments: argparse.Namespace, found: Sequence[Entry]) -> str:
    if arguments.baseline is not None:
        return str(arguments.baseline)
    return THEIRS if arguments.compare_llama_server is not None else found[0].name


def _named(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{option} {text!r} is not NAME=...")
    return name, value


def _threads(arguments: argparse.Namespace) -> int:
    if arguments.threads is not None:
        return int(arguments.threads)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinities
        return os.cpu_count() or 1


def _merged(defaults: dict[str, str | None], more: str) -> list[str]:
    """Options and their values; those that ``more`` names too are only there."""
    words = shlex.split(more)
    given = {word.partition("=")[0] for word in words}
    kept = [(flag, value) for flag, value in defaults.items() if flag not in given]
    return [word for pair in kept for word in pair if word is not None] + words


def _our_options(
    arguments: argparse.Namespace, model: Path, slots: int, prefixes: int
) -> list[str]:
    defaults: dict[str, str | None] = {
        "--target-device": arguments.device,
        "--max-ctx": str(arguments.ctx),
        "--max-concurrency": str(slots),
        "--threads": str(_threads(arguments)),
        "--prefix-cache-slots": str(prefixes),
    }
    return ["--model", str(model.absolute()), *_merged(defaults, arguments.ours)]


def _ours(arguments: argparse.Namespace, model: Path, slots: int) -> Entry:
    options = _our_options(arguments, model, slots, arguments.prefix_cache_slots)
    command = [sys.executable, "-m", "dflash_trio", "--port", "{port}", *options]
    return Entry(OURS, tuple(command), kind="ours")


def _theirs(arguments: argparse.Namespace, model: Path, slots: int) -> Entry:
    backend, _, index = arguments.device.partition(":")
    on_gpu = backend in _GGML_NAMES
    defaults: dict[str, str | None] = {
        "--host": "127.0.0.1",
        "-c": str(slots * arguments.ctx),
        "-np": str(slots),
        "-t": str(_threads(arguments)),
        "--no-webui": None,
        "--device": f"{_GGML_NAMES[backend]}{index}" if on_gpu else "none",
    }
    if on_gpu:
        defaults["-ngl"] = "999"
    words = [str(arguments.llama_server.absolute()), "-m", str(model.absolute())]
    return Entry(THEIRS, (*words, "--port", "{port}", *_merged(defaults, arguments.theirs)))


def _bare(arguments: argparse.Namespace, slots: int) -> Entry:
    # Keeping what no prompt will begin with costs, and a ceiling has no such costs.
    prefixes = arguments.prefix_cache_slots if arguments.shared_words else 0
    options = _our_options(arguments, arguments.bare, slots, prefixes)
    return Entry(BARE, tuple(options), kind="bare")
