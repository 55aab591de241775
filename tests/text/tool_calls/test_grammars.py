"""A forced call is one: whatever a grammar allows is read back as calls whose arguments follow the
tool's schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from dflash_trio.generation.request import Tool
from dflash_trio.text.bad_constraint import BadConstraint
from dflash_trio.text.tool_calls.deepseek import DeepSeek
from dflash_trio.text.tool_calls.formats import FORMATS
from dflash_trio.text.tool_calls.grammar import control_reference
from dflash_trio.text.tool_calls.pieces import ToolFormat

from .reading import CLOCK, WEATHER, in_words, read

EDIT = Tool(
    name="edit-file.v2",
    strict=True,
    parameters={
        "type": "object",
        "$defs": {"mode": {"enum": ["r", "w\nx"]}, "n": {"type": "integer", "minimum": 3}},
        "properties": {
            "path": {"type": "string", "pattern": "^/[a-z/]+$"},
            "short": {"type": "string", "minLength": 2, "maxLength": 4},
            "mode": {"$ref": "#/$defs/mode"},
            "count": {"$ref": "#/$defs/n"},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string", "const": "all"}, {"type": "integer"}]},
            "word": {"anyOf": [{"const": "one"}, {"type": "string", "maxLength": 3}]},
            "nested": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "any": {},
        },
        "required": ["mode", "count", "nested"],
        "additionalProperties": False,
    },
)
EMPTY = Tool(name="empty", parameters={"type": "object", "properties": {}})
ODD = Tool(
    name="odd",
    parameters={"properties": {"u": {"type": "string", "format": "unheard-of"}}, "required": ["u"]},
)
TOOLS = (WEATHER, CLOCK, EDIT, EMPTY, ODD)

ALL_FORMS: list[ToolFormat] = [*FORMATS.values(), DeepSeek(fenced=False)]
CONTROLS = sorted({literal for form in ALL_FORMS for literal in form.control_literals})


class _Vocabulary:
    """One token a byte, and the formats' control tokens behind them."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (
        *(bytes([byte]) for byte in range(256)),
        b"<eos>",
        *(control_reference(literal).encode() for literal in CONTROLS),
    )
    special_token_ids = tuple(range(256, 257 + len(CONTROLS)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary()))


def matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    made = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not made.get_error(), f"{made.get_error()}\n{grammar}"
    return made


ENDINGS = tuple(map(list, (b"\n</parameter>", b'"', b"}", b"]", b")", b",", b"0", b"1")))


def walk(follow: LLMatcher, rng: random.Random) -> str:
    """Text of random allowed tokens until nothing but the end is allowed, or the end is drawn."""
    taken: list[int] = []
    while not follow.is_stopped():
        mask = follow.compute_bitmask()
        allowed = [t for t in range(257 + len(CONTROLS)) if mask[t // 8] >> (t % 8) & 1]
        assert allowed
        if allowed == [256] or (256 in allowed and (rng.random() < 0.5 or len(taken) > 600)):
            break
        allowed = [token for token in allowed if token != 256]
        tokens = [rng.choice(allowed)]
        if rng.random() < len(taken) / 600:
            ending = next((e for e in ENDINGS if follow.validate_tokens(e) == len(e)), None)
            tokens = ending or tokens
        assert follow.consume_tokens(tokens), follow.get_error()
        taken += tokens
        assert len(taken) < 20_000
    data = b"".join(
        CONTROLS[token - 257].encode() if token > 256 else bytes([token]) for token in taken
    )
    return data.decode()


def check(form: ToolFormat, text: str, tools: tuple[Tool, ...], parallel: bool) -> int:
    calls = in_words(read(form, text, tools=tools))
    assert calls
    assert parallel or len(calls) == 1
    for call in calls:
        assert isinstance(call, tuple), text
        tool = next(tool for tool in tools if tool.name == call[0])
        arguments = json.loads(call[1])
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, tool.parameters or {"maxProperties": 0})
    return len(calls)


def _name(form: Any) -> str:
    return f"{form.name}{'' if getattr(form, 'fenced', True) else '-v3.1'}"


@pytest.mark.parametrize("form", ALL_FORMS, ids=_name)
@pytest.mark.parametrize("with_controls", [False, True])
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_forced_call_follows_its_schema(
    form: ToolFormat, with_controls: bool, tool: Tool, vocabulary: LLTokenizer
) -> None:
    controls = frozenset(CONTROLS) if with_controls else frozenset()
    grammar = form.call_grammar([tool], parallel=False, controls=controls)
    for seed in range(6):
        text = walk(matcher(vocabulary, grammar), random.Random(seed))
        check(form, text, (tool,), parallel=False)


@pytest.mark.parametrize("form", ALL_FORMS, ids=_name)
def test_with_parallel_several_calls_of_any_of_the_tools_may_come(
    form: ToolFormat, vocabulary: LLTokenizer
) -> None:
    tools = (WEATHER, CLOCK, EMPTY)
    counts = {True: 0, False: 0}
    for parallel in (True, False):
        grammar = form.call_grammar(tools, parallel=parallel, controls=frozenset(CONTROLS))
        for seed in range(12):
            text = walk(matcher(vocabulary, grammar), random.Random(seed))
            counts[parallel] = max(counts[parallel], check(form, text, tools, parallel))
    assert counts[False] == 1
    assert counts[True] > 1 or form.name == "gpt-oss"


@pytest.mark.parametrize("form", ALL_FORMS, ids=_name)
def test_a_tools_name_cannot_change_the_grammar(form: ToolFormat, vocabulary: LLTokenizer) -> None:
    tool = Tool(name='a"|/x/#\\n☃')
    if form.name in ("llama-pythonic", "gemma"):
        with pytest.raises(BadConstraint, match="cannot be written"):
            form.call_grammar([tool], parallel=False, controls=frozenset())
        return
    grammar = form.call_grammar([tool], parallel=False, controls=frozenset())
    text = walk(matcher(vocabulary, grammar), random.Random(1))
    assert in_words(read(form, text, tools=[tool])) == [(tool.name, "{}")]


def test_white_space_in_a_forced_object_is_bounded(vocabulary: LLTokenizer) -> None:
    grammar = FORMATS["hermes"].call_grammar([WEATHER], parallel=False, controls=frozenset())
    follow = matcher(vocabulary, grammar)
    written = list(b'<tool_call>\n{"name": "weather", "arguments": {"city": ')
    assert follow.validate_tokens(written) == len(written)
    assert follow.validate_tokens([*written, ord(" ")]) == len(written)


def test_a_schema_that_cannot_be_enforced_is_refused_for_a_strict_tool(
    vocabulary: LLTokenizer,
) -> None:
    hermes = FORMATS["hermes"]
    strict = Tool(name="odd", parameters=ODD.parameters, strict=True)
    with pytest.raises(BadConstraint, match="format"):
        hermes.call_grammar([strict], parallel=False, controls=frozenset())
    assert matcher(vocabulary, hermes.call_grammar([ODD], parallel=False, controls=frozenset()))


def test_a_pattern_that_cannot_be_enforced_is_refused_for_a_strict_tool(
    vocabulary: LLTokenizer,
) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": {"type": "string", "pattern": "(?=x)y"}},
        "additionalProperties": False,
    }
    for form in ALL_FORMS:
        strict = Tool(name="f", parameters=parameters, strict=True)
        with pytest.raises(BadConstraint, match="pattern"):
            form.call_grammar([strict], parallel=False, controls=frozenset())
    form = FORMATS["qwen-xml"]
    lax = Tool(name="f", parameters=parameters)
    assert matcher(vocabulary, form.call_grammar([lax], parallel=False, controls=frozenset()))
