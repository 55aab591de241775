"""``--config FILE.toml``: the same options without their dashes, in three kinds of tables.

Launch options stand at the top level, listener options in ``[listener]``, and each ``[[model]]``
table is a block, in order. Flags are booleans (``false`` is "not given"), repeatable options are
arrays. Paths mean what they mean on the command line: relative ones start at the working folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
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

_TOML_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a float",
    list: "an array",
    dict: "a table",
}
_ENORMOUS = 10**30
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
    document = _parse(path)
    source = shown(path)
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


def _parse(path: str) -> dict[str, Any]:
    source = shown(path)
    content = read_file(path, "--config")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refusal(f"{source} is not UTF-8 at line {line}", "save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        # Its text ends with "(at line L, column C)", save for one case.
        last = content.count(b"\n") + 1
        problem = str(error).replace("at end of document", f"at the end, line {last}")
        raise refusal(f"{source} is not TOML, {problem}", "correct that line") from None
    except (ValueError, RecursionError) as error:
        # An integer of thousands of digits, or brackets nested as deep.
        problem = f"{source} cannot be read as TOML, {type(error).__name__}"
        raise refusal(problem, "look for a huge number or deep nesting") from None


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
        texts = tuple(_texts(option, entry, table.where))
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


def _texts(option: Option, entry: Any, where: str) -> Iterable[str]:
    """The entry's values as the command line would spell them."""
    if option.takes is None:
        _check_type(option, entry, (bool,), where)
        return []
    if not option.is_list:
        _check_type(option, entry, option.takes.toml, where)
        return [_text(entry)]
    _check_type(option, entry, (list,), where)
    for element in entry:
        _check_type(option, element, option.takes.toml, where, " of strings")
    return [_text(element) for element in entry]


def _text(scalar: Any) -> str:
    if isinstance(scalar, int):
        # Hexadecimal may be longer than Python is willing to write out in decimal; what is cut
        # off here is out of every range anyway.
        return str(min(max(scalar, -_ENORMOUS), _ENORMOUS))
    return scalar if isinstance(scalar, str) else repr(scalar)


def _check_type(
    option: Option, entry: Any, allowed: tuple[type, ...], where: str, elements: str = ""
) -> None:
    # The exact type: TOML's true is a Python bool, and so an int.
    if type(entry) in allowed:
        return
    found = _TOML_NAMES.get(type(entry), "a date or time")
    if elements:
        raise refusal(f"{option.name} has {found} in its array", f"write an array{elements}", where)
    wanted = " or ".join(_TOML_NAMES[kind] for kind in allowed)
    raise refusal(f"{option.name} is {found}", f"write {wanted}", where)
