"""The options of one model that set policy for the whole process, so never beside balancing."""

from __future__ import annotations

from functools import partial

from dflash_trio.cli import values
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.values import choice, integer, number

_split = partial(Option, scope=Scope.SINGLE_MODEL)
_later = partial(_split, available=False)
_kvflash = partial(_later, instead="bound the cache with --max-ctx or --kv-pool-tokens")
_spark = partial(_later, instead="keep the experts on the CPU with --cpu-moe")
_compression = partial(_later, instead="prompts are worked off whole")
_remote_draft = partial(_later, instead="no draft is asked of another program")

# The formatter would spread each row of the table over eight lines.
# fmt: off
SINGLE_MODEL_OPTIONS: tuple[Option, ...] = (
    _kvflash("kvflash", takes=integer(1, 2**24, words={"auto": "auto"}, metavar="N|auto"),
             default="off", help="KVFlash: tokens kept on the device, the rest in host memory."),
    _kvflash("kvflash-policy", takes=choice("drafter", "lru"), default="lru",
             help="KVFlash: what decides which tokens stay."),
    _kvflash("kvflash-tau", takes=values.TOKENS, default="the policy's",
             help="KVFlash: tokens between two decisions."),
    _spark("spark", takes=None, default="off",
           help="Spark: stream experts through device memory."),
    _spark("spark-vram", takes=number(0, 65536, above=True, metavar="GIB"), default="what is free",
           help="Spark: device memory for experts, in GiB."),
    _spark("spark-slots", takes=integer(1, 65536), default="what fits",
           help="Spark: experts held on the device."),
    _compression("prefill-compression", takes=choice("off", "auto", "always"), default="off",
                 help="Compression: whether long prompts are shortened before the prefill."),
    _compression("prefill-threshold", takes=values.TOKEN_BUDGET, default="the drafter's",
                 help="Compression: prompts from this many tokens on are compressed."),
    _compression("prefill-keep-ratio", takes=values.RATIO, default="the drafter's",
                 help="Compression: the share of a prompt that is kept."),
    _compression("prefill-curve", takes=values.CURVE_POINT, default="none", many_values=True,
                 help="Compression: the kept share R from T tokens on, in rising order of T."),
    _compression("prefill-drafter", takes=values.PATH, default="none",
                 help="Compression: the GGUF file of the model that judges the prompt."),
    _compression("prefill-skip-park", takes=None, default="off",
                 help="Compression: leave the drafter on the device between prompts."),
    _remote_draft("draft-ipc-bin", takes=values.PATH, default="none",
                  help="Remote drafts: the program that drafts."),
    _remote_draft("draft-ipc-work-dir", takes=values.DIRECTORY, default="a temporary folder",
                  help="Remote drafts: the folder shared with that program."),
    _remote_draft("draft-ipc-ring-cap", takes=integer(1, 2**24), default="the program's",
                  help="Remote drafts: entries of the shared ring."),
    _split("target-devices", takes=values.DEVICE_LIST, default="none", field="target_devices",
           help="Splitting: the GPUs that share this model's layers."),
    _split("target-layer-split", takes=values.WEIGHTS, default="even", field="target_layer_split",
           help="Splitting: each device's share of the layers, in the order of --target-devices."),
    _split("peer-access", takes=None, default="off", field="peer_access",
           help="Splitting: let the GPUs read each other's memory."),
)
# fmt: on
