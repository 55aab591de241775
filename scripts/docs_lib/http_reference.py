"""docs/http-reference.md: every route, from the OpenAPI document that the server serves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_trio.api.openapi import openapi_document

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "http-reference.md"

Schema = Mapping[str, Any]

_DEEPEST = 4
"""How many names a field's path may have before what is inside is left to the document."""
_HEAD = """\
# HTTP reference

<!-- Made by scripts/docs_lib from the server's OpenAPI document. Do not edit. -->

Every route, every field of a request, and what every answer has, as the server itself describes
them at `/openapi.json`. What the fields mean, and what streams look like, is on the page
[HTTP API](http-api.md).

A path with `/v1` answers without it too. Fields that are not named here are ignored, and `null`
means "not given". `a.b` is the field `b` of the object `a`; `a[]` is each element of the array `a`.

| route | |
|---|---|
"""


def page() -> str:
    """The whole page."""
    document = openapi_document(keyed=True)
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    index = "".join(
        f"| [`{method} {path}`](#{_anchor(method, path)}) | {operation['summary']} |\n"
        for method, path, operation in operations
    )
    schemas = document["components"]["schemas"]
    paths = {
        _body_name(operation): path
        for _, path, operation in operations
        if "requestBody" in operation
    }
    sections = [line for each in operations for line in _section(*each, schemas, paths)]
    return _HEAD + index + "\n" + "\n".join([*sections, *_errors(schemas)]) + "\n"


def _anchor(method: str, path: str) -> str:
    """What a heading of the two is called in links, by MkDocs and elsewhere."""
    return re.sub(r"[^\w\s-]", "", f"{method} {path}").strip().lower().replace(" ", "-")


def _section(
    method: str,
    path: str,
    operation: Schema,
    schemas: Mapping[str, Schema],
    paths: Mapping[str, str],
) -> Iterator[str]:
    """``paths``: those of the routes by the names of their bodies' schemas."""
    yield f"## `{method} {path}`"
    yield f"\n{operation['summary']}"
    if operation.get("security") == []:
        yield "Wants no key."
    yield ""
    parameters = operation.get("parameters", ())
    if parameters:
        yield "| parameter | in | |\n|---|---|---|"
        for parameter in parameters:
            yield f"| `{parameter['name']}` | {parameter['in']} | {_kind(parameter['schema'])} |"
        yield ""
    if "requestBody" in operation:
        yield from _body(_body_name(operation), schemas, paths)
    yield from _answer(operation)


def _body_name(operation: Schema) -> str:
    reference: str = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def _body(name: str, schemas: Mapping[str, Schema], paths: Mapping[str, str]) -> Iterator[str]:
    schema = schemas[name]
    same = next(other for other, candidate in schemas.items() if candidate == schema)
    if same != name:
        yield f"The body is that of [`POST {paths[same]}`](#{_anchor('POST', paths[same])}).\n"
        return
    yield "| field of the body | | |\n|---|---|---|"
    required = schema.get("required", ())
    for field, inner in schema["properties"].items():
        yield from _row(field, inner, field in required, "required", False)
    yield ""


def _row(path: str, schema: Schema, required: bool, mark: str, nulls: bool) -> Iterator[str]:
    """A row for a field, and one for each field inside of it, the required ones with ``mark``.
    ``nulls``: whether null says something."""
    yield f"| `{path}` | {_kind(schema, nulls)} | {mark if required else ''} |"
    if path.count(".") + 1 >= _DEEPEST:
        return
    # Of several forms that an object may have, all fields; required is what each form requires.
    forms: dict[str, list[Schema]] = {}
    for step, form in _objects(schema):
        forms.setdefault(step, []).append(form)
    for step, all_ in forms.items():
        for name in dict.fromkeys(name for form in all_ for name in form["properties"]):
            found = [form["properties"][name] for form in all_ if name in form["properties"]]
            inner = found[0] if len(found) == 1 else {"anyOf": found}
            needed = all(name in form.get("required", ()) for form in all_)
            yield from _row(f"{path}{step}.{name}", inner, needed, mark, nulls)


def _objects(schema: Schema, step: str = "") -> Iterator[tuple[str, Schema]]:
    """The objects that a field may be, or hold in an array, with the way to them."""
    for choice in _choices(schema):
        if choice.get("properties"):
            yield step, choice
        elif choice.get("type") == "array":
            yield from _objects(choice.get("items", {}), f"{step}[]")


def _choices(schema: Schema) -> Sequence[Schema]:
    """What a value may be, without ``null``. Bounds beside the choices hold for each."""
    if "anyOf" not in schema:
        return [schema]
    bounds = {name: value for name, value in schema.items() if name != "anyOf"}
    return [
        {**choice, **bounds}
        for option in schema["anyOf"]
        for choice in _choices(option)
        if choice != {"type": "null"}
    ]


def _kind(schema: Schema, nulls: bool = False) -> str:
    kinds: list[str] = []
    for choice in _choices(schema):
        kind = _one_kind(choice)
        if kind not in kinds:
            kinds.append(kind)
    if nulls and {"type": "null"} in schema.get("anyOf", ()):
        kinds.append("`null`")
    return " or ".join(kinds)


def _one_kind(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        items = _kind(schema["items"]) if schema.get("items") else "anything"
        kind = f"array of {items}" if " or " not in items else f"array of ({items})"
    return kind + _bounds(schema)


def _bounds(schema: Schema) -> str:
    words = []
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        words.append(f"{low} to {high}")
    elif low is not None:
        words.append(f"at least {low}")
    for name, unit in (("Length", "characters"), ("Items", "elements"), ("Properties", "fields")):
        low, high = schema.get(f"min{name}"), schema.get(f"max{name}")
        if low is not None and high is not None:
            words.append(f"{low} to {high} {unit}" if low != high else f"{low} {unit}")
        elif low is not None:
            words.append(f"at least {low} {unit}" if low > 1 else "not empty")
        elif high is not None:
            words.append(f"at most {high} {unit}")
    return f" ({', '.join(words)})" if words else ""


def _answer(operation: Schema) -> Iterator[str]:
    responses = operation["responses"]
    content = responses["200"]["content"]
    kinds = ", ".join(f"`{kind}`" for kind in content)
    yield f"Answers 200 with {kinds}. Errors: {', '.join(s for s in responses if s != '200')}.\n"
    schema = content.get("application/json", {}).get("schema", {})
    if not schema.get("properties"):
        return
    yield "| field of the answer | | |\n|---|---|---|"
    for field, inner in schema["properties"].items():
        yield from _row(field, inner, field in schema.get("required", ()), "always", True)
    yield ""


def _errors(schemas: Mapping[str, Schema]) -> Iterator[str]:
    yield "## Errors\n"
    yield "Under `/v1/messages` they have Anthropic's shape, everywhere else OpenAI's.\n"
    for title, name in (("Anthropic's", "AnthropicError"), ("OpenAI's", "OpenAIError")):
        yield f"| {title} | | |\n|---|---|---|"
        schema = schemas[name]
        for field, inner in schema["properties"].items():
            yield from _row(field, inner, field in schema["required"], "always", True)
        yield ""
