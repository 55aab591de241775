"""Hermes, Qwen 2.5, Qwen 3 and our built-in templates.

``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``; several calls one
below the other. Several objects between two tags are as many calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...generation.request import Tool
from . import grammar
from .json_values import read_any_call
from .pieces import ToolCallParser
from .reader import PieceReader, Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = (OPEN, CLOSE)


class Hermes:
    name = "hermes"
    control_literals = frozenset({OPEN, CLOSE})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser()

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        opening, closing = (grammar.literal(tag, controls) for tag in (OPEN, CLOSE))
        return grammar.calls(
            tools,
            lambda tool, rules: (
                f"{opening} {grammar.quoted(chr(10))} "
                f"{grammar.call_object(tool, rules, 'arguments')} "
                f"{grammar.quoted(chr(10))} {closing}"
            ),
            between=grammar.quoted("\n") if parallel else None,
        )


class _Parser(PieceReader):
    starts = frozenset("<")

    def read_call(self) -> Reading[bool]:
        if (yield from self.match(OPEN)) is None or not (yield from read_any_call(self, _TAGS)):
            return False
        while (yield from self.optional(read_any_call(self, _TAGS))):
            pass
        yield from self.optional(self._close())
        return True

    def _close(self) -> Reading[bool]:
        # A brace too many before the tag belongs to a call that lost count.
        while (yield from self.skip_spaces()) == "}":
            self.take()
        return (yield from self.match(CLOSE)) is not None
