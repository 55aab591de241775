"""DeepSeek, in two forms behind ``<｜tool▁calls▁begin｜>``.

V3 and R1 write ``function``, a separator, the name, and the arguments in a fence of code; V3.1 the
name, the separator and the arguments. Both are read; which of them is forced, the template tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ...generation.request import Tool
from ..bad_constraint import BadConstraint
from . import grammar
from .json_values import read_arguments
from .pieces import ToolCallParser
from .reader import SPACES, PieceReader, Reading

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_TAGS = (_FENCE, CALLS, END_CALLS, CALL, END_CALL)


@frozen
class DeepSeek:
    fenced: bool = True
    """Force the form of V3 and R1."""

    @property
    def name(self) -> str:
        return "deepseek"

    @property
    def control_literals(self) -> frozenset[str]:
        return frozenset({CALLS, END_CALLS, CALL, END_CALL, SEPARATOR})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser()

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Raises BadConstraint for a name that the form cannot hold."""
        calls, end_calls, call, end_call, separator = (
            grammar.literal(tag, controls) for tag in (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
        )
        for tool in tools:
            if tool.name.strip() != tool.name or set(tool.name) & set("<{`\r\n") or not tool.name:
                raise BadConstraint(f"{tool.name!r} cannot be written in the form deepseek")

        def one(tool: Tool, rules: grammar.Rules) -> str:
            arguments = grammar.arguments(tool, rules)
            name = grammar.quoted(tool.name)
            if not self.fenced:
                return f"{call} {name} {separator} {arguments} {end_call}"
            fence, end_fence = grammar.quoted("\n```json\n"), grammar.quoted("\n```")
            return (
                f'{call} "function" {separator} {name} {fence} {arguments} {end_fence} {end_call}'
            )

        between = grammar.quoted("\n" if self.fenced else "") if parallel else None
        return grammar.calls(tools, one, before=calls, between=between, after=end_calls)


class _Parser(PieceReader):
    starts = frozenset("<")

    def read_call(self) -> Reading[bool]:
        tag = yield from self.match(CALLS, CALL)
        if tag == CALLS:
            yield from self.skip_spaces()
            tag = yield from self.match(CALL)
        if tag is None:
            return False
        name = yield from self._up_to("<\n")
        if not name or not (yield from self.match(SEPARATOR)):
            return False
        if (yield from self.skip_spaces()) not in ("{", "["):
            name = yield from self._up_to("\n`{<")
            if not name:
                return False
        self.begin(name)
        if (yield from self.skip_spaces()) == "`":
            if not (yield from self.optional(self._fence())):
                return True
            yield from self.skip_spaces()
        yield from read_arguments(self, self.arguments, _TAGS)
        self.end()
        yield from self.optional(self._end_call())
        yield from self.optional(self._end_calls())
        return True

    def _up_to(self, stops: str) -> Reading[str]:
        parts: list[str] = []
        while (character := (yield from self.peek())) and character not in stops:
            parts.append(self.take())
        return "".join(parts).strip()

    def _fence(self) -> Reading[bool]:
        if (yield from self.match(_FENCE)) is None:
            return False
        while (character := (yield from self.peek())) and character not in SPACES | {"{"}:
            self.take()
        return True

    def _end_call(self) -> Reading[bool]:
        if (yield from self.skip_spaces()) == "`":
            if (yield from self.match(_FENCE)) is None:
                return False
            yield from self.skip_spaces()
        return (yield from self.match(END_CALL)) is not None

    def _end_calls(self) -> Reading[bool]:
        yield from self.skip_spaces()
        return (yield from self.match(END_CALLS)) is not None
