"""What the engine would read otherwise than JSON Schema does: bounds, expressions, names."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trio.text.structured import BadConstraint

from .test_structured import compiled, refusal, says

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def wrongly_said(schema: Any, right: list[str], wrong: list[str]) -> list[str]:
    grammar = compiled("json_schema", schema)
    return [t for t in right if not says(grammar, t)] + [t for t in wrong if says(grammar, t)]


# -------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        (
            {"exclusiveMinimum": 0, "maximum": 0.5},
            ["0.2", "0.5", "0.000001"],
            ["0", "-0", "0.0", "0e0", "0.51"],
        ),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.2"], ["0", "0.00", "0.5"]),
        ({"exclusiveMinimum": 0, "maximum": 1e-9}, ["0.0000000001", "0.000000001"], ["0", "0.0"]),
        ({"exclusiveMinimum": 3, "maximum": 3.14}, ["3.10", "3.0001"], ["3", "3.0", "3.15", "-3"]),
        ({"exclusiveMinimum": 10, "maximum": 10.05}, ["10.01", "10.05"], ["10", "10.00", "10.06"]),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, ["-1.2", "-1.5"], ["-1", "-1.0", "-1.6"]),
        (
            {"exclusiveMaximum": 0, "minimum": -0.5},
            ["-0.2", "-0.5"],
            ["-0", "0", "-0.0", "-0e1", "-0.6"],
        ),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.2", "1"], ["0", "0.0"]),
        ({"exclusiveMinimum": 0, "minimum": 0.2, "maximum": 0.5}, ["0.2"], ["0.1", "0"]),
        ({"exclusiveMinimum": 0, "minimum": -1, "maximum": 0.5}, ["0.2"], ["-0.5", "0"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, ["0.25"], ["0", "0.3"]),
    ],
)
def test_a_whole_bound_that_is_excluded_cannot_be_said(
    bounds: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert wrongly_said({"type": "number", **bounds}, right, wrong) == []


LOW, HIGH = {"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [LOW, HIGH]},
        {"allOf": [{"anyOf": [LOW, {"type": "string"}]}, {"anyOf": [HIGH, {"type": "null"}]}]},
        {"$defs": {"low": LOW}, "$ref": "#/$defs/low", "maximum": 0.5},
        {"$defs": {"both": {**LOW, **HIGH}}, "$ref": "#/$defs/both"},
        {"$defs": {"high": HIGH}, "allOf": [{"$ref": "#/$defs/high"}], "exclusiveMinimum": 0},
        {"anyOf": [{**LOW, **HIGH}, {"type": "boolean"}]},
        {"anyOf": [HIGH, {"type": "boolean"}], "exclusiveMinimum": 0},
        {"oneOf": [{**LOW, **HIGH}, {"type": "boolean"}]},
        {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0, "maximum": 0.5},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_an_excluded_bound_is_excluded_however_the_schemas_are_put_together(schema: Any) -> None:
    right, wrong = ["0.2", "0.5"], ["0", "0.0", "-0", "0.6"]
    assert wrongly_said(schema, right, wrong) == []
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inside = {"type": "object", "properties": {"p": schema}, "required": ["p"], **definitions}
    said = [[f'{{"p": {text}}}' for text in texts] for texts in (right, wrong)]
    assert wrongly_said(inside, *said) == []


def test_a_bound_of_whole_numbers_stays_what_it_is_beside_one_that_is_close() -> None:
    whole = {"type": "integer", "exclusiveMinimum": 0, "maximum": 3}
    schema = {"type": "array", "prefixItems": [{**LOW, **HIGH}, whole], "minItems": 2}
    assert wrongly_said(schema, ["[0.5, 1]", "[0.1, 3]"], ["[0, 1]", "[0.5, 0]", "[0.5, 4]"]) == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"exclusiveMinimum": 10**12, "maximum": 10**12 + 0.002}, "exclusiveMinimum"),
        ({"exclusiveMaximum": -(10**12), "minimum": -(10**12) - 0.002}, "exclusiveMaximum"),
    ],
)
def test_a_bound_that_is_too_close_to_the_excluded_one_is_refused(schema: Any, named: str) -> None:
    message = refusal("json_schema", {"properties": {"p": {"type": "number", **schema}}})
    assert named in message
    assert "#/properties/p" in message


def valid(value: Decimal, schema: dict[str, Any]) -> bool:
    low, above, high, below = (
        Decimal(str(schema[bound])) if bound in schema else None for bound in BOUNDS
    )
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
        and (schema["type"] == "number" or value == value.to_integral_value())
        and value % Decimal(str(schema.get("multipleOf", "1e-9"))) == 0
    )


def spellings(value: Decimal) -> list[str]:
    """The engine wants some numbers with zeros behind and none of them with others."""
    plain = format(value.normalize(), "f")
    dotted = plain if "." in plain else plain + "."
    return [plain, *(dotted + "0" * zeros for zeros in (1, 2, 3))]


@st.composite
def bounded(draw: st.DrawFn) -> dict[str, Any]:
    around = draw(st.sampled_from([0, 0, 1, -1, 3, 9, 10, -10, 99]) | st.integers(-999, 999))
    near = st.integers(0, 3).flatmap(
        lambda digits: st.integers(-15 * 10**digits // 10, 15 * 10**digits // 10).map(
            lambda n: around + n / 10**digits
        )
    )
    bound = near.map(lambda x: round(x, 3)).map(lambda x: int(x) if x.is_integer() else x)
    chosen = draw(st.sets(st.sampled_from(BOUNDS), min_size=1, max_size=3))
    schema = {name: draw(bound) for name in BOUNDS if name in chosen}
    schema["type"] = draw(st.sampled_from(["number", "number", "integer"]))
    if draw(st.integers(0, 4)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([0.1, 0.25, 0.5, 1.5, 2, 3]))
    return schema


def apart(schema: dict[str, Any], way: str) -> dict[str, Any]:
    """The same schema, its bounds in several that the engine merges."""
    if way == "whole":
        return schema
    first = {name: schema[name] for name in ("type", *BOUNDS[:2]) if name in schema}
    rest = {name: value for name, value in schema.items() if name not in BOUNDS[:2]}
    if way == "allOf":
        return {"allOf": [first, rest]}
    if way == "anyOf":
        return {"anyOf": [first, {"type": "null"}], **rest}
    return {"$defs": {"x": first}, "$ref": "#/$defs/x", **rest}


@settings(max_examples=150, deadline=None)
@given(bounded(), st.sampled_from(["whole", "allOf", "anyOf", "$ref"]))
@example({"type": "number", "exclusiveMinimum": 3, "maximum": 3.14}, "whole")
@example({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "allOf")
def test_every_number_that_can_be_said_is_within_its_bounds_and_every_such_can_be_said(
    schema: dict[str, Any], way: str
) -> None:
    try:
        grammar = compiled("json_schema", apart(schema, way))
    except BadConstraint:
        return  # nothing lies between them
    steps = ("0", "1", "0.5", "0.25", "0.1", "0.01", "0.001", "0.0000001")
    near = [Decimal(str(schema[bound])) for bound in BOUNDS if bound in schema]
    values = {at + sign * Decimal(step) for at in near for step in steps for sign in (1, -1)}
    for value in {*values, *map(Decimal, (-1, 0, 1))}:
        said = [text for text in spellings(value) if says(grammar, text)]
        assert not said or valid(value, schema), said
        # The engine has no spelling for some multiples of a fraction.
        if isinstance(schema.get("multipleOf", 1), int):
            assert said or not valid(value, schema), value
        for text in (f"{value:f}e0", f"{value:f}E-1", f"{value:f}e+1"):
            assert not says(grammar, text) or valid(Decimal(text), schema), text
    for text in ("-0", "-0.0", "-0e0", "0e5"):
        assert not says(grammar, text) or valid(Decimal(0), schema), text


# ---------------------------------------------------------------------------------- expressions


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^a.c$", ["abc", "a.c", "a\x85c", "a😀c"], ["a\nc", "a\rc", "a\u2028c", "a\u2029c", "ac"]),
        ("^.{2}$", ["ab"], ["a\r", "\u2029a"]),
        (r"^\.[.]\\.$", ["..\\x"], ["x.\\x", ".x\\x", "..\\\r"]),
        (r"^[^.]\\\.$", ["\r\\."], [".\\.", "a\\x"]),
        (r"^\s$", [" ", "\t", "\r", "\xa0", "\ufeff", "\u2028", "\u3000"], ["\x85", "s", "x"]),
        (r"^\S$", ["\x85", "s"], ["\ufeff", " ", "\n"]),
        (r"^[\s-]$", ["-", "\ufeff"], ["\x85"]),
        (r"^[^\sx]$", ["\x85"], ["\ufeff", "x", " "]),
        (r"^[\Sa ]$", ["\x85", " ", "a"], ["\ufeff", "\n"]),
        (r"^\\s[\\s]$", ["\\ss", "\\s\\"], ["\\s ", "\\ "]),
    ],
)
def test_a_pattern_means_what_it_means_in_javascript(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert wrongly_said(schema, [*map(quoted, right)], [*map(quoted, wrong)]) == []


def test_a_pattern_for_names_means_the_same() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^a.$": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert wrongly_said(schema, ['{"ab": 1}'], [r'{"a\r": 1}', r'{"a\n": 1}', '{"ab": "x"}']) == []


def test_patterns_that_come_to_the_same_overlap() -> None:
    schema = {"patternProperties": {"a.": {"type": "null"}, r"a[^\n\r\u2028\u2029]": {}}}
    assert "overlap" in refusal("json_schema", schema)


# ---------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": False,
        },
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
)
def test_a_name_that_is_escaped_for_no_reason_cannot_be_said_in_a_closed_object(
    schema: Any,
) -> None:
    wrong = [r'{"\u0061": "x"}', r'{"\u0061": 1}', r'{"a": 1, "\u0061": "x"}']
    assert wrongly_said(schema, ['{"a": 1}'], wrong) == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, r'{"a": 1, "\u0061": "x"}'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "number", "minimum": 942.0000000000001, "maximum": 943}, "942"),
    ],
)
def test_the_gaps_that_the_page_names_are_still_there(schema: Any, text: str) -> None:
    """An engine that closes one of them makes a sentence of docs/structured-output.md wrong."""
    assert says(compiled("json_schema", schema), text)
