"""Reads texts with a format's parser, for the tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_trio.generation.request import Tool
from dflash_trio.text.tool_calls.formats import FORMATS
from dflash_trio.text.tool_calls.pieces import (
    CallArguments,
    CallBegun,
    CallEnded,
    Piece,
    Text,
    ToolFormat,
)

WEATHER = Tool(
    name="weather",
    description="The weather of a place.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "where": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
    },
)
CLOCK = Tool(name="clock")
TOOLS = (WEATHER, CLOCK)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind put together."""
    out: list[Piece] = []
    for piece in pieces:
        match out[-1] if out else None, piece:
            case Text(before), Text(text):
                out[-1] = Text(before + text)
            case CallArguments(before), CallArguments(text):
                out[-1] = CallArguments(before + text)
            case _:
                out.append(piece)
    return out


def read(form: str | ToolFormat, *texts: str, tools: Sequence[Tool] = TOOLS) -> list[Piece]:
    """All pieces of an answer that came in these texts."""
    parser = (FORMATS[form] if isinstance(form, str) else form).new_parser(tools)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined([*pieces, *parser.finish()])


def in_words(pieces: Iterable[Piece]) -> list[str | tuple[str, str]]:
    """Texts, and (name, arguments) of calls. Fails on pieces out of order."""
    out: list[str | tuple[str, str]] = []
    name: str | None = None
    arguments = ""
    for piece in pieces:
        match piece:
            case Text(text):
                assert name is None
                assert text
                out.append(text)
            case CallBegun(begun):
                assert name is None
                name, arguments = begun, ""
            case CallArguments(text):
                assert name is not None
                assert text
                arguments += text
            case CallEnded():
                assert name is not None
                out.append((name, arguments))
                name = None
    assert name is None
    return out
