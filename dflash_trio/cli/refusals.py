"""What a launch in good form may still not ask for.

Only what loads is judged here: an unused block keeps whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_trio.cli.errors import UsageError, refusal, shown
from dflash_trio.cli.given import Block, Given, ParsedLaunch, Values
from dflash_trio.cli.option import Scope
from dflash_trio.cli.selection import Selection
from dflash_trio.config import PROMPT_LOOKUP

MOST_SLOTS_WITH_TREES = 240
"""llama.cpp knows 256 sequences, and a tree's branches are some of them."""
_PLAIN_CACHE_TYPES = ("f32", "f16", "bf16")
_PEER_BACKENDS = ("cuda", "hip")


def check_launch_options(parsed: ParsedLaunch) -> None:
    """Refuse what the launch and listener options cannot mean together."""
    for value in (*parsed.launch.values(), *parsed.listener.values()):
        _check_available(value)
    listener = parsed.listener
    for one, other in (("tls-cert", "tls-key"), ("tls-key", "tls-cert")):
        if one in listener and other not in listener:
            raise listener[one].refused(f"is given without --{other}", "give both or neither")
    if "no-cors" in listener and "cors-origin" in listener:
        raise listener["no-cors"].refused("contradicts --cors-origin", "leave one of them out")
    host, port = listener.get("host"), listener.get("port")
    if host is not None and port is not None and host.value.startswith("unix:"):
        raise port.refused("has no meaning with a Unix socket", "leave it out")


def check_selection(selection: Selection) -> None:
    """Refuse what a block that loads asks for and cannot have."""
    # Balancing first: what it excludes will not become possible with a later build.
    if selection.load_balancing:
        for block in selection.loaded:
            _check_shareable(block.values)
    for block in selection.loaded:
        for value in block.values.values():
            _check_available(value)
        _check_together(block.values)
    _check_names(selection.loaded)


def _check_shareable(values: Values) -> None:
    for value in values.values():
        if value.option.scope is Scope.SINGLE_MODEL:
            raise value.refused(
                "sets policy for the whole process and cannot stand beside --load-balancing",
                "leave one of them out",
            )
        if value.option.name == "draft-device" and str(value.value).startswith("rpc:"):
            raise value.refused(
                f"{shown(value.texts[0])} is remote and cannot stand beside --load-balancing",
                "name a device of this host",
            )


def _check_available(value: Given) -> None:
    option = value.option
    if not option.available:
        instead = f"; {option.instead}" if option.instead else ""
        raise value.refused("is not available yet", f"leave it out{instead}")
    if option.only_value and option.takes is not None:
        only = option.takes.parse(option.only_value)
        if value.value != only:
            raise refusal(
                f"{value.written} is not available yet",
                f"only {option.only_value} is, write that or leave it out",
                value.where,
            )


def _check_together(values: Values) -> None:
    cache, attention = values.get("cache-type-v"), values.get("flash-attn")
    if cache is not None and attention is not None:
        quantized = cache.value not in _PLAIN_CACHE_TYPES
        if quantized and attention.value == "off":
            raise refusal(
                f"{cache.written} needs flash attention, and {attention.spelling} is off",
                f"set {attention.spelling} to on or auto, or {cache.spelling} to f16",
                cache.where,
            )
    layers, device = values.get("gpu-layers"), values.get("target-device")
    on_cpu = device is not None and device.value is not None and device.value.is_cpu
    if layers is not None and device is not None and on_cpu and layers.value > 0:
        raise refusal(
            f"{layers.written} has no GPU to go to with {device.written}",
            f"leave {layers.spelling} out or place the model on a GPU",
            layers.where,
        )
    _check_draft(values)
    _check_split(values)


def _check_draft(values: Values) -> None:
    """Refuse what the options of drafting cannot mean."""
    draft, device = values.get("draft"), values.get("draft-device")
    for name in ("draft-device", "draft-max", "ddtree", "lazy-draft"):
        if name in values and draft is None:
            raise values[name].refused("has no draft to be about", "give --draft or leave it out")
    if "ddtree-budget" in values and "ddtree" not in values:
        raise values["ddtree-budget"].refused(
            "has no tree to be about", "give --ddtree or leave it out"
        )
    slots = values.get("max-concurrency")
    if "ddtree" in values and slots is not None and slots.value > MOST_SLOTS_WITH_TREES:
        raise values["ddtree"].refused(
            f"has no sequence ids left beside {slots.written}: there are 256 in all",
            f"lower {slots.spelling} to {MOST_SLOTS_WITH_TREES} or leave it out",
        )
    if draft is not None and draft.value == PROMPT_LOOKUP:
        if "ddtree" in values:
            raise values["ddtree"].refused(
                f"has no meaning with {draft.written}, which knows one continuation", "leave it out"
            )
        for name in ("draft-device", "lazy-draft"):
            if name in values:
                raise values[name].refused(
                    f"has no meaning with {draft.written}, which loads nothing", "leave it out"
                )
    if device is not None and str(device.value).startswith("rpc:"):
        raise refusal(
            f"{device.written} is remote, and drafts on other hosts are not available yet",
            "name a device of this host",
            device.where,
        )


def _check_split(values: Values) -> None:
    """Refuse what the options of splitting cannot mean."""
    devices, weights = values.get("target-devices"), values.get("target-layer-split")
    for name in ("target-layer-split", "peer-access"):
        if name in values and devices is None:
            raise values[name].refused(
                "has a meaning for several devices only", "give --target-devices or leave it out"
            )
    if devices is None:
        return
    if "target-device" in values:
        raise devices.refused("contradicts --target-device", "leave one of them out")
    named = list(devices.value)
    if len(set(named)) < len(named):
        raise refusal(
            f"{devices.written} names a device twice", "name each one once", devices.where
        )
    if any(device.is_cpu for device in named):
        raise refusal(
            f"{devices.written} has the CPU among the GPUs",
            "name GPUs only; --gpu-layers N leaves the other layers on the CPU",
            devices.where,
        )
    if weights is not None and len(weights.value) != len(named):
        raise refusal(
            f"{weights.written} has {len(weights.value)} weights for {len(named)} devices",
            "give one weight for each device",
            weights.where,
        )
    others = [device for device in named if device.backend not in _PEER_BACKENDS]
    if "peer-access" in values and others:
        raise values["peer-access"].refused(
            f"is for {' and '.join(_PEER_BACKENDS)}, and {others[0]} is neither", "leave it out"
        )


def _check_names(blocks: Iterable[Block]) -> None:
    """Names and aliases share one namespace, in which clients ask for models."""
    owners: dict[str, Block] = {}
    for block in sorted(blocks, key=lambda block: block.position):
        aliases = block.values.get("alias")
        for name in (block.name, *(aliases.value if aliases is not None else ())):
            if name in owners:
                raise _taken(name, owners[name], block)
            owners[name] = block


def _taken(name: str, owner: Block, block: Block) -> UsageError:
    if owner is block:
        return refusal(
            f"the name {shown(name)} is given twice", "leave its --alias out", block.label
        )
    nameless = "model-name" not in block.values or "model-name" not in owner.values
    return refusal(
        f"the name {shown(name)} is already that of model block {owner.position + 1}",
        "give one of them a --model-name" if nameless else "give one of them another name",
        block.label,
    )
