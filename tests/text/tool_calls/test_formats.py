"""A chat template tells in which form its model calls tools."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trio.cli.model_options import TOOL_PARSERS
from dflash_trio.generation.request import Tool
from dflash_trio.text.bad_constraint import BadConstraint
from dflash_trio.text.builtin_templates import CHATML, GEMMA
from dflash_trio.text.tool_calls.deepseek import DeepSeek
from dflash_trio.text.tool_calls.formats import FORMATS, detect_format


def test_the_formats_are_those_of_the_command_line() -> None:
    assert list(FORMATS) == list(TOOL_PARSERS)
    assert all(name == each.name for name, each in FORMATS.items())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        (CHATML.source, "hermes"),
        (GEMMA.source, "hermes"),
        ("within <tool_call></tool_call> XML tags: {{ tools }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen-xml"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|python_tag|>' }}{{ tools }}", "llama3-json"),
        ('{"name": function name, "parameters": dictionary of argument name', "llama3-json"),
        ("use [func_name1(params_name1=params_value1)] {{ '<|python_start|>' }}", "llama-pythonic"),
        ("put it in ```tool_code", "gemma"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss"),
    ],
)
def test_a_template_tells_its_models_form(source: str | None, name: str) -> None:
    assert detect_format(source).name == name


def test_the_two_forms_of_deepseek_are_told_apart() -> None:
    begun = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}"
    assert detect_format(begun + "```json") == DeepSeek(fenced=True)
    assert detect_format(begun) == DeepSeek(fenced=False)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": {"a": 1, "b": None}, "required": "a"},
        {"properties": {"a": {"type": {}, "enum": 5}}, "required": [[], {}, 1]},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"$ref": "#/nowhere"}, "b": {"anyOf": [{"anyOf": {}}, 1]}}},
        {"$ref": "#"},
        {},
    ],
)
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_schema_that_is_none_does_not_keep_answers_from_being_read(
    form: str, parameters: Any
) -> None:
    tools = [Tool(name="f", parameters=parameters)]
    parser = FORMATS[form].new_parser(tools)
    parser.push('<function=f><parameter=a>1</parameter></function>[f(1)]{"name": "f"}')
    parser.finish()


@pytest.mark.parametrize("form", ["qwen-xml", "llama-pythonic", "gemma"])
def test_what_a_form_cannot_hold_a_strict_tool_to_is_refused(form: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}

    def grammar(tool: Tool) -> str:
        return FORMATS[form].call_grammar([tool], parallel=False, controls=frozenset())

    assert grammar(Tool(name="f", parameters=parameters))
    with pytest.raises(BadConstraint, match="minProperties"):
        grammar(Tool(name="f", parameters=parameters, strict=True))
    with pytest.raises(BadConstraint, match="cannot be written"):
        grammar(Tool(name="f", parameters={"properties": {"<a>\n": {}}}))
