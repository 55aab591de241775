"""From a checked launch to the frozen configuration the server is built on."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trio.cli.errors import refusal
from dflash_trio.cli.fields import fields_of, model_fields_of
from dflash_trio.cli.given import Block, Given, ParsedLaunch, Values
from dflash_trio.cli.input_files import read_file
from dflash_trio.cli.model_card import read_card
from dflash_trio.cli.selection import Selection
from dflash_trio.cli.values import BadValue, check_api_key
from dflash_trio.config import ListenerConfig, ModelConfig, ServerConfig

API_KEY_VARIABLE = "DFLASH_API_KEY"


def build_config(
    parsed: ParsedLaunch, selection: Selection, env: Mapping[str, str]
) -> ServerConfig:
    """The configuration of a launch; UsageError if a file or variable it needs is not good."""
    return ServerConfig(
        models=tuple(_model(block) for block in selection.loaded),
        listener=_listener(parsed.listener, env),
        load_balancing=selection.load_balancing,
        unused=tuple(block.name for block in selection.unused),
        **fields_of(parsed.launch),
    )


def _model(block: Block) -> ModelConfig:
    template = block.values.get("chat-template-file")
    if template is not None:
        read_file(template.value, template.spelling, template.where)
    return ModelConfig(
        path=block.path,
        name=block.name,
        position=block.position,
        card=read_card(block),
        **model_fields_of(block.values),
    )


def _listener(values: Values, env: Mapping[str, str]) -> ListenerConfig:
    for name in ("tls-cert", "tls-key"):
        if name in values:
            read_file(values[name].value, values[name].spelling, values[name].where)
    return ListenerConfig(api_keys=_api_keys(values, env), **fields_of(values))


def _api_keys(values: Values, env: Mapping[str, str]) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    if "api-key" in values:
        keys += values["api-key"].value
    if "api-key-file" in values:
        given = values["api-key-file"]
        for path in given.value:
            keys += _keys_in_file(path, given)
    if API_KEY_VARIABLE in env:
        try:
            key = env[API_KEY_VARIABLE].encode("utf-8", "surrogateescape")
            keys.append(check_api_key(key))
        except (BadValue, UnicodeEncodeError) as error:
            problem = str(error) if isinstance(error, BadValue) else "is not text"
            raise refusal(
                f"the key in the environment variable {API_KEY_VARIABLE} {problem}",
                "set another or unset the variable",
            ) from None
    return tuple(dict.fromkeys(keys))


def _keys_in_file(path: str, given: Given) -> list[bytes]:
    keys = []
    for number, line in enumerate(read_file(path, given.spelling, given.where).splitlines(), 1):
        if not line.strip():
            continue
        try:
            keys.append(check_api_key(line.strip()))
        except BadValue as bad:
            problem = f"{given.spelling} {path}: the key in line {number} {bad}"
            raise refusal(problem, "correct that line", given.where) from None
    if not keys:
        raise refusal(f"{given.spelling} {path} holds no key", "write one key a line", given.where)
    return keys
