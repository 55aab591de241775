"""JSON Schemas of clients, reduced to what is enforced. Everything else is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from .bad_constraint import BadConstraint, quoted
from .number_bounds import settle_bounds
from .patterns import check_pattern, engine_pattern

MAX_BYTES = 262_144
"""Of a schema, written as JSON."""
MAX_SCHEMAS = 4_000
"""Schemas in a schema: every property, item and alternative is one."""
MAX_REFS = 300
"""Different ``$ref`` in a schema."""
MAX_DEPTH = 40
"""Schemas inside of one another."""
MAX_PROPERTIES = 400
"""Of one object. All of them may be next at once, and that many the parser follows."""
MAX_VALUES = 10_000
"""Values in all of the ``enum`` and ``const``."""
MAX_VALUE_DEPTH = 40
MAX_NUMBER = 2**53
"""Bounds and constants: beyond it a number is not exact everywhere."""
MIN_NUMBER = 1e-9
MAX_COUNT = 2**31 - 1

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "markdownDescription",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$comment",
        "$anchor",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
    }
)
"""Keywords that say nothing about what is valid. Those that begin with ``x-`` are of them too."""

Schema: TypeAlias = dict[str, Any] | bool
Pointer: TypeAlias = tuple[str, ...]


def enforceable(source: Any) -> dict[str, Any]:
    """The schema without what is not enforced, for the engine. ``source`` is not changed.

    Raises BadConstraint for one that is broken, too large, never ends or accepts nothing, and for
    one that has a keyword that would not be enforced. Nothing is ever fetched.
    """
    reading = _Reading()
    schema = reading.schema(source, ())
    reading.check_refs()
    settle_bounds(reading.places, _wrong)
    if schema is True:
        schema = {}
    if schema is False or not _ends(schema, reading.places, reading.refs):
        raise BadConstraint("the schema accepts no finite value")
    try:
        size = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise BadConstraint("the schema has half of a surrogate pair in it") from None
    if size > MAX_BYTES:
        raise BadConstraint(f"the schema is larger than {MAX_BYTES} bytes")
    return schema


def _where(at: Pointer) -> str:
    return f"at {quoted('#/' + '/'.join(at))}" if at else "at its root"


class _Reading:
    """One walk over a schema: checks it, and writes down what is kept of it."""

    def __init__(self) -> None:
        self.places: dict[Pointer, Schema] = {}
        """Every schema by where it stands: what a ``$ref`` may name."""
        self.refs: dict[str, Pointer] = {}
        self._values = 0

    def schema(self, source: Any, at: Pointer) -> Schema:
        if len(self.places) >= MAX_SCHEMAS:
            raise BadConstraint(f"the schema has more than {MAX_SCHEMAS} schemas in it")
        if isinstance(source, bool):
            self.places[at] = source
            return source
        if not isinstance(source, dict):
            raise BadConstraint(f"the schema has something else than a schema {_where(at)}")
        if len(at) > 2 * MAX_DEPTH:
            raise BadConstraint(f"the schema is nested more than {MAX_DEPTH} deep")
        kept: dict[str, Any] = {}
        # Before its parts, so that they are counted as they come.
        self.places[at] = kept
        for keyword, value in _modern(source, at).items():
            if keyword in ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword in ("$id", "id") and not at:
                continue  # there is no other base that a reference could mean
            read = _READERS.get(keyword)
            if read is None:
                raise BadConstraint(
                    f"the schema's keyword {quoted(keyword)} is not supported, {_where(at)}"
                )
            kept[keyword] = read(self, value, (*at, keyword))
        self._check_object(kept, at)
        _one_of_constants(kept)
        return kept

    def check_refs(self) -> None:
        for ref, target in self.refs.items():
            if target not in self.places:
                raise BadConstraint(f"the schema's reference {quoted(ref)} leads to no schema")

    def _check_object(self, kept: dict[str, Any], at: Pointer) -> None:
        if len(set(kept.get("properties", ())) | set(kept.get("required", ()))) > MAX_PROPERTIES:
            raise BadConstraint(
                f"the schema has an object of more than {MAX_PROPERTIES} properties {_where(at)}"
            )
        least = kept.get("minProperties")
        if least is None:
            return
        required = len(set(kept.get("required", ())))
        if least <= required:
            del kept["minProperties"]  # holds already
        elif least > 1:
            # Names that are not declared could repeat, and a name that repeats counts once.
            raise BadConstraint(
                f"the schema's minProperties is more than 1 and than the required {_where(at)}"
            )

    # ------------------------------------------------------------------- keywords' values

    def schemas(self, value: Any, at: Pointer) -> list[Schema]:
        if not isinstance(value, list):
            raise _wrong(at, "a list of schemas")
        return [self.schema(item, (*at, str(index))) for index, item in enumerate(value)]

    def some_schemas(self, value: Any, at: Pointer) -> list[Schema]:
        if value == []:
            raise _wrong(at, "a list of schemas that is not empty")
        return self.schemas(value, at)

    def named_schemas(self, value: Any, at: Pointer) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise _wrong(at, "an object of schemas")
        return {name: self.schema(item, (*at, name)) for name, item in value.items()}

    def pattern_schemas(self, value: Any, at: Pointer) -> dict[str, Schema]:
        named = self.named_schemas(value, at)
        for pattern in named:
            check_pattern(pattern, schema=True)
        kept = {engine_pattern(pattern): item for pattern, item in named.items()}
        if len(kept) < len(named):
            raise _wrong(at, "patterns that do not overlap")
        return kept

    def ref(self, value: Any, at: Pointer) -> str:
        if not isinstance(value, str):
            raise _wrong(at, "a string")
        if value != "#" and not value.startswith("#/"):
            raise BadConstraint(
                f"the schema's reference {quoted(value)} leads out of it, and nothing is fetched"
            )
        steps = unquote(value).split("/")[1:]
        if len(self.refs) >= MAX_REFS and value not in self.refs:
            raise BadConstraint(f"the schema has more than {MAX_REFS} different references")
        self.refs[value] = tuple(s.replace("~1", "/").replace("~0", "~") for s in steps)
        return value

    def types(self, value: Any, at: Pointer) -> str | list[str]:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name not in TYPES:
                raise BadConstraint(f"the schema's type {quoted(name)} is unknown, {_where(at)}")
        if not names:
            raise _wrong(at, "a list of types that is not empty")
        return list(dict.fromkeys(names)) if isinstance(value, list) else str(value)

    def values(self, value: Any, at: Pointer) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _wrong(at, "a list that is not empty")
        for item in value:
            self.constant(item, at)
        # Equal ones once: 1 and 1.0 are equal in JSON Schema, 1 and true are not.
        return list({json.dumps(_canonical(item), sort_keys=True): item for item in value}.values())

    def constant(self, value: Any, at: Pointer) -> Any:
        self._constant(value, at, 0)
        return value

    def _constant(self, value: Any, at: Pointer, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise BadConstraint(f"the schema has more than {MAX_VALUES} constant values")
        if depth > MAX_VALUE_DEPTH:
            raise BadConstraint(f"a constant is nested more than {MAX_VALUE_DEPTH} deep")
        if isinstance(value, (list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._constant(item, at, depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _number(value, at)

    def required(self, value: Any, at: Pointer) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(at, "a list of names")
        return list(dict.fromkeys(value))

    def count(self, value: Any, at: Pointer) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            raise _wrong(at, f"a whole number from 0 to {MAX_COUNT}")
        return value

    def pattern(self, value: Any, at: Pointer) -> str:
        if not isinstance(value, str):
            raise _wrong(at, "a string")
        check_pattern(value, schema=True)
        return engine_pattern(value)

    def format(self, value: Any, at: Pointer) -> str:
        if not isinstance(value, str) or value not in FORMATS:
            raise BadConstraint(f"the schema's format {quoted(value)} is not supported")
        return value

    def number(self, value: Any, at: Pointer) -> int | float:
        return _number(value, at)

    def multiple(self, value: Any, at: Pointer) -> int | float:
        if _number(value, at) <= 0:
            raise _wrong(at, "a number above 0")
        return _number(value, at)


def _wrong(at: Pointer, expected: str) -> BadConstraint:
    return BadConstraint(
        f"the schema's keyword {quoted(at[-1])} needs {expected}, {_where(at[:-1])}"
    )


def _number(value: Any, at: Pointer) -> int | float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(at, "a number")
    if value == 0:
        return 0
    if not MIN_NUMBER <= abs(value) <= MAX_NUMBER:  # nor is anything between for a NaN
        raise _wrong(at, "numbers that are not so large or so close to 0")
    return value


def _modern(source: Mapping[str, Any], at: Pointer) -> dict[str, Any]:
    """With the older drafts' way to describe a tuple in the newer words."""
    keywords = dict(source)
    if isinstance(keywords.get("items"), list):
        if "prefixItems" in keywords:
            raise _wrong((*at, "items"), "a schema beside prefixItems")
        keywords["prefixItems"] = keywords.pop("items")
        if "additionalItems" in keywords:
            keywords["items"] = keywords.pop("additionalItems")
    else:
        keywords.pop("additionalItems", None)  # has no meaning then
    return keywords


def _one_of_constants(kept: dict[str, Any]) -> None:
    """Alternatives that are constants, all of them different, exclude each other by themselves."""
    options = kept.get("oneOf", ())
    seen: set[str] = set()
    for option in options:
        if not isinstance(option, dict) or not {"const", "enum"} & option.keys():
            return
        for value in option.get("enum", [option.get("const")]):
            key = json.dumps(_canonical(value), sort_keys=True)
            if key in seen:
                return
            seen.add(key)
    if options and "anyOf" not in kept:
        kept["anyOf"] = kept.pop("oneOf")


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return value


_Reader: TypeAlias = Callable[[_Reading, Any, Pointer], Any]

_READERS: Mapping[str, _Reader] = {
    "$ref": _Reading.ref,
    "$defs": _Reading.named_schemas,
    "definitions": _Reading.named_schemas,
    "allOf": _Reading.some_schemas,
    "anyOf": _Reading.some_schemas,
    "oneOf": _Reading.some_schemas,
    "type": _Reading.types,
    "enum": _Reading.values,
    "const": _Reading.constant,
    "properties": _Reading.named_schemas,
    "patternProperties": _Reading.pattern_schemas,
    "additionalProperties": _Reading.schema,
    "required": _Reading.required,
    "minProperties": _Reading.count,
    "maxProperties": _Reading.count,
    "items": _Reading.schema,
    "prefixItems": _Reading.schemas,
    "minItems": _Reading.count,
    "maxItems": _Reading.count,
    "minLength": _Reading.count,
    "maxLength": _Reading.count,
    "pattern": _Reading.pattern,
    "format": _Reading.format,
    "minimum": _Reading.number,
    "maximum": _Reading.number,
    "exclusiveMinimum": _Reading.number,
    "exclusiveMaximum": _Reading.number,
    "multipleOf": _Reading.multiple,
}


def _ends(schema: Schema, places: Mapping[Pointer, Schema], refs: Mapping[str, Pointer]) -> bool:
    """Whether some finite value may be valid: no endless recursion is required."""
    ending = _Ending(refs)
    open_targets = list(dict.fromkeys(refs.values()))
    while not ending.of(schema):
        # Backwards in turn, since definitions are often written one after another.
        left = [at for at in reversed(open_targets) if not ending.learn(at, places[at])]
        if len(left) == len(open_targets):
            return False
        open_targets = left
    return True


class _Ending:
    """Which schemas end, given the referred ones that are known to."""

    def __init__(self, refs: Mapping[str, Pointer]) -> None:
        self._refs = refs
        self._known: set[Pointer] = set()

    def learn(self, at: Pointer, schema: Schema) -> bool:
        ends = self.of(schema)
        if ends:
            self._known.add(at)
        return ends

    def of(self, schema: Schema) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and self._refs[schema["$ref"]] not in self._known:
            return False
        if not all(map(self.of, schema.get("allOf", ()))):
            return False
        for choice in ("anyOf", "oneOf"):
            if choice in schema and not any(map(self.of, schema[choice])):
                return False
        if "enum" in schema or "const" in schema:
            return True
        given = schema.get("type", TYPES)
        types = {given} if isinstance(given, str) else set(given)
        return (
            bool(types - {"object", "array"})
            or ("object" in types and all(map(self.of, self._required(schema))))
            or ("array" in types and all(map(self.of, self._items(schema))))
        )

    @staticmethod
    def _required(schema: dict[str, Any]) -> Iterator[Schema]:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            others = True  # which of them applies is left to the engine
        return (properties.get(name, others) for name in schema.get("required", ()))

    @staticmethod
    def _items(schema: dict[str, Any]) -> list[Schema]:
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        rest = [schema.get("items", True)] if least > len(first) else []
        return [*first[:least], *rest]
