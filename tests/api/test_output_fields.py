"""The many ways to say what an answer has to look like, and that each becomes one constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trio.api import tools
from dflash_trio.api.chat_request import parse_chat_call
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import OutputConstraint

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a"'


def read(**fields: Any) -> OutputConstraint | None:
    return parse_chat_call(json.dumps({"messages": HI, **fields}).encode()).request.constraint


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(**fields)
    return error.value


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": False},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_object",
            None,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"grammar": GBNF}, "gbnf", GBNF),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"guided_grammar": GBNF}, "gbnf", GBNF),
        ({"guided_choice": ["yes", 'n"o', "yes"]}, "lark", 'start: "yes" | "n\\"o"\n'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"grammar": GBNF}}, "gbnf", GBNF),
        ({"structured_outputs": {"choice": ["a"]}}, "lark", 'start: "a"\n'),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
    ],
)
def test_each_way_becomes_the_constraint_it_means(
    fields: dict[str, Any], kind: str, source: Any
) -> None:
    constraint = read(**fields)
    assert constraint is not None
    assert (constraint.kind, constraint.source) == (kind, source)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_what_demands_nothing_is_no_constraint(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar"),
        ({"grammar": GBNF, "json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_two_demands_in_one_body_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
            "an object",
        ),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"grammar": 5}, "grammar", "a string"),
        ({"json_schema": "x"}, "json_schema", "an object"),
        ({"guided_choice": []}, "guided_choice", "from 1 to"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "must not be empty"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", "a string"),
        ({"structured_outputs": []}, "structured_outputs", "an object"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "empty"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag",
            "not available",
        ),
    ],
)
def test_a_demand_that_is_none_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert says in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": GBNF}, "grammar"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: OutputConstraint) -> None:
        raise tools.BadConstraint("it does not parse")

    monkeypatch.setattr(tools, "check_constraint", refuse)
    error = refusal(**fields)
    assert error.param == param
    assert "it does not parse" in str(error)
