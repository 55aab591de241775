"""Content blocks of Anthropic's Messages API, and the turns of a template that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import frozen

from ..generation.request import Message
from .conversation import call_turn, result_turn, text_turn
from .field_schemas import STRING, Schema, any_of, array_of, describe, one_of
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter

ERROR_PREFIX = "Error: "
"""Stands before the text of a tool's result that the client marked with ``is_error``: templates
know no such mark, and the model shall see it."""


@frozen
class TextBlock:
    """A piece of text."""

    text: str


@frozen
class ThinkingBlock:
    """What the model thought in an earlier turn. Its signature proves nothing here; it is not
    looked at."""

    thinking: str


@frozen
class RedactedThinkingBlock:
    """Thinking that only its maker can read. Nothing of it reaches the prompt."""


@frozen
class ToolUseBlock:
    """A call that the model made. ``arguments``: JSON text of an object."""

    id: str
    name: str
    arguments: str


@frozen
class ToolResultBlock:
    """What came of a call, as text."""

    tool_use_id: str
    text: str


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

_ROLES_OF: dict[type[Any], tuple[str, ...]] = {
    ThinkingBlock: ("assistant",),
    RedactedThinkingBlock: ("assistant",),
    ToolUseBlock: ("assistant",),
    ToolResultBlock: ("user",),
}
"""Who may send a block; those that are not here, everybody."""
_TYPE_OF: dict[type[Any], str] = {
    ThinkingBlock: "thinking",
    RedactedThinkingBlock: "redacted_thinking",
    ToolUseBlock: "tool_use",
    ToolResultBlock: "tool_result",
}

# --------------------------------------------------------------------------------- reading


@frozen
class Content:
    """Blocks, or a string, which stands for one text block."""

    blocks: tuple[Block, ...]

    @property
    def texts(self) -> list[str]:
        return [block.text for block in self.blocks if isinstance(block, TextBlock)]

    def check_role(self, role: str) -> None:
        """Raise FieldProblem for a block that this role cannot say."""
        for index, block in enumerate(self.blocks):
            roles = _ROLES_OF.get(type(block))
            if roles is not None and role not in roles:
                raise FieldProblem(
                    f"is a {_TYPE_OF[type(block)]} block, which only a message of role "
                    f"{roles[0]} may hold",
                    f"[{index}]",
                )


def _string(block: dict[str, Any], key: str, *, named: bool = False) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise FieldProblem(f"must be a string, not {json_type_name(value)}", f".{key}")
    if named and not value:
        raise FieldProblem("must not be empty", f".{key}")
    return value


def _read_text(block: dict[str, Any]) -> Block:
    return TextBlock(_string(block, "text"))


def _read_thinking(block: dict[str, Any]) -> Block:
    return ThinkingBlock(_string(block, "thinking"))


def _read_redacted_thinking(_: dict[str, Any]) -> Block:
    return RedactedThinkingBlock()


def _read_tool_use(block: dict[str, Any]) -> Block:
    id_, name = _string(block, "id", named=True), _string(block, "name", named=True)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(arguments)}", ".input")
    return ToolUseBlock(id_, name, json.dumps(arguments, ensure_ascii=False))


def _read_tool_result(block: dict[str, Any]) -> Block:
    id_ = _string(block, "tool_use_id", named=True)
    value, is_error = block.get("content"), block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise FieldProblem(f"must be true or false, not {json_type_name(is_error)}", ".is_error")
    text = ""
    if value is not None:
        try:
            content = _read_content(value, _TEXT_ONLY)
        except FieldProblem as problem:
            raise FieldProblem(str(problem), f".content{problem.where}") from None
        text = str(text_turn("tool", content.texts)["content"])
    if is_error:
        text = ERROR_PREFIX + text
    return ToolResultBlock(id_, text)


_Readers = dict[str, Callable[[dict[str, Any]], Block]]
_TEXT_ONLY: _Readers = {"text": _read_text}
_READERS: _Readers = {
    **_TEXT_ONLY,
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted_thinking,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
}


def _read_block(value: Any, readers: _Readers) -> Block:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", ".type")
    reader = readers.get(kind)
    if reader is None:
        raise FieldProblem(f"is of type {printable(kind)}; only text is understood here")
    return reader(value)


def _read_content(value: Any, readers: _Readers) -> Content:
    if isinstance(value, str):
        return Content((TextBlock(value),))
    if not isinstance(value, list):
        raise FieldProblem(f"must be a string or an array of blocks, not {json_type_name(value)}")
    blocks: list[Block] = []
    for index, block in enumerate(value):
        try:
            blocks.append(_read_block(block, readers))
        except FieldProblem as problem:
            raise FieldProblem(str(problem), f"[{index}]{problem.where}") from None
    return Content(tuple(blocks))


@frozen
class SystemText:
    """Text alone, for ``system``."""

    texts: tuple[str, ...]


converter.register_structure_hook(Content, lambda value, _: _read_content(value, _READERS))
converter.register_structure_hook(
    SystemText, lambda value, _: SystemText(tuple(_read_content(value, _TEXT_ONLY).texts))
)


def _blocks_schema(*types: str) -> Schema:
    block = {"type": "object", "properties": {"type": one_of(*types)}, "required": ["type"]}
    return any_of(STRING, array_of(block))


describe(Content, _blocks_schema(*_READERS))
describe(SystemText, _blocks_schema(*_TEXT_ONLY))

# ------------------------------------------------------------------------------ as turns


def turns_of(role: str, content: Content) -> Iterator[Message]:
    """One message as turns of a template: one, but for a user's that brings results of tools."""
    if role == "assistant":
        yield _assistant_turn(content)
    elif any(isinstance(block, ToolResultBlock) for block in content.blocks):
        yield from _result_turns(content.blocks)
    else:
        yield text_turn(role, content.texts)


def _assistant_turn(content: Content) -> Message:
    calls = [(b.id, b.name, b.arguments) for b in content.blocks if isinstance(b, ToolUseBlock)]
    text = text_turn("assistant", content.texts)
    turn = call_turn(calls, str(text["content"])) if calls else text
    thoughts = [b.thinking for b in content.blocks if isinstance(b, ThinkingBlock) and b.thinking]
    return {**turn, "reasoning_content": "\n".join(thoughts)} if thoughts else turn


def _result_turns(blocks: Iterable[Block]) -> Iterator[Message]:
    """Each result a turn of its own, text before, between and after them a user's turn."""
    said: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock) and block.text:
            said.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if said:
                yield text_turn("user", said)
                said = []
            yield result_turn(block.tool_use_id, block.text)
    if said:
        yield text_turn("user", said)
