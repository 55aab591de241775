"""What a model's answer consists of where it may call tools, and how its formats are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from ...generation.request import Tool


@frozen
class Text:
    """Words to the user. Never empty."""

    text: str


@frozen
class CallBegun:
    """A call of a tool, known by its name. Calls do not nest."""

    name: str


@frozen
class CallArguments:
    """A further piece of the call's arguments: JSON text, an object's once all pieces are
    joined, as far as the model wrote one. Never empty."""

    text: str


@frozen
class CallEnded:
    """The call is complete as the model made it, or as complete as it will get."""


Piece = Text | CallBegun | CallArguments | CallEnded


class ToolCallParser(Protocol):
    """Reads one answer as it comes, however it is cut into pieces. Never raises on any text."""

    def push(self, text: str) -> list[Piece]:
        """What the new text makes certain. Holds back what may still become a call's marker."""
        ...

    def finish(self) -> list[Piece]:
        """The answer has ended: what was held back, and the end of a call that is still open."""
        ...


class ToolFormat(Protocol):
    """How one family of models writes its calls. Stateless."""

    @property
    def name(self) -> str:
        """For ``--tool-parser``."""
        ...

    @property
    def control_literals(self) -> frozenset[str]:
        """Control tokens that are part of the format, which the engine would otherwise hide."""
        ...

    def new_parser(self, tools: Sequence[Tool]) -> ToolCallParser: ...

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, controls: frozenset[str]
    ) -> str:
        """A Lark grammar (llguidance's dialect, with a rule ``start``) of an answer that consists
        of calls of these tools and of nothing else: one, or one and more with ``parallel``.

        ``controls``: literals that are single control tokens in the answering vocabulary; the
        others are written letter by letter.
        """
        ...
