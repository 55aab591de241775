"""Grammars of calls, in llguidance's dialect of Lark: what the formats' grammars have in common.

White space in JSON is fixed, since a small model that may write white space writes it without end.
For the same reason an object that does not say whether it takes further properties takes none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ...generation.request import Tool
from ..bad_constraint import BadConstraint
from ..guide import control_reference
from ..json_schema import enforceable

# As in text.structured: forced text is not tokenized by the compiler.
_OPTIONS = '%llguidance {"no_forcing": true}'
_DEFINITIONS = ("$defs", "definitions")
_ONE_BY_ONE = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title"}
    | {"$schema", "$id", "$comment", *_DEFINITIONS}
)
"""What a schema may say if its arguments are written one by one."""
_DEEPEST = 8
"""References and choices within each other that are followed to find a type."""


class Rules:
    """The rules of one grammar, by name, in the order they were made."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, body: str) -> str:
        """Makes a rule of this body. Returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """The same for one that is matched as a single expression."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def quoted(text: str) -> str:
    """A literal, written letter by letter."""
    return json.dumps(text)


def literal(text: str, controls: frozenset[str]) -> str:
    """A literal as one control token where it is one, else letter by letter."""
    return control_reference(text) if text in controls else quoted(text)


def json_value(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A rule's body: a value that follows the schema.

    Raises BadConstraint for a schema that cannot be enforced in all it says. With ``lenient`` it is
    enforced as far as it can be.
    """
    try:
        schema = enforceable(schema)
    except BadConstraint:
        if not lenient:
            raise
    options = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": lenient,
    }
    return "%json " + json.dumps({**schema, "x-guidance": options})


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that a forced call's arguments follow: the tool's own, made an object's. A tool
    that names no parameters gets an empty object."""
    schema = dict(tool.parameters or {})
    schema.setdefault("type", "object")
    described = {key for key in schema if key not in ("type", "description", "title", "$schema")}
    if described <= {"properties"} and not schema.get("properties"):
        schema["properties"] = {}
    named, required = schema.get("properties", {}), schema.get("required", [])
    everything_named = (
        isinstance(named, Mapping)
        and isinstance(required, list | tuple)
        and set(required) <= set(named)
    )
    elsewhere = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties"}
    if everything_named and not described & elsewhere:
        schema.setdefault("additionalProperties", False)
    return schema


def call_object(tool: Tool, rules: Rules, key: str) -> str:
    """``{"name": "f", "arguments": {...}}`` with the given key for the arguments."""
    head = quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
    return f"{head} {arguments(tool, rules)} {quoted('}')}"


def arguments(tool: Tool, rules: Rules) -> str:
    """The JSON object of a call's arguments."""
    return rules.add(json_value(arguments_schema(tool), lenient=not tool.strict))


def calls(
    tools: Sequence[Tool],
    one: Callable[[Tool, Rules], str],
    *,
    between: str | None,
    before: str = "",
    after: str = "",
) -> str:
    """A whole grammar: a call of one of the tools; further ones behind ``between`` unless that is
    None; around them all ``before`` and ``after``."""
    rules = Rules()
    call = rules.add(" | ".join(rules.add(one(tool, rules)) for tool in tools))
    further = "" if between is None else f"({between} {call})*"
    return "\n".join([f"start: {before} {call} {further} {after}", *rules.lines, _OPTIONS, ""])


@frozen
class Property:
    """One argument of a tool, for formats that write arguments one by one."""

    name: str
    schema: Mapping[str, Any]
    """With what it refers to: definitions of the tool's schema."""
    required: bool

    @property
    def types(self) -> frozenset[str]:
        """JSON types that the schema names for it; empty: it does not say."""
        return _types(self.schema, self.schema, _DEEPEST)


def properties(tool: Tool) -> tuple[Property, ...]:
    """The arguments that the tool's schema names, also those that it only requires."""
    schema = tool.parameters or {}
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    named = schema.get("properties")
    named = named if isinstance(named, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list | tuple) else ()
    found = []
    for name, each in named.items():
        own = dict(_target(each, schema)) if isinstance(each, Mapping) else {}
        if "$ref" in json.dumps(own, default=dict):
            own.update(definitions)
        found.append(Property(name, own, name in required))
    found += [
        Property(name, {"type": "string"}, True)
        for name in required
        if isinstance(name, str) and name not in named
    ]
    return tuple(found)


def checked_properties(
    tool: Tool, can_be_named: Callable[[str], bool], form: str
) -> tuple[Property, ...]:
    """The same for a grammar of a form that writes arguments one by one.

    Raises BadConstraint: a name cannot be written in the form; or the tool is strict, and its
    schema says more than what each argument is.
    """
    found = properties(tool)
    for name in (tool.name, *(each.name for each in found)):
        if not can_be_named(name):
            raise BadConstraint(f"{name!r} cannot be written in the form {form}")
    if tool.strict and (beyond := set(tool.parameters or ()) - _ONE_BY_ONE):
        words = ", ".join(sorted(beyond))
        raise BadConstraint(f"the schema of {tool.name!r} cannot be enforced in {form}: {words}")
    return found


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list | tuple):
        return frozenset(each for each in kind if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list | tuple):
        return frozenset(_type_of(value) for value in values)
    if "$ref" in schema:
        return _types(_target(schema, root), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list | tuple):
            each = [_types(choice, root, depth - 1) for choice in choices]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the schema refers to within the root, with what it says beside; itself, if that is
    nowhere to be found."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: object = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **beside}
    return schema


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def in_order(items: Sequence[tuple[str, bool]], rules: Rules, separator: str = "") -> str:
    """Items in their order, each a rule's body and whether it must be there, with the separator
    between any two. The name of the rule."""
    first = rest = rules.add('""')
    for body, required in reversed(items):
        item = rules.add(body)
        now_first = f"{item} {rest}"
        now_rest = f"{separator} {item} {rest}"
        if not required:
            now_first += f" | {first}"
            now_rest += f" | {rest}"
        first, rest = rules.add(now_first), rules.add(now_rest)
    return first
