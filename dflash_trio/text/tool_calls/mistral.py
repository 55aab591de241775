"""Mistral, in two forms behind ``[TOOL_CALLS]``.

A JSON list of objects with ``name`` and ``arguments``; or, of newer models, the name, ``[ARGS]``
and the arguments, with a ``[TOOL_CALLS]`` for each call and perhaps a ``[CALL_ID]`` in between.
Which one a model writes its vocabulary tells: the newer form needs ``[ARGS]`` as a control token.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...generation.request import Tool
from ..bad_constraint import BadConstraint
from . import grammar
from .json_values import read_any_call, read_arguments
from .pieces import ToolCallParser
from .python_values import is_name, read_word
from .reader import PieceReader, Reading

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_TAGS = (CALLS,)


class Mistral:
    name = "mistral"
    control_literals = frozenset({CALLS, ARGUMENTS, CALL_ID})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser()

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Raises BadConstraint for a name that the newer form cannot hold."""
        opening = grammar.literal(CALLS, controls)
        if ARGUMENTS not in controls:
            return grammar.calls(
                tools,
                lambda tool, rules: grammar.call_object(tool, rules, "arguments"),
                before=f'{opening} "["',
                between='", "' if parallel else None,
                after='"]"',
            )
        for tool in tools:
            if not is_name(tool.name):
                raise BadConstraint(f"{tool.name!r} cannot be written in the form mistral")
        separator = grammar.literal(ARGUMENTS, controls)
        return grammar.calls(
            tools,
            lambda tool, rules: (
                f"{opening} {grammar.quoted(tool.name)} {separator} "
                f"{grammar.arguments(tool, rules)}"
            ),
            between='""' if parallel else None,
        )


class _Parser(PieceReader):
    starts = frozenset("[")

    def read_call(self) -> Reading[bool]:
        if (yield from self.match(CALLS)) is None:
            return False
        character = yield from self.skip_spaces()
        if character == "{":
            return (yield from read_any_call(self, _TAGS))
        if character == "[":
            return (yield from self._list())
        name = yield from read_word(self)
        if not name:
            return False
        if (yield from self.skip_spaces()) == "[":
            tag = yield from self.match(CALL_ID, ARGUMENTS)
            if tag == CALL_ID:
                yield from read_word(self)
                yield from self.skip_spaces()
                tag = yield from self.match(ARGUMENTS)
            if tag is None:
                return False
        elif (yield from self.peek()) != "{":
            return False
        self.begin(name)
        yield from self.skip_spaces()
        yield from read_arguments(self, self.arguments, _TAGS)
        return True

    def _list(self) -> Reading[bool]:
        self.take()
        if not (yield from read_any_call(self, _TAGS)):
            return False
        while (yield from self.optional(self._another())):
            pass
        yield from self.optional(self._close())
        return True

    def _another(self) -> Reading[bool]:
        if (yield from self.skip_spaces()) != ",":
            return False
        self.take()
        return (yield from read_any_call(self, _TAGS))

    def _close(self) -> Reading[bool]:
        if (yield from self.skip_spaces()) != "]":
            return False
        self.take()
        return True
