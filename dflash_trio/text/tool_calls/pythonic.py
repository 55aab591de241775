"""Calls written in Python: a list of them (Llama 3.2 and 4), or a fence of code (Gemma 3).

The list may stand in ``<|python_start|>`` and ``<|python_end|>``. Where it does not, nothing tells
it from a list that answers the user, so it must be at the start of a line and begin with a tool of
the request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...generation.request import Tool
from . import grammar
from .pieces import ToolCallParser
from .python_values import is_name, read_call_arguments, read_word
from .reader import PieceReader, Reading

START, END = "<|python_start|>", "<|python_end|>"
FENCE, END_FENCE = "```tool_code", "```"
_PRINT = "print"
_SEPARATORS = frozenset("[]),;")


class LlamaPythonic:
    name = "llama-pythonic"
    control_literals = frozenset({START, END})

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _ListParser(tools)

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Raises BadConstraint as ``grammar.checked_properties`` does."""
        return grammar.calls(
            tools,
            lambda tool, rules: _call(tool, rules, self.name),
            before='"["',
            between='", "' if parallel else None,
            after='"]"',
        )


class Gemma:
    name = "gemma"
    control_literals: frozenset[str] = frozenset()

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _FenceParser(tools)

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """Raises BadConstraint as ``grammar.checked_properties`` does."""
        return grammar.calls(
            tools,
            lambda tool, rules: _call(tool, rules, self.name),
            before=grammar.quoted(FENCE + "\n"),
            between=grammar.quoted("\n") if parallel else None,
            after=grammar.quoted("\n" + END_FENCE),
        )


def _call(tool: Tool, rules: grammar.Rules, form: str) -> str:
    """A call with its arguments by name. Their values are JSON, which but for three words is
    Python; the words are Python's where the whole value is one."""
    items = []
    for each in grammar.checked_properties(tool, is_name, form):
        if each.types == {"boolean"} and not {"enum", "const"} & set(each.schema):
            value = '("True" | "False")'
        else:
            value = rules.add(grammar.json_value(each.schema, lenient=not tool.strict))
        items.append((f"{grammar.quoted(each.name + '=')} {value}", each.required))
    values = grammar.in_order(items, rules, '", "')
    return f'{grammar.quoted(tool.name + "(")} {values} ")"'


class _PythonicParser(PieceReader):
    """Reads calls one by one, wherever they stand."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters = {
            tool.name: [each.name for each in grammar.properties(tool)] for tool in tools
        }
        self._broken = False
        super().__init__()

    def _call(self, known: Collection[str] | None) -> Reading[bool]:
        """``known``: the names that make it a call; ``None``: any. False: nothing was begun."""
        name = yield from read_word(self)
        if not name or (known is not None and name not in known):
            return False
        if (yield from self.peek()) != "(":
            return False
        self.take()
        word, wrappers = "", 0
        while name not in self._parameters:
            # What is wrapped around a call of a tool is no tool, and ``print`` never is.
            yield from self.skip_spaces()
            word = yield from read_word(self)
            wraps = bool(word) and (yield from self.peek()) == "("
            if not wraps and name == _PRINT:
                return False
            if not wraps or (name != _PRINT and word not in self._parameters):
                break
            self.take()
            name, word = word, ""
            wrappers += 1
        self.begin(name)
        whole = yield from read_call_arguments(self, self._parameters.get(name, ()), word)
        self._broken = not whole
        self.end()
        if whole and wrappers:
            yield from self.optional(self._unwrapped(wrappers))
        return True

    def _unwrapped(self, wrappers: int) -> Reading[bool]:
        for _ in range(wrappers):
            if (yield from self.skip_spaces()) != ")":
                return False
            self.take()
        return True


class _ListParser(_PythonicParser):
    starts = frozenset("[<")

    def read_call(self) -> Reading[bool]:
        known: Collection[str] | None = self._parameters
        marked = (yield from self.peek()) == "<"
        if marked:
            if not (yield from self.match(START)):
                return False
            known = None
            if (yield from self.skip_spaces()) != "[":
                return False
        elif not self.at_line_start:
            return False
        self.take()
        yield from self.skip_spaces()
        if not (yield from self._call(known)):
            return False
        while not self._broken and (yield from self.optional(self._another(known))):
            pass
        if not self._broken:
            yield from self.optional(self._close())
        if marked:
            yield from self.optional(self._end())
        return True

    def _another(self, known: Collection[str] | None) -> Reading[bool]:
        if (yield from self.skip_spaces()) != ",":
            return False
        self.take()
        if (yield from self.skip_spaces()) == "]":
            return True
        return (yield from self._call(known))

    def _close(self) -> Reading[bool]:
        if (yield from self.skip_spaces()) != "]":
            return False
        self.take()
        return True

    def _end(self) -> Reading[bool]:
        yield from self.skip_spaces()
        return (yield from self.match(END)) is not None


class _FenceParser(_PythonicParser):
    starts = frozenset("`")

    def read_call(self) -> Reading[bool]:
        if not (yield from self.match(FENCE)) or not (yield from self._line()):
            return False
        while not self._broken and (yield from self.optional(self._line())):
            pass
        yield from self.optional(self._close())
        return True

    def _line(self) -> Reading[bool]:
        while (yield from self.skip_spaces()) in _SEPARATORS:
            self.take()
        return (yield from self._call(None))

    def _close(self) -> Reading[bool]:
        while (yield from self.skip_spaces()) in _SEPARATORS:
            self.take()
        return (yield from self.match(END_FENCE)) is not None
