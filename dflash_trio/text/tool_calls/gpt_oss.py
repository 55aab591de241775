"""gpt-oss: a message on the channel ``commentary`` to ``functions.NAME``.

The engine takes these models' output apart by channels itself (see ``harmony``), so what a parser
of this format gets is content in which there are no calls any more. It still reads calls from text
in which they are written out.

A turn makes one call: the token that ends it ends the turn, so ``parallel`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...generation.request import Tool
from ..bad_constraint import BadConstraint
from . import grammar
from .harmony import CALL, CHANNEL, CONSTRAIN, CONTROLS, END, MESSAGE, START, parse_header
from .json_values import read_arguments
from .pieces import ToolCallParser
from .reader import SPACES, PieceReader, Reading

_TAGS = (CALL, END, START, CHANNEL)


class GptOss:
    name = "gpt-oss"
    control_literals = CONTROLS

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser()

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Behind ``<|start|>assistant``, where a prompt ends; where a message of thinking has ended
        since, these two are written as well. Raises BadConstraint for a name with white space."""
        start, channel, constrain, message = (
            grammar.literal(tag, controls) for tag in (START, CHANNEL, CONSTRAIN, MESSAGE)
        )
        for tool in tools:
            if not tool.name or set(tool.name) & (SPACES | {"<"}):
                raise BadConstraint(f"{tool.name!r} cannot be written in the form gpt-oss")
        return grammar.calls(
            tools,
            lambda tool, rules: (
                f"{channel} {grammar.quoted(f'commentary to=functions.{tool.name} ')} "
                f'{constrain} "json" {message} {grammar.arguments(tool, rules)}'
            ),
            before=f'({start} "assistant")?',
            between=None,
        )


class _Parser(PieceReader):
    starts = frozenset("<")

    def read_call(self) -> Reading[bool]:
        header: list[str] = []
        while tag := (yield from self.match(START, CHANNEL, CONSTRAIN, MESSAGE)):
            if tag == MESSAGE:
                break
            header.append(tag)
            while (character := (yield from self.peek())) and character not in "<\n":
                header.append(self.take())
        tool = parse_header("".join(header)).tool
        if tag is None or tool is None:
            return False
        self.begin(tool)
        yield from self.skip_spaces()
        yield from read_arguments(self, self.arguments, _TAGS)
        self.end()
        yield from self.optional(self._close())
        return True

    def _close(self) -> Reading[bool]:
        yield from self.skip_spaces()
        return (yield from self.match(CALL, END)) is not None
