"""The fields that say what an answer has to look like: OpenAI's, llama.cpp's and vLLM's.

All of them come down to one OutputConstraint. Two of them in one body would contradict each other.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import OutputConstraint
from .field_schemas import JsonObject, one_of, schema_field
from .json_body import printable
from .sampling_fields import SamplingFields
from .tools import check_output
from .validation import FieldProblem

FORMATS = ("text", "json_object", "json_schema")
MAX_CHOICES = 1024


@frozen
class NamedSchema:
    """``response_format.json_schema``. Enforced whether ``strict`` or not."""

    schema: JsonObject | None = None
    name: str | None = None
    strict: bool | None = None


@frozen
class ResponseFormat:
    """``response_format``. ``schema`` beside the type is llama.cpp's way to write it."""

    type: str = schema_field(one_of(*FORMATS))
    json_schema: NamedSchema | None = None
    schema: JsonObject | None = None

    @type.validator
    def _known_type(self, _: Any, value: str) -> None:
        if value not in FORMATS:
            raise FieldProblem(
                f"must be one of {', '.join(FORMATS)}, not {printable(value)}", "type"
            )
        if value == "json_schema" and self.json_schema is None and self.schema is None:
            raise FieldProblem("is required", "json_schema")

    def as_constraint(self) -> OutputConstraint | None:
        if self.type == "text":
            return None
        schema = self.schema
        if self.type == "json_schema" and self.json_schema is not None:
            schema = self.json_schema.schema or schema
        if schema is None:
            return OutputConstraint("json_object")
        return OutputConstraint("json_schema", schema.value)


def _check_choices(_instance: Any, attribute: Any, value: tuple[str, ...] | None) -> None:
    if value is None:
        return
    if not 0 < len(value) <= MAX_CHOICES:
        raise FieldProblem(f"must have from 1 to {MAX_CHOICES} strings", attribute.name)
    for index, choice in enumerate(value):
        if not choice:
            raise FieldProblem("must not be empty", f"{attribute.name}[{index}]")


def _choice_constraint(choices: tuple[str, ...]) -> OutputConstraint:
    # Strings in such a grammar are written as in JSON.
    quoted = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    return OutputConstraint("lark", f"start: {quoted}\n")


@frozen
class StructuredOutputs:
    """``structured_outputs``, vLLM's: exactly one of these."""

    json: JsonObject | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = field(default=None, validator=_check_choices)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = field(default=None)

    @structural_tag.validator
    def _no_tags(self, _: Any, value: Any) -> None:
        if value is not None:
            raise FieldProblem(
                "is not available; use json, regex, choice or grammar", "structural_tag"
            )

    def constraints(self) -> dict[str, OutputConstraint]:
        found = _constraints(
            self.json, self.regex, self.choice, self.grammar, "structured_outputs."
        )
        if self.json_object:
            found["structured_outputs.json_object"] = OutputConstraint("json_object")
        return found


def _constraints(
    schema: JsonObject | None,
    regex: str | None,
    choices: tuple[str, ...] | None,
    grammar: str | None,
    prefix: str,
) -> dict[str, OutputConstraint]:
    """vLLM's four ways, by their paths: ``prefix`` and a name."""
    found = {}
    if schema is not None:
        found[f"{prefix}json"] = OutputConstraint("json_schema", schema.value)
    if regex is not None:
        found[f"{prefix}regex"] = OutputConstraint("regex", regex)
    if choices is not None:
        found[f"{prefix}choice"] = _choice_constraint(choices)
    if grammar is not None:
        found[f"{prefix}grammar"] = OutputConstraint("gbnf", grammar)
    return found


@frozen(kw_only=True)
class OutputFields(SamplingFields):
    """Base of requests with these fields."""

    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: JsonObject | None = None
    guided_json: JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = field(default=None, validator=_check_choices)
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def as_constraint(self) -> OutputConstraint | None:
        """What the answer has to look like. Raises InvalidRequest for what cannot be enforced."""
        found: dict[str, OutputConstraint] = {}
        if self.response_format is not None:
            constraint = self.response_format.as_constraint()
            if constraint is not None:
                found["response_format"] = constraint
        # llama.cpp's clients send an empty one for none.
        if self.grammar:
            found["grammar"] = OutputConstraint("gbnf", self.grammar)
        if self.json_schema is not None:
            found["json_schema"] = OutputConstraint("json_schema", self.json_schema.value)
        found |= _constraints(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_"
        )
        if self.structured_outputs is not None:
            found |= self.structured_outputs.constraints()
        if not found:
            return None
        path, *others = found
        if others:
            raise InvalidRequest(
                f"{others[0]}: says what the answer has to look like, and so does {path}; send "
                "one of them.",
                param=others[0],
            )
        check_output(found[path], path)
        return found[path]
