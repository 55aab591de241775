"""Structured answers: what a schema or grammar says is what can be said, or it is refused."""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_trio.generation.constraint import ConstraintError, TokenConstraint, TokenMatcher
from dflash_trio.generation.request import OutputConstraint
from dflash_trio.text.guide import make_guide_tokenizer
from dflash_trio.text.structured import (
    BadConstraint,
    check_constraint,
    compile_grammar,
    grammar_source,
)

END = 256
Kind = Literal["json_object", "json_schema", "regex", "gbnf", "lark"]


@cache
def tokenizer() -> Any:
    """Tokens that are bytes."""
    return make_guide_tokenizer([bytes([b]) for b in range(256)] + [b"", b""],
                                {"<end>": END, "<begin>": 257}, {END})  # fmt: skip


def compiled(kind: Kind, source: Any = None) -> TokenConstraint:
    constraint = OutputConstraint(kind, source)
    check_constraint(constraint)
    return compile_grammar(tokenizer(), grammar_source(constraint))


def allowed(matcher: TokenMatcher) -> list[int]:
    mask = matcher.mask()
    return [token for token in range(258) if mask[token // 8] >> token % 8 & 1]


def says(grammar: TokenConstraint, text: str) -> bool:
    """Whether the whole text may be said, and be the answer."""
    matcher = grammar.new_matcher()
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return END in allowed(matcher)


def walk(grammar: TokenConstraint, seed: int, limit: int = 3000) -> str:
    """An answer of random tokens, short ones preferred once it has become long."""
    draw, matcher, said = random.Random(seed), grammar.new_matcher(), bytearray()
    while not matcher.finished:
        tokens = allowed(matcher)
        assert tokens, "nothing is allowed and it is not finished"
        assert 257 not in tokens, "a control token is no text"
        closing = [t for t in tokens if t in (*b'"]}ab12', END)]
        if len(said) > 60 and closing and draw.random() < 0.8:
            tokens = [ord('"')] if ord('"') in closing and draw.random() < 0.5 else closing
        token = draw.choice(tokens)
        if token == END:
            break
        matcher.accept(token)
        said.append(token)
        assert len(said) < limit
    return said.decode()


def refusal(kind: Kind, source: Any) -> str:
    with pytest.raises(BadConstraint) as caught:
        compiled(kind, source)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) <= 300
    return message


# ------------------------------------------------------------------------------------- endings


def test_an_object_is_finished_with_its_closing_brace() -> None:
    matcher = compiled("json_object").new_matcher()
    for byte in b'{"a": [1, {}]':
        matcher.accept(byte)
        assert not matcher.finished
    assert END not in allowed(matcher)
    matcher.accept(ord("}"))
    assert matcher.finished
    assert allowed(matcher) == [END]
    matcher.accept(END)
    assert matcher.finished


def test_an_answer_that_may_end_or_go_on_is_ended_by_the_end_token() -> None:
    matcher = compiled("regex", "[ab]+").new_matcher()
    assert allowed(matcher) == [97, 98]
    matcher.accept(97)
    assert not matcher.finished
    assert allowed(matcher) == [97, 98, END]
    matcher.accept(END)
    assert matcher.finished


@pytest.mark.parametrize("token", [ord("["), END, 257, 258, 10**6, -1])
def test_a_token_that_was_not_allowed_is_an_error_and_completes_nothing(token: int) -> None:
    matcher = compiled("json_object").new_matcher()
    with pytest.raises(ConstraintError):
        matcher.accept(token)
    assert not matcher.finished


def test_the_matchers_of_one_grammar_do_not_know_each_other() -> None:
    grammar = compiled("gbnf", 'root ::= "ab" | "cd"')
    first = grammar.new_matcher()
    first.accept(97)
    assert allowed(grammar.new_matcher()) == [97, 99]
    assert allowed(first) == [98]


def test_a_mask_is_whole_words_of_bits() -> None:
    assert len(compiled("json_object").new_matcher().mask()) == 36


# ---------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("seed", range(30))
def test_any_walk_through_json_object_is_an_object(seed: int) -> None:
    assert isinstance(json.loads(walk(compiled("json_object"), seed)), dict)


def test_white_space_is_one_blank_behind_commas_and_colons() -> None:
    grammar = compiled("json_object")
    value = {"a": [1, "x", None], "b": {}}
    assert says(grammar, json.dumps(value))
    for text in ('{"a":1}', '{"a": 1,"b": 2}', '{ "a": 1}', '{"a": 1 }', '{"a":  1}', "{\n}"):
        assert not says(grammar, text)


@pytest.mark.parametrize(
    "text",
    [
        "alphaSTOPPEDbeta",
        "歪😀👩‍👩‍👧 é — π",
        "\u05e9\u05dc\u05d5\u05dd \u202eabc",
        "a\u2028b\u2029c\u0085d\r\ne\tf",
        'quote " backslash \\ slash / \\n \\u0041',
        "\0\x01\x1f\x7f\x80\ufffd\ufffe\U0010ffff",
        "<|im_end|><end_of_turn></s>",
        "",
        " ",
    ],
)
@pytest.mark.parametrize("keyword", ["enum", "const"])
def test_a_single_value_forces_exactly_that_text(text: str, keyword: str) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", keyword: [text] if keyword == "enum" else text}},
        "required": ["x"],
        "additionalProperties": False,
    }
    for seed in range(3):
        assert json.loads(walk(compiled("json_schema", schema), seed)) == {"x": text}


def test_a_forced_document_is_what_json_dumps_writes() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": "😀"}}
    grammar = compiled("json_schema", {"const": value})
    assert walk(grammar, 1) == json.dumps(value, ensure_ascii=False)


SCHEMAS: dict[str, tuple[Any, list[str], list[str]]] = {
    "any": ({}, ["1", "null", '{"a": []}'], ["nul", ""]),
    "true": (True, ["1"], [","]),
    "type": ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    "integer": ({"type": "integer"}, ["1", "-7", "0"], ["1.5", "01", "+1"]),
    "bounds": (
        {"type": "integer", "minimum": -2, "exclusiveMaximum": 11},
        ["-2", "10", "0"],
        ["-3", "11"],
    ),
    "number bounds": (
        {"type": "number", "exclusiveMinimum": 0.1, "maximum": 0.3},
        ["0.2", "0.3", "0.11"],
        ["0.1", "0.31", "1"],
    ),
    "multiple": ({"type": "integer", "multipleOf": 7}, ["14", "0"], ["15"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ['"😀é"'], ['"a"', '"abcd"']),
    "pattern escape": ({"type": "string", "pattern": r"^hello\!$"}, ['"hello!"'], ['"hello"']),
    # Leaving out the escapes by number would make a control character vanish.
    "pattern with a control character": (
        {"type": "string", "pattern": r"^a\x01b$"},
        [r'"a\u0001b"'],
        ['"ab"'],
    ),
    "pattern digits": ({"type": "string", "pattern": r"^\d{3}$"}, ['"123"'], ['"12"', '"١٢٣"']),
    "pattern unanchored": (
        {"type": "string", "pattern": "[a-z]+"},
        ['"a"', '"!a!"'],
        ['"!"', '""'],
    ),
    "pattern halves": ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"']),
    "enum": ({"enum": [1, 1, "1", None, True, 2.5]}, ["1", '"1"', "null", "2.5"], ["2", "false"]),
    "enum and type": ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
    "array": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1, 2, 3]", '["a"]'],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
        ["[1]"],
        ["[]", "[1, 2]"],
    ),
    "old tuple": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        ["[1]", "[]"],
        ["[1, 2]", '["a"]'],
    ),
    "closed object": (
        {
            "type": "object",
            "properties": {"o": {"type": "object", "additionalProperties": False}},
            "required": ["o"],
            "additionalProperties": False,
        },
        ['{"o": {}}'],
        ["{}", '{"o": {"a": 1}}', '{"o": {}, "x": 1}'],
    ),
    "order": (
        {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["z", "a"]},
        ['{"b": 1, "a": 1, "z": 1}', '{"a": 1, "z": 1, "q": 1}'],
        ['{"a": 1, "b": 1, "z": 1}', '{"a": 1}', '{"a": 1, "a": 1, "z": 1}'],
    ),
    "forbidden property": (
        {"type": "object", "properties": {"a": False}},
        ["{}", '{"b": 1}'],
        ['{"a": 1}'],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        ["{}", '{"a": 1, "b": 2}'],
        ['{"a": "x"}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    "not empty": ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    "patterned names": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        ['{"ab": 1, "b": "x"}'],
        ['{"ab": "x"}'],
    ),
    "ref": (
        {"$defs": {"x": {"type": "integer"}}, "items": {"$ref": "#/$defs/x"}, "type": "array"},
        ["[1]"],
        ['["a"]'],
    ),
    "odd ref": ({"$defs": {"a~/ %": {"const": 1}}, "$ref": "#/$defs/a~0~1%20%25"}, ["1"], ["2"]),
    "ref and more": (
        {"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x", "maxLength": 1},
        ['"a"'],
        ['"ab"'],
    ),
    "recursion": (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"n": {"n": {}}}'],
        ['{"n": 1}'],
    ),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, ["1", '"a"'], ['"b"']),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"b"'], ["null"]),
    "oneOf constants": ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, ["1", "3"], ["4"]),
    "allOf": (
        {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]},
        ['"ab"'],
        ['"a"', '"ba"'],
    ),
    "date": ({"type": "string", "format": "date"}, ['"2024-01-31"'], ['"x"', '"2024-1-3"']),
    "annotations": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$id": "http://x/y",
            "title": "t",
            "default": {"not": {}},
            "examples": [{"$ref": "http://x"}],
            "description": "d",
            "deprecated": True,
            "readOnly": True,
            "x-y": 1,
            "$comment": "c",
            "contentEncoding": "base64",
            "type": "integer",
        },
        ["1"],
        ['"x"'],
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_enforced(name: str) -> None:
    schema, right, wrong = SCHEMAS[name]
    grammar = compiled("json_schema", schema)
    validator = jsonschema.Draft202012Validator(schema) if name != "old tuple" else None
    for text in right:
        assert says(grammar, text), text
        assert validator is None or validator.is_valid(json.loads(text))
    for text in wrong:
        assert not says(grammar, text), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "strnig"}, "strnig"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"dependentRequired": {}}, "dependentRequired"),
        ({"dependentSchemas": {}}, "dependentSchemas"),
        ({"dependencies": {}}, "dependencies"),
        ({"propertyNames": {}}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"nullable": True, "type": "string"}, "nullable"),
        ({"requierd": ["a"]}, "requierd"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "not"),
        ({"$defs": {"unused": {"not": {}}}}, "not"),
        ({"properties": {"a": {"$id": "http://x/"}}}, "$id"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
        ({"type": "string", "format": "binary"}, "binary"),
        ({"type": "string", "format": "unknown"}, "unknown"),
        ({"type": "string", "pattern": "(?=x)y"}, "(?=x)y"),
        ({"type": "string", "pattern": "a\\"}, "backslash"),
        ({"type": "string", "pattern": "(?i)a"}, "(?i)a"),
        ({"type": "string", "pattern": r"(a)\1"}, "refers back"),
        ({"type": "string", "pattern": r"\bfoo"}, "constraint"),
        ({"type": "string", "pattern": "[a&&b]"}, "'&'"),
        ({"type": "string", "pattern": "("}, "constraint"),
        ({"type": "string", "pattern": "a{999999}"}, "repeats"),
        ({"$ref": "#/$defs/x"}, "#/$defs/x"),
        ({"$ref": "#/title", "title": "t"}, "#/title"),
        ({"$ref": "#x"}, "#x"),
        ({"$ref": "http://127.0.0.1:9/s.json"}, "http://127.0.0.1:9/s.json"),
        ({"$ref": "#"}, "finite"),
        ({"properties": {"n": {"$ref": "#"}}, "required": ["n"], "type": "object"}, "finite"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
          "$ref": "#/$defs/a"}, "finite"),
        (False, "finite"),
        ({"enum": []}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"type": []}, "type"),
        ({"type": "string", "minLength": "2"}, "minLength"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"type": "array", "minItems": True}, "minItems"),
        ({"required": "a"}, "required"),
        ({"properties": ["a"]}, "properties"),
        ({"items": 3}, "something else"),
        (["a"], "something else"),
        ("x", "something else"),
        (None, "something else"),
        ({"type": "number", "minimum": float("inf")}, "minimum"),
        ({"type": "number", "minimum": 1e30}, "minimum"),
        ({"type": "number", "maximum": True}, "maximum"),
        ({"type": "number", "multipleOf": 0}, "multipleOf"),
        ({"const": 10**400}, "const"),
        ({"const": float("nan")}, "const"),
        ({"const": "\ud83d"}, "surrogate"),
        ({"properties": {"\ud83d": {}}}, "surrogate"),
        ({"const": "abc", "maxLength": 2}, "constraint"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "constraint"),
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "constraint"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "finite"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)  # fmt: skip
def test_what_is_not_enforced_is_refused_by_name(schema: Any, named: str) -> None:
    assert named in refusal("json_schema", schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def deep_value(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def merges(count: int) -> dict[str, Any]:
    """As many combinations as the cube of ``count``."""
    options = [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(count)]
    return {"allOf": [{"type": "object", "anyOf": options}] * 3}


LARGE: dict[str, tuple[Kind, Any]] = {
    "depth": ("json_schema", nested(3000)),
    "value depth": ("json_schema", {"const": deep_value(900)}),
    "properties": ("json_schema", {"properties": {f"p{i}": {} for i in range(3000)}}),
    "schemas": ("json_schema", {"anyOf": [{"type": "string"}] * 100_000}),
    "values": ("json_schema", {"enum": list(range(100_000))}),
    "bytes": ("json_schema", {"const": "x" * 300_000}),
    "merges": ("json_schema", merges(40)),
    "merges of merges": ("json_schema", {"allOf": [merges(20), merges(20)]}),
    "pattern": ("json_schema", {"pattern": "a" * 20_000}),
    "expression": ("regex", "a" * 20_000),
    "count": ("regex", "a{99999999999999999999}"),
    "groups": ("gbnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "marks": ("gbnf", 'root ::= "a"' + "*" * 5000),
    "rules": ("gbnf", "root ::= " + " ".join(f"r{i}" for i in range(20_000))),
    "lark": ("lark", 'start: "' + "a" * 100_000 + '"'),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_is_refused_soon(name: str) -> None:
    kind, source = LARGE[name]
    begin = time.process_time()
    refusal(kind, source)
    assert time.process_time() - begin < 5


EXPLOSIVE: dict[str, tuple[Kind, Any, str]] = {
    "states": ("regex", "(.*a.{30}b|.*b.{30}a|.*c.{20}d)", "abcabdacb" * 40),
    "ambiguity": ("lark", 'start: a\na: a a a | a a | "x"', "x" * 60),
    "counted": ("regex", "((((a{100}){100}){100}){100})", "a" * 400),
    "repeated": ("json_schema", {"minItems": 2**31 - 1, "type": "array"}, "[1, 2, 3"),
    "long": ("json_schema", {"minLength": 2**31 - 1, "type": "string"}, '"' + "a" * 400),
    "nested": (
        "json_schema",
        {"type": "array", "maxItems": 10**6, "items": {"type": "array", "maxItems": 10**6}},
        "[[1, 2], [3",
    ),
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_grammar_that_explodes_ends_in_an_error_or_goes_on_but_never_hangs(name: str) -> None:
    kind, source, text = EXPLOSIVE[name]
    matcher = compiled(kind, source).new_matcher()
    for byte in text.encode():
        begin = time.process_time()
        try:
            matcher.mask()
            matcher.accept(byte)
        except ConstraintError as error:
            message = str(error)
            assert not matcher.finished
            with pytest.raises(ConstraintError, match=re.escape(message)):
                matcher.mask()
            assert message.isprintable()
            return
        assert time.process_time() - begin < 2


def test_many_definitions_in_a_row_are_looked_through_at_once() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(290)}
    begin = time.process_time()
    assert says(
        compiled("json_schema", {"$defs": {**chain, "d290": {}}, "$ref": "#/$defs/d0"}), "1"
    )
    backwards = {f"d{i + 1}": {"$ref": f"#/$defs/d{i}"} for i in range(290)}
    assert says(
        compiled("json_schema", {"$defs": {**backwards, "d0": {}}, "$ref": "#/$defs/d290"}), "1"
    )
    assert time.process_time() - begin < 5


# ------------------------------------------------------------------------------ generated ones

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
numbers = st.integers(-1000, 1000) | st.floats(-1000, 1000).map(lambda x: round(x, 3))
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(texts, inner, max_size=3)
    return properties.flatmap(
        lambda named: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(named),
                "required": st.lists(st.sampled_from([*named, "more"]), unique=True),
                "additionalProperties": st.booleans() | inner,
            }
        )
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(1, 3),
        },
    )


schemas: st.SearchStrategy[Any] = st.recursive(
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"const": values})
    | st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(2, 5)},
    )
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"]), "minimum": numbers},
        optional={"maximum": numbers, "exclusiveMaximum": numbers},
    )
    | st.fixed_dictionaries(
        {"type": st.just("string"), "pattern": st.sampled_from(["^a+$", "b", r"\d{2}$", "^[^a]*$"])}
    )
    | st.sampled_from([{"type": "boolean"}, {"type": ["null", "boolean"]}]),
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_every_walk_through_a_schema_is_valid_or_the_schema_is_refused(
    schema: Any, seed: int
) -> None:
    try:
        grammar = compiled("json_schema", schema)
    except BadConstraint:
        assume(False)
    value = json.loads(walk(grammar, seed))
    jsonschema.Draft202012Validator(schema).validate(value)


@settings(max_examples=100, deadline=None)
@given(values)
def test_a_constant_can_be_said_in_no_other_way(value: Any) -> None:
    assert json.loads(walk(compiled("json_schema", {"const": value}), 1)) == value


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab()[]{}|*+?^$.\\/-12,:&\n é"), max_size=12), st.integers(0, 99))
def test_every_walk_through_an_expression_matches_it_or_it_is_refused(
    pattern: str, seed: int
) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            python = re.compile(pattern)
        grammar = compiled("regex", pattern)
    except (re.error, BadConstraint, OverflowError):
        assume(False)
    # An unbounded one is followed for a while.
    draw, matcher, said = random.Random(seed), grammar.new_matcher(), bytearray()
    while not matcher.finished:
        tokens = allowed(matcher)
        if END in tokens and (len(said) > 20 or draw.random() < 0.3):
            break
        assume(len(said) < 500)
        matcher.accept(token := draw.choice([t for t in tokens if t != END] or [END]))
        if token == END:
            break
        said.append(token)
    assert python.fullmatch(said.decode())


@settings(max_examples=100, deadline=None)
@given(st.recursive(values, lambda x: st.lists(x) | st.dictionaries(texts | st.sampled_from(
    ["type", "$ref", "properties", "enum", "items", "pattern", "minimum", "anyOf", "required"]), x),
    max_leaves=12))  # fmt: skip
def test_any_value_as_a_schema_is_enforced_or_refused(value: Any) -> None:
    with suppress(BadConstraint):
        check_constraint(OutputConstraint("json_schema", value))


# ------------------------------------------------------------------------------------- regex


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("a|b", ["a", "b"], ["ab", ""]),
        ("^ab$", ["ab"], ["a", "xab"]),
        ("", [""], ["a"]),
        ("a/b\n[/]", ["a/b\n/"], ["a/b/"]),
        ("//x", ["//x"], [""]),
        ("#\"'", ["#\"'"], ["#"]),
        (r"\d{3}", ["123"], ["12", "1234"]),
        ("(?i)ab", ["AB"], ["xab"]),
        ("é+😀", ["éé😀"], ["e"]),
        (r"[^\n]", ["a", "é"], ["\n"]),
    ],
)
def test_an_expression_is_matched_by_the_whole_answer(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    grammar = compiled("regex", pattern)
    assert [text for text in right if not says(grammar, text)] == []
    assert [text for text in wrong if says(grammar, text)] == []


@pytest.mark.parametrize("pattern", ["(", "a\\", "(?=x)y", "*", "a{2,1}", 3, None, "a\ud800", "\0"])
def test_a_broken_expression_is_refused(pattern: Any) -> None:
    refusal("regex", pattern)


# -------------------------------------------------------------------------------------- GBNF

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""

GBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "repetition": ('root ::= "a"{5,5}', ["aaaaa"], ["aaaa", "aaaaaa"]),
    "repetitions": ('root ::= "ab"{2,} [c]{0,1} "d"{0}', ["abab", "ababc"], ["ab", "ababcc"]),
    "nested repetition": ('root ::= ("a"{2}){2}', ["aaaa"], ["aa", "aaa"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600\t\\\"\[\]"', ['Aé😀\t\\"[]'], ["A"]),
    "classes": (r'root ::= [^\n] [\]a-c] [-x] [x^-] "/" [/]', ["é]-^//", "éb-x//"], ["\na-x//"]),
    "unicode classes": ("root ::= [ぁ-ゟ]+", ["ぁゟ"], ["a", ""]),
    "any": ("root ::= . .", ["\né"], ["a"]),
    "comments and lines": (
        '# one\nroot ::= (  # two\n  a | # three\n  "b"\n) "c" |\n  "#" # four\n\na ::= "a"\r\n',
        ["ac", "bc", "#"],
        ["a", "c"],
    ),
    "bar in front": ('root ::= "a"\n  | "b"', ["a", "b"], [""]),
    "names": (
        'root ::= Foo-1 foo_1 start\nFoo-1 ::= "a"\nfoo_1 ::= "b"\nstart ::= "c"',
        ["abc"],
        ["ab"],
    ),
    "recursion": ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
    "left recursion": ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
    "empty": ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
    # A lexer that takes the longest literal would lose the second.
    "overlap": ('root ::= "ab" "x" | [a-z] [a-z] "y"', ["abx", "aby"], ["ab"]),
    "overlap in recursion": (
        'root ::= ("ab" "x" | [a-z] [a-z] "y") root | "."',
        ["aby.", "abxaby."],
        ["aby"],
    ),
    "llama.cpp's JSON": (JSON_GBNF, ['{"a": [1, -2.5e3, "é\\n"]}', "{\n\t}"], ["[1]", '{"a" 1}']),
}


@pytest.mark.parametrize("name", GBNF)
def test_a_gbnf_grammar_is_followed(name: str) -> None:
    source, right, wrong = GBNF[name]
    grammar = compiled("gbnf", source)
    assert [text for text in right if not says(grammar, text)] == []
    assert [text for text in wrong if says(grammar, text)] == []


def test_rules_that_double_each_other_do_not_explode() -> None:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}?" for i in range(40)]
    source = "root ::= r0\n" + "\n".join(rules) + '\nr40 ::= "a"'
    begin = time.process_time()
    grammar = compiled("gbnf", source)
    assert allowed(grammar.new_matcher()) == [97]
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "root"),
        ('x ::= "a"', "root"),
        ("root ::= y", "'y'"),
        ('root ::= "a', "end"),
        ("root ::= [a", "end"),
        ("root ::= []", "empty"),
        ("root ::= [z-a]", "range"),
        ('root = "a"', "::="),
        ('root ::= "a" )', "line 1"),
        ('root ::= ("a"', ")"),
        ('root ::= "a"{3,1}', "repetition"),
        ('root ::= "a"{', "count"),
        ('root ::= "a"{9999999999}', "count"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\xg0"', "hexadecimal"),
        (r'root ::= "\ud800"', "no character"),
        (r'root ::= "\U00110000"', "no character"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= <think>", "tokens"),
        ("root ::= root", "finite"),
        ('root ::= "a" root', "finite"),
        ({"a": 1}, "string"),
    ],
)
def test_a_broken_gbnf_grammar_is_refused(source: Any, named: str) -> None:
    assert named in refusal("gbnf", source)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from('root:= "a[]()|*{1,}\\n#\n-'), max_size=30))
def test_any_text_as_gbnf_is_a_grammar_or_refused(text: str) -> None:
    with suppress(BadConstraint):
        compiled("gbnf", "root ::= " + text)


# -------------------------------------------------------------------------------------- Lark


def test_a_lark_grammar_is_taken_as_it_is() -> None:
    grammar = compiled("lark", '%import common.INT\nstart: INT ("," INT)* // a comment')
    assert says(grammar, "1,23")
    assert not says(grammar, "1,")


@pytest.mark.parametrize(
    "source",
    ["", "x", "start: y", 'start: "a', "foo: /a/", "start: /(?=a)/", "start: A\nA: /a/ & /b/", 1],
)
def test_a_broken_lark_grammar_or_one_that_accepts_nothing_is_refused(source: Any) -> None:
    refusal("lark", source)


def test_a_source_beyond_the_bound_is_not_compiled() -> None:
    with pytest.raises(BadConstraint, match="larger"):
        compile_grammar(tokenizer(), "start: /a/" + " " * 600_000)


def test_a_refusal_is_one_short_printable_sentence_whatever_is_in_it() -> None:
    message = refusal("json_schema", {"\u202e\x00\n" + "x" * 10**6: 1})
    assert "\u202e" not in message


@pytest.mark.parametrize("pattern", ["1?+", "a*+", "a++b", "a{2}+", "a{2,}+", r"\\\\?+"])
def test_a_possessive_quantifier_is_refused_since_the_engine_reads_it_otherwise(
    pattern: str,
) -> None:
    with pytest.raises(BadConstraint, match="possessive"):
        check_constraint(OutputConstraint("regex", pattern))


@pytest.mark.parametrize("pattern", [r"a\?+", r"a\++", "[?]+", "[+]+", r"a\}+", "a?b+"])
def test_a_plus_behind_what_is_no_quantifier_is_one(pattern: str) -> None:
    check_constraint(OutputConstraint("regex", pattern))
