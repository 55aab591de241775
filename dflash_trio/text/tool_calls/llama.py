"""Llama 3.1 and 3.2: a JSON object with ``name`` and ``parameters``, several separated by ``;``.

``<|python_tag|>`` may stand before it. Where it does not, nothing tells a call from JSON that
answers the user, so only an object at the start of a line that names a tool of the request is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...generation.request import Tool
from . import grammar
from .json_values import read_call_object
from .pieces import ToolCallParser
from .reader import PieceReader, Reading

PYTHON_TAG = "<|python_tag|>"
_TAGS = (PYTHON_TAG,)


class Llama3Json:
    name = "llama3-json"
    control_literals = frozenset({PYTHON_TAG})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(frozenset(tool.name for tool in tools))

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        return grammar.calls(
            tools,
            lambda tool, rules: grammar.call_object(tool, rules, "parameters"),
            between=grammar.quoted("; ") if parallel else None,
        )


class _Parser(PieceReader):
    starts = frozenset("{<")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        super().__init__()

    def read_call(self) -> Reading[bool]:
        known: frozenset[str] | None = self._names
        if (yield from self.peek()) == "<":
            if not (yield from self.match(PYTHON_TAG)):
                return False
            known = None
            if (yield from self.skip_spaces()) != "{":
                return False
        elif not self.at_line_start:
            return False
        if not (yield from read_call_object(self, known, _TAGS)):
            return False
        while (yield from self.optional(self._another(known))):
            pass
        return True

    def _another(self, known: frozenset[str] | None) -> Reading[bool]:
        if (yield from self.skip_spaces()) != ";":
            return False
        self.take()
        if (yield from self.skip_spaces()) != "{":
            return False
        return (yield from read_call_object(self, known, _TAGS))
