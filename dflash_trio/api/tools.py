"""Tools and the choice among them, as far as all dialects agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..generation.errors import InvalidRequest
from ..generation.request import OutputConstraint, Tool, ToolChoice
from ..text.structured import BadConstraint, check_constraint
from .json_body import printable

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
"""OpenAI and Anthropic both allow less (no dots and colons); some clients write these all the
same."""


def check_tools(tools: Sequence[Tool], choice: ToolChoice, *, paths: Sequence[str]) -> None:
    """Raise InvalidRequest for tools that cannot be offered, or a choice that cannot be met.

    ``paths``: of each tool in the body, for the message.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools: has {len(tools)} functions; at most {MAX_TOOLS} are allowed.", param="tools"
        )
    seen: set[str] = set()
    for tool, path in zip(tools, paths, strict=True):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"{path}: the name {printable(tool.name)} must consist of 1 to 128 letters, "
                "digits, _, -, . and :.",
                param=path,
            )
        if tool.name in seen:
            raise InvalidRequest(
                f"{path}: two tools are called {printable(tool.name)}.", param=path
            )
        seen.add(tool.name)
    if choice.forces and not tools:
        raise InvalidRequest(
            "tool_choice: demands a call, but there are no tools to call.", param="tool_choice"
        )
    if choice.mode == "named" and choice.name not in seen:
        raise InvalidRequest(
            f"tool_choice: there is no tool called {printable(choice.name or '')}.",
            param="tool_choice",
        )
    if choice.forces:
        # Their parameters become part of a grammar, which has to be one.
        for tool, path in zip(tools, paths, strict=True):
            if tool.parameters is not None and choice.name in (None, tool.name):
                check_output(OutputConstraint("json_schema", tool.parameters), path)


def check_output(constraint: OutputConstraint, path: str) -> None:
    """Raise InvalidRequest for a constraint that cannot be enforced."""
    try:
        check_constraint(constraint)
    except BadConstraint as error:
        raise InvalidRequest(f"{path}: {error}", param=path) from error


def schema_or_none(value: Any) -> dict[str, Any] | None:
    """A tool's parameters: an object that says nothing is as good as none."""
    return value if isinstance(value, dict) and value else None
