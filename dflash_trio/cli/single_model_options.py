"""The options of one model that set policy for the whole process, so never beside balancing."""

from __future__ import annotations

from functools import partial

from dflash_trio.cli import values
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.values import choice, integer, number

_single = partial(Option, scope=Scope.SINGLE_MODEL, available=False)

# The formatter would spread each row of the table over eight lines.
# fmt: off
SINGLE_MODEL_OPTIONS: tuple[Option, ...] = (
    _single("kvflash", takes=integer(1, 2**24, words={"auto": "auto"}, metavar="N|auto"),
            default="off", help="KVFlash: tokens kept on the device, the rest in host memory."),
    _single("kvflash-policy", takes=choice("drafter", "lru"), default="lru",
            help="KVFlash: what decides which tokens stay."),
    _single("kvflash-tau", takes=values.TOKENS, default="the policy's",
            help="KVFlash: tokens between two decisions."),
    _single("spark", takes=None, default="off",
            help="Spark: stream experts through device memory."),
    _single("spark-vram", takes=number(0, 65536, above=True, metavar="GIB"), default="what is free",
            help="Spark: device memory for experts, in GiB."),
    _single("spark-slots", takes=integer(1, 65536), default="what fits",
            help="Spark: experts held on the device."),
    _single("prefill-compression", takes=choice("off", "auto", "always"), default="off",
            help="Compression: whether long prompts are shortened before the prefill."),
    _single("prefill-threshold", takes=values.TOKEN_BUDGET, default="the drafter's",
            help="Compression: prompts from this many tokens on are compressed."),
    _single("prefill-keep-ratio", takes=values.RATIO, default="the drafter's",
            help="Compression: the share of a prompt that is kept."),
    _single("prefill-curve", takes=values.CURVE_POINT, default="none", many_values=True,
            help="Compression: the kept share R from T tokens on, in rising order of T."),
    _single("prefill-drafter", takes=values.PATH, default="none",
            help="Compression: the GGUF file of the model that judges the prompt."),
    _single("prefill-skip-park", takes=None, default="off",
            help="Compression: leave the drafter on the device between prompts."),
    _single("draft-ipc-bin", takes=values.PATH, default="none",
            help="Remote drafts: the program that drafts."),
    _single("draft-ipc-work-dir", takes=values.DIRECTORY, default="a temporary folder",
            help="Remote drafts: the folder shared with that program."),
    _single("draft-ipc-ring-cap", takes=integer(1, 2**24), default="the program's",
            help="Remote drafts: entries of the shared ring."),
    _single("target-devices", takes=values.DEVICE_LIST, default="none",
            help="Splitting: the devices that share this model's layers."),
    _single("target-layer-split", takes=values.WEIGHTS, default="even",
            help="Splitting: each device's share of the layers."),
    _single("peer-access", takes=None, default="off",
            help="Splitting: let the devices read each other's memory."),
)
# fmt: on
