"""Which blocks load, and in which order requests try them."""

from __future__ import annotations

from attrs import frozen

from dflash_trio.cli.errors import refusal
from dflash_trio.cli.given import Block, Given, ParsedLaunch


@frozen
class Selection:
    """The blocks of a launch, told apart."""

    loaded: tuple[Block, ...]
    """In priority order: the primary, then the others as configured."""
    unused: tuple[Block, ...]
    """Balancing is off, and these are not the primary."""
    load_balancing: bool


def select_blocks(parsed: ParsedLaunch) -> Selection:
    """Choose the primary and what loads; UsageError if the launch leaves that open."""
    blocks = parsed.blocks
    if not blocks:
        raise refusal("no model is given", "name a GGUF file, or see --help")
    for block in blocks:
        # Only the command line's first block can have options and no path.
        if "model" not in block.values:
            first = next(iter(block.values.values()))
            raise refusal(f"{first.spelling} is given, but no model", "name a GGUF file")
    balancing = parsed.launch.get("load-balancing")
    if balancing is not None and len(blocks) < 2:
        raise balancing.refused(
            "needs at least two model blocks, and there is one", "add another model or leave it out"
        )
    wanted = parsed.launch.get("load-balancing-primary-gpu")
    primary = blocks[0] if wanted is None else _primary(wanted, blocks)
    others = tuple(block for block in blocks if block is not primary)
    if balancing is None:
        return Selection((primary,), others, False)
    return Selection((primary, *others), (), True)


def unused_warning(selection: Selection) -> str:
    """The one line on blocks that do not load; empty where all do."""
    if not selection.unused:
        return ""
    labels = " and ".join(block.label for block in selection.unused)
    verb = "does" if len(selection.unused) == 1 else "do"
    return (
        f"load balancing is off: {labels} {verb} not load, "
        "only the form of the options was checked (--load-balancing loads every model)"
    )


def _primary(wanted: Given, blocks: tuple[Block, ...]) -> Block:
    """The one block that is written to load on the wanted device."""
    device = wanted.texts[0] if wanted.value is None else str(wanted.value)
    placed = [(block, _device(block)) for block in blocks]
    matching = [block for block, where in placed if where == device != "auto"]
    if len(matching) == 1:
        return matching[0]
    if matching:
        labels = " and ".join(block.label for block in matching)
        raise wanted.refused(
            f"{device} matches {labels}",
            "it chooses exactly one, so give the others another --target-device",
        )
    written = ", ".join(f"{where} in {block.label}" for block, where in placed)
    raise wanted.refused(
        f"{device} matches no block's --target-device",
        f"choose a device that is written, auto matches nothing: {written}",
    )


def _device(block: Block) -> str:
    """The target device in its one spelling, or ``auto``."""
    given = block.values.get("target-device")
    return "auto" if given is None or given.value is None else str(given.value)
