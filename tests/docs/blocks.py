"""The fenced blocks of the README and the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SHELL, PYTHON = ("sh", "bash", "console"), ("python", "py")

_FENCE = re.compile(
    r"(?:^<!-- (?P<note>.*?) -->\n\n?)?^(?P<fence>```+)(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_ASSIGNMENTS = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S* )*")
_PROGRAM = re.compile(r"^(?:\.venv/bin/)?(?:dflash[\w-]*|scripts/\S+|curl) ")


@frozen
class Block:
    page: str
    line: int
    language: str
    text: str
    note: str
    """What the comment in front of it says; empty: there is none."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Also one without a language, if a command of ours stands in it."""
        plain = not self.language and _PROGRAM.match(self.text) and "[" not in self.text
        return self.language in SHELL or bool(plain)

    @property
    def is_python(self) -> bool:
        return self.language in PYTHON

    @property
    def why_not_run(self) -> str:
        """The reason that the page gives; empty: none."""
        return self.note.partition("not run: ")[2]

    @property
    def run_by(self) -> str:
        """The file of tests that runs it instead; empty: none."""
        return self.note.partition("run by: ")[2] if self.note.startswith("run by: ") else ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each of its lines, continuations joined, without comments, and without
        variables that are set in front."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = (shlex.split(_ASSIGNMENTS.sub("", line), comments=True) for line in lines)
        return [words for words in split if words]


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            path.name,
            text.count("\n", 0, match.start("fence")) + 1,
            match["language"],
            match["text"],
            match["note"] or "",
        )
        for match in _FENCE.finditer(text)
    ]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
COMMANDS = [block for block in BLOCKS if block.is_shell or block.is_python]
