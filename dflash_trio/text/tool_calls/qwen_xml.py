"""Qwen3-Coder: ``<tool_call>``, ``<function=NAME>`` with a ``<parameter=KEY>`` for each argument.

A value is plain text between two line breaks. What it means in JSON the tool's schema says: an
argument that can only be a string is one as it stands, and is handed on as it comes; any other is
read as JSON where it is some of a type that the schema allows, and is a string where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...generation.request import Tool
from ..bad_constraint import BadConstraint
from ..patterns import check_pattern, pattern_source
from . import grammar
from .json_values import escaped, read_call_object
from .pieces import ToolCallParser
from .reader import Emit, PieceReader, Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_STRING = frozenset({"string"})
_NOT_IN_TEXT = frozenset({"format", "allOf", "not", "if", "$ref"})
"""What a schema may say about a string that its grammar does not."""
_WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXml:
    name = "qwen-xml"
    control_literals = frozenset({OPEN, CLOSE})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Raises BadConstraint as ``grammar.checked_properties`` does."""
        opening, closing = (grammar.literal(tag, controls) for tag in (OPEN, CLOSE))

        def one(tool: Tool, rules: grammar.Rules) -> str:
            found = grammar.checked_properties(tool, _can_be_named, self.name)
            head, tail = f"\n{_FUNCTION}{tool.name}>\n", f"{_END_FUNCTION}\n"
            items = [(_parameter(each, tool, rules), each.required) for each in found]
            values = grammar.in_order(items, rules)
            return f"{opening} {grammar.quoted(head)} {values} {grammar.quoted(tail)} {closing}"

        return grammar.calls(tools, one, between=grammar.quoted("\n") if parallel else None)


def _can_be_named(name: str) -> bool:
    return bool(name) and name == name.strip() and not set(name) & set("<>\n")


def _parameter(each: grammar.Property, tool: Tool, rules: grammar.Rules) -> str:
    head = grammar.quoted(f"{_PARAMETER}{each.name}>\n")
    if each.types == _STRING:
        if tool.strict and (beyond := _NOT_IN_TEXT & set(each.schema)):
            words = ", ".join(sorted(beyond))
            raise BadConstraint(f"{words} of {each.name!r} cannot be enforced in the form qwen-xml")
        return f'{head} {_text(each.schema, rules, strict=tool.strict)} "\\n"'
    value = rules.add(grammar.json_value(each.schema, lenient=not tool.strict))
    return f"{head} {value} {grammar.quoted(f'{chr(10)}{_END_PARAMETER}{chr(10)}')}"


def _text(schema: Mapping[str, Any], rules: grammar.Rules, *, strict: bool) -> str:
    """A string without quotes, and the tag that ends it. ``strict``: a pattern that cannot be
    enforced raises BadConstraint; otherwise it is passed over."""
    ending = grammar.quoted("\n" + _END_PARAMETER)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        # A value is read back without the line breaks next to its tags, so none may hold a tag.
        texts = [
            value for value in values if isinstance(value, str) and _END_PARAMETER not in value
        ]
        return f"({' | '.join(map(grammar.quoted, texts))}) {ending}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            choices = [choice for choice in schema[key] or () if isinstance(choice, Mapping)]
            each = (
                _text({**schema, key: None, **choice}, rules, strict=strict) for choice in choices
            )
            if joined := " | ".join(each):
                return rules.add(joined)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f"{{{least},{most}}}" if least or most != "" else "*"
    # The tag may come only where the value ends, and the first that comes ends it.
    body = f"/(?s:.{length})/ & ~/(?s:.*)<\\/parameter>(?s:.*)/"
    if isinstance(pattern := schema.get("pattern"), str):
        try:
            check_pattern(pattern, schema=True)
            body += f" & {pattern_source(_searched(pattern))}"
        except BadConstraint:
            if strict:
                raise
    value = rules.terminal(body)
    whole = rules.terminal(f"{value} {ending}")
    rules.lines.append(f"{whole.lower()}[lazy]: {whole}")
    return whole.lower()


def _searched(pattern: str) -> str:
    """An expression that matches all of what the pattern is found in."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner if after else inner[:-1]
    return f"{before}({inner}){after}"


class _Parser(PieceReader):
    starts = frozenset("<")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._types = {
            tool.name: {each.name: each.types for each in grammar.properties(tool)}
            for tool in tools
        }
        self._tag = ""
        super().__init__()

    def read_call(self) -> Reading[bool]:
        tag = yield from self.match(OPEN, _FUNCTION)
        if tag == OPEN:
            if (yield from self.skip_spaces()) == "{":
                if not (yield from read_call_object(self, None, (OPEN, CLOSE))):
                    return False
                yield from self.optional(self._close())
                return True
            tag = yield from self.match(_FUNCTION)
        if tag is None or not (name := (yield from self._name())):
            return False
        self.begin(name)
        if (yield from self._arguments(self._types.get(name, {}))):
            self.end()
            if self._tag != CLOSE:
                yield from self.optional(self._close())
        return True

    def _name(self) -> Reading[str]:
        """The rest of an opening tag. Empty: it is none."""
        parts: list[str] = []
        while (character := (yield from self.peek())) and character not in "<>\n":
            parts.append(self.take())
        if character != ">":
            return ""
        self.take()
        return "".join(parts).strip()

    def _close(self) -> Reading[bool]:
        # A brace too many before the tag belongs to a call that lost count.
        while (yield from self.skip_spaces()) == "}":
            self.take()
        return (yield from self.match(CLOSE)) is not None

    def _arguments(self, types: Mapping[str, frozenset[str]]) -> Reading[bool]:
        """False: the call broke off, and is over."""
        before = "{"
        while (yield from self.optional(self._next_tag())):
            if self._tag in (_END_FUNCTION, CLOSE):
                self.arguments("{}" if before == "{" else "}")
                return True
            key = self._tag
            self.arguments(f'{before}"{escaped(key)}": ')
            before = ", "
            if not (yield from self._value(types.get(key, frozenset()))):
                self.end()
                return False
        return False

    def _next_tag(self) -> Reading[bool]:
        yield from self.skip_spaces()
        # Some models forget to end the function: the end of the call is its end as well.
        tag = yield from self.match(_PARAMETER, _END_FUNCTION, CLOSE)
        self._tag = (yield from self._name()) if tag == _PARAMETER else tag or ""
        return bool(self._tag)

    def _value(self, types: frozenset[str]) -> Reading[bool]:
        if types == _STRING:
            self.arguments('"')
            whole = yield from self._value_text(lambda text: self.arguments(escaped(text)))
            if whole:
                self.arguments('"')
            return whole
        parts: list[str] = []
        whole = yield from self._value_text(parts.append)
        if whole:
            self.arguments(as_json("".join(parts), types))
        return whole

    def _value_text(self, emit: Emit) -> Reading[bool]:
        """Hands a value's text on, without the line breaks next to its tags. False: no end."""
        if (yield from self.peek()) == "\n":
            self.take()
        line_break = ""
        while character := (yield from self.peek()):
            if character == "<":
                tag, text = yield from self.match_or_text(_END_PARAMETER)
                if tag:
                    return True
                emit(line_break + text)
                line_break = ""
                continue
            self.take()
            if character == "\n":
                emit(line_break)
                line_break = "\n"
            else:
                emit(line_break + character)
                line_break = ""
        return False


def as_json(text: str, types: frozenset[str]) -> str:
    """What a value that need not be a string is in JSON. ``types``: those it may have, all if
    empty."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not any(_CHECKS.get(kind, _anything)(value) for kind in types):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _anything(value: object) -> bool:
    return True


_CHECKS: dict[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
