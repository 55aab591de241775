"""``--config FILE.toml``: the same options without their dashes, in three kinds of tables.

Launch options stand at the top level, listener options in ``[listener]``, and each ``[[model]]``
table is a block, in order. Flags are booleans (``false`` is "not given"), repeatable options are
arrays. Paths mean what they mean on the command line: relative ones start at the working folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from dflash_trio.cli.errors import UsageError, refusal, shown
from dflash_trio.cli.given import (
    Block,
    Given,
    ParsedLaunch,
    added,
    block_label,
    check_default_name,
    default_model_name,
    given,
)
from dflash_trio.cli.input_files import read_file
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.option_table import BY_NAME, OPTIONS, REMOVED, nearest
from dflash_trio.cli.toml_text import parse_toml, texts_of

_HOME = {
    Scope.LAUNCH: "put it at the top level, before the first table",
    Scope.LISTENER: "put it into the [listener] table",
    Scope.MODEL: "put it into a [[model]] table",
    Scope.SINGLE_MODEL: "put it into a [[model]] table",
}


@frozen
class _Table:
    """One table being read: who may stand in it, and how messages name it."""

    scopes: tuple[Scope, ...]
    where: str
    subtables: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        known = (option.name for option in OPTIONS if option.in_file)
        own = [name for name in known if BY_NAME[name].scope in self.scopes]
        return [*own, *self.subtables]


def read_config_file(path: str) -> ParsedLaunch:
    """Read a configuration file; UsageError names the file, the table and the key."""
    source = shown(path)
    document = parse_toml(read_file(path, "--config"), source)
    top = _Table((Scope.LAUNCH,), f"top level of {source}", ("listener", "model"))
    launch = _read_table(_without(document, "listener", "model"), top)

    listener_table = document.get("listener", {})
    if not isinstance(listener_table, dict):
        raise refusal("listener is no table", "write it as [listener]", source)
    listener = _read_table(listener_table, _Table((Scope.LISTENER,), f"[listener] of {source}"))

    model_tables = document.get("model", [])
    if not isinstance(model_tables, list) or not all(
        isinstance(table, dict) for table in model_tables
    ):
        raise refusal("model is no array of tables", "write each block as [[model]]", source)
    blocks = tuple(
        _read_block(position, table, source) for position, table in enumerate(model_tables)
    )
    return ParsedLaunch(launch, listener, blocks)


def beside_file(from_file: ParsedLaunch, from_line: ParsedLaunch, path: str) -> ParsedLaunch:
    """The file's launch with the command line's launch and listener options laid over it.

    A scalar replaces the file's, values of a repeatable option add to them. Model options have no
    block to go to, so UsageError refuses them.
    """
    for block in from_line.blocks:
        for value in block.values.values():
            raise value.refused(
                "cannot stand beside --config", f"put it into a [[model]] table of {shown(path)}"
            )
    return ParsedLaunch(
        _overlaid(from_file.launch, from_line.launch),
        _overlaid(from_file.listener, from_line.listener),
        from_file.blocks,
    )


def _overlaid(below: Mapping[str, Given], above: Mapping[str, Given]) -> dict[str, Given]:
    result = dict(below)
    for name, value in above.items():
        earlier = below.get(name)
        adds = earlier is not None and value.option.repeatable
        result[name] = added(earlier, value) if adds and earlier else value
    return result


def _without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in names}


def _read_block(position: int, table: Mapping[str, Any], source: str) -> Block:
    label = block_label(position, _early_name(table), source)
    values = _read_table(table, _Table((Scope.MODEL, Scope.SINGLE_MODEL), label))
    if "model" not in values:
        raise refusal("the model's path is missing", 'add model = "PATH"', label)
    block = Block(position, values, source)
    check_default_name(block)
    return block


def _early_name(table: Mapping[str, Any]) -> str:
    """The block's name for messages, from entries that may still turn out to be wrong."""
    name, path = table.get("model-name"), table.get("model")
    if isinstance(name, str) and name.strip():
        return name
    return default_model_name(path) if isinstance(path, str) else ""


def _read_table(entries: Mapping[str, Any], table: _Table) -> dict[str, Given]:
    result: dict[str, Given] = {}
    for key, entry in entries.items():
        option = BY_NAME.get(key)
        if option is None or not option.in_file or option.scope not in table.scopes:
            raise _misplaced(key, option, table)
        if option.takes is None and entry is False:
            continue
        texts = tuple(texts_of(option, entry, table.where))
        if option.takes is not None and not texts:
            continue  # an empty array: nothing given
        result[key] = given(option, key, texts, table.where)
    return result


def _misplaced(key: str, option: Option | None, table: _Table) -> UsageError:
    name = shown(key)
    if option is not None and not option.in_file:
        return refusal(f"{name} belongs to the command line", "remove it here", table.where)
    if option is not None:
        return refusal(f"{name} has no place here", _HOME[option.scope], table.where)
    if key in REMOVED:
        remedy = REMOVED[key].replace("--model PATH", "[[model]]").replace("--", "")
        return refusal(f"{name} does not exist any more", remedy, table.where)
    if key == "path" and Scope.MODEL in table.scopes:
        return refusal("path is no option", "did you mean model?", table.where)
    stripped = key.lstrip("-")
    guess = nearest(stripped, table.names) or nearest(
        stripped, (each.name for each in OPTIONS if each.in_file)
    )
    remedy = f"did you mean {guess}?" if guess else "see --help for the options"
    return refusal(f"{name} is no option", remedy, table.where)
