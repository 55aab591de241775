"""The command line of scripts/train-draft."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("torch", "numpy", "gguf", "jinja2")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/train-draft",
        description="Trains a DFlash draft (a block-diffusion draft model) for a llama-architecture"
        " GGUF on answers that the model itself gives, and writes a Q8_0 GGUF that llama.cpp runs. "
        "Needs a Python with torch, numpy, gguf and jinja2 ($PYTHON, else python3) and, to be of "
        "use, one GPU. A run that finds its own checkpoint in --work goes on where that one ended. "
        "Exit code 0: the draft is written; 1: it could not be; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="GGUF", help="the model to draft for")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="for the draft, its curves, its table",
    )
    add("--work", type=Path, required=True, metavar="DIR", help="for data and checkpoints")
    add("--name", default="draft", help="of the files in --out (default draft)")
    add("--device", default="cuda", help="torch's name of it (default cuda)")
    add("--seed", type=int, default=1)

    time_ = parser.add_argument_group("time")
    add = time_.add_argument
    add("--minutes", type=float, default=12.0, help="of training, all runs together (default 12)")
    add(
        "--stop-after",
        type=float,
        default=1e9,
        metavar="S",
        help="seconds from the start of this run to its end, everything included",
    )
    add(
        "--final",
        action="store_true",
        help="this is the last run: fit the schedule's rest into what --stop-after leaves",
    )
    add(
        "--reserve",
        type=float,
        default=30.0,
        metavar="S",
        help="of --stop-after for judging and writing the draft (default 30)",
    )
    add("--max-steps", type=int, default=10**9, help="of training, all runs together")
    add("--checkpoint-every", type=float, default=60.0, metavar="S", help="(default 60)")
    add(
        "--judge-every",
        type=float,
        default=30.0,
        metavar="S",
        help="on the held-out prompts, while training (default 30)",
    )

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--prompts", type=int, default=48000, help="from templates (default 48000)")
    add(
        "--own-prompts",
        type=int,
        default=120000,
        help="questions that the target makes up itself, begun (default 120000)",
    )
    add("--answer-tokens", type=int, default=320, help="at most (default 320)")
    add("--prompt-tokens", type=int, default=96, help="at most (default 96)")
    add("--rows", type=int, default=2048, help="answered at a time (default 2048)")
    add(
        "--drawn-share",
        type=float,
        default=0.4,
        help="of answers whose first few tokens are drawn at temperature 1 (default 0.4)",
    )
    add("--generate-seconds", type=float, default=150.0, help="at most (default 150)")
    add(
        "--feature-bytes",
        type=float,
        default=95e9,
        help="of device memory for layer inputs at most (default 95e9); answers beyond it are left",
    )
    add("--held-out-prompts", type=int, default=10, help="of each kind (default 10)")
    add("--held-out-tokens", type=int, default=200, help="of each held-out answer (default 200)")
    add(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answer by CUDA graphs",
    )
    add("--target-type", default="auto", help="float16 on a GPU, float32 elsewhere")
    add(
        "--llama-python",
        default=sys.executable,
        metavar="PYTHON",
        help="one with llama-cpp-python, for vocabularies that are not byte-level BPE",
    )

    draft = parser.add_argument_group("draft")
    add = draft.add_argument
    add("--layers", type=int, default=5, help="(default 5)")
    add("--feed-forward", type=int, default=864, help="width, a multiple of 32 (default 864)")
    add("--block", type=int, default=8, help="tokens, the known one included (default 8)")
    add("--target-layers", metavar="N,N", help="whose inputs it sees (default four, evenly from 1)")
    add("--mask-token", type=int, help="(default: a control token with no other use)")
    add("--rope-base", type=float, help="(default the target's)")
    add("--max-bytes", type=int, default=16_000_000, help="of the file (default 16000000)")

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--batch", type=int, default=128, help="texts a step (default 128)")
    add("--anchors", type=int, default=32, help="blocks a text and step (default 32)")
    add(
        "--start-from",
        type=Path,
        metavar="GGUF",
        help="a draft that this script wrote, of the same shape: begin with its weights instead of "
        "random ones, best at a smaller --rate; a checkpoint in --work goes before it",
    )
    add("--rate", type=float, default=2e-3, help="learning rate at its peak (default 0.002)")
    add("--warm-up", type=int, default=100, help="steps (default 100)")
    add("--decay", type=float, default=0.05, help="of weights (default 0.05)")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add(
        "--soft",
        type=float,
        default=0.5,
        help="share of the loss on the target's own chances of its --candidates likeliest tokens "
        "instead of the one it chose (default 0.5)",
    )
    add("--candidates", type=int, default=4, help="(default 4)")
    add(
        "--short-blocks",
        type=float,
        default=0.1,
        help="share of blocks trained at half the length (default 0.1)",
    )
    add(
        "--position-decay",
        type=float,
        default=4.0,
        help="position i of a block weighs exp(-(i - 1) / this) (default 4)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="by torch.compile")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    begun = time.monotonic()
    reader = parser()
    arguments = reader.parse_args(argv)
    if not arguments.target.is_file():
        reader.error(f"there is no {arguments.target}")
    if not 0 <= arguments.soft < 1:
        reader.error("--soft is a share below 1")
    if arguments.block < 2:
        reader.error("--block is 2 at least: a known token and a guessed one")
    if arguments.feed_forward % 32:
        reader.error("--feed-forward is a multiple of 32: Q8_0 knows no other rows")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(
            f"scripts/train-draft: {sys.executable} has no {names}: "
            f"pip install {' '.join(missing)}, or name another Python by PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 1
    from .run import run
    from .source import UnfitTarget
    from .start import UnfitStart

    try:
        return run(arguments, begun)
    except UnfitTarget as error:
        print(f"scripts/train-draft: {arguments.target} does not fit: {error}", file=sys.stderr)
        return 1
    except UnfitStart as error:
        where = f"--start-from {arguments.start_from}"
        print(f"scripts/train-draft: {where}: {error}", file=sys.stderr)
        return 1
