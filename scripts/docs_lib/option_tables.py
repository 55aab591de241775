"""The tables of options in docs/command-line.md from the command line's own table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.option_table import OPTIONS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "command-line.md"
BEGIN = "<!-- option tables: scripts/docs_lib -->"
END = "<!-- end of the option tables -->"

HEADINGS = {
    Scope.LAUNCH: ("Whole launch", "Anywhere on the command line, once."),
    Scope.LISTENER: ("Listener", "In the first block only."),
    Scope.MODEL: ("Model", "In any block, for that block's model."),
    Scope.SINGLE_MODEL: (
        "Single-model launches",
        "In any block, but never beside `--load-balancing`: they set policy for the whole process.",
    ),
}


def tables() -> str:
    """The part of the page between the markers."""
    return "\n".join(line for scope in Scope for line in _table(scope))


def _table(scope: Scope) -> Iterator[str]:
    title, note = HEADINGS[scope]
    options = [option for option in OPTIONS if option.scope is scope]
    yield f"### {title}\n\n{note}\n"
    yield from _rows(options)
    yield ""


def _rows(options: Sequence[Option]) -> Iterator[str]:
    yield "| option | default | |"
    yield "|---|---|---|"
    for option in options:
        text = option.help
        if option.takes is not None and option.takes.limits:
            text += f" {option.takes.limits[:1].upper()}{option.takes.limits[1:]}."
        if not option.available:
            text = f"*Not available yet.* {text}"
        elif option.only_value:
            text = f"*Only {option.only_value} is available yet.* {text}"
        yield f"| {_code(option.usage)} | {_cell(option.default)} | {_cell(text)} |"


def _code(text: str) -> str:
    if "|" not in text:
        return f"`{text}`"
    # A bar ends the cell even within backticks, and an entity is not read there.
    return f"<code>{text.replace('<', '&lt;').replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "&#124;")


def updated(page: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has lost its markers")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"
