"""Given options as the fields of a configuration object."""

from __future__ import annotations

from typing import Any

from dflash_trio.cli.given import Values
from dflash_trio.config import SamplingDefaults

_SAMPLING = "sampling."
_EFFORTS = "reasoning_efforts."


def fields_of(values: Values) -> dict[str, Any]:
    """What the table says goes straight into configuration fields."""
    return {
        value.option.field: value.value if value.option.takes else value.option.flag_value
        for value in values.values()
        if value.option.field
    }


def model_fields_of(values: Values) -> dict[str, Any]:
    """The same for what a model block or a card says, its values of one kind gathered."""
    fields = fields_of(values)
    given = frozenset(fields)
    return {
        "sampling": SamplingDefaults(**_taken(fields, _SAMPLING)),
        "reasoning_efforts": _taken(fields, _EFFORTS),
        "given": given,
        **fields,
    }


def _taken(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The fields with a prefix, without it; they are gone from ``fields`` then."""
    names = [name for name in fields if name.startswith(prefix)]
    return {name.removeprefix(prefix): fields.pop(name) for name in names}
