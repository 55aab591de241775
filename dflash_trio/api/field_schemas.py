"""JSON Schemas of request classes, read off their fields: types, bounds, what is required.

So the server's description of itself cannot drift from what it checks. Only the types with a
structure hook of their own have to say what they look like, beside the hook.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from .json_body import json_type_name
from .validation import FieldProblem, InRange, converter, is_read_by_fields

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}

_PLAIN: dict[Any, Schema] = {
    str: STRING,
    int: INTEGER,
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): NULL,
    Any: {},
}
_DESCRIBED: dict[type, Schema] = {}


def describe(cls: type, schema: Schema) -> None:
    """Say what a type with a structure hook of its own looks like in JSON."""
    _DESCRIBED[cls] = schema


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def array_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def object_of(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> Schema:
    """An object that may have further properties."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def schema_field(schema: Schema, **more: Any) -> Any:
    """An attrs field whose validator knows more than its type does: what it takes in JSON."""
    return field(metadata={"schema": schema}, **more)


def schema_of(kind: Any) -> Schema:
    """The JSON Schema of a request class, or of the type of one of its fields."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _DESCRIBED:
        return _DESCRIBED[kind]
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return any_of(*map(schema_of, typing.get_args(kind)))
    if origin is tuple:
        return array_of(schema_of(typing.get_args(kind)[0]))
    if attrs.has(kind) and is_read_by_fields(kind):
        return _class_schema(kind)
    # A type with a hook of its own that nobody has described: it may look like anything.
    return {}


def _class_schema(cls: type[attrs.AttrsInstance]) -> Schema:
    attrs.resolve_types(cls)
    properties: dict[str, Schema] = {}
    required = []
    for attribute in attrs.fields(cls):
        properties[attribute.name] = _field_schema(attribute)
        if attribute.default is attrs.NOTHING:
            required.append(attribute.name)
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return schema


def _field_schema(attribute: attrs.Attribute[Any]) -> Schema:
    schema: Schema = attribute.metadata.get("schema") or schema_of(attribute.type)
    bounds = attribute.validator
    if isinstance(bounds, InRange):
        limits: Schema = {}
        if bounds.low is not None:
            limits["exclusiveMinimum" if bounds.exclusive_low else "minimum"] = bounds.low
        if bounds.high is not None:
            limits["maximum"] = bounds.high
        # Bounds of numbers say nothing of null, so they may stand beside the choice.
        schema = {**schema, **limits}
    return schema


@frozen
class JsonObject:
    """An object whose inside is somebody else's: a schema, arguments, variables."""

    value: Mapping[str, Any]


def _structure_object(value: Any, _: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    return JsonObject(value)


converter.register_structure_hook(JsonObject, _structure_object)
describe(JsonObject, OBJECT)
