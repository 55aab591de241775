"""The conversation in a body of Anthropic's Messages API: system, messages, tools, thinking.

Counting and generating read a conversation with the same class, so that a count is what the
answer to the same body will report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs
from attrs import field, frozen

from ..generation.request import OutputConstraint, ThinkingRequest, Tool, ToolChoice
from .conversation import Conversation, merge_turns, text_turn
from .field_schemas import NULL, STRING, JsonObject, any_of, describe, one_of, schema_field
from .json_body import json_type_name, printable
from .messages_blocks import Content, SystemText, ToolResultBlock, ToolUseBlock, turns_of
from .thinking_fields import EFFORT_WORDS
from .tools import check_output, check_tools, schema_or_none
from .validation import FieldProblem, converter, in_range, structure

ROLES = ("user", "assistant", "system")
BILLING_HEADER = "x-anthropic-billing-header"
"""How a system block begins that is for Anthropic's accounting. It is no instruction, and some
clients change it with every turn: in the prompt, it would keep prefixes from being equal."""
MIN_BUDGET = 1024
"""Tokens of thinking: Anthropic's own lower bound."""


def _check_word(value: str, words: tuple[str, ...], where: str) -> None:
    if value not in words:
        raise FieldProblem(f"must be one of {', '.join(words)}, not {printable(value)}", where)


# ------------------------------------------------------------------------------- messages


@frozen(kw_only=True)
class Turn:
    """One message. ``system`` ones may stand anywhere."""

    role: str = schema_field(one_of(*ROLES))
    content: Content = field()

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        _check_word(value, ROLES, "role")

    @content.validator
    def _sayable(self, _: Any, value: Content) -> None:
        try:
            value.check_role(self.role)
        except FieldProblem as problem:
            raise FieldProblem(str(problem), f"content{problem.where}") from None


def _check_calls(turns: tuple[Turn, ...]) -> None:
    """Raise FieldProblem for calls and results that do not belong together.

    A call without a result is let through, unless the conversation ends with it: its result may
    have been lost with a client that was interrupted.
    """
    made: set[str] = set()
    answered: set[str] = set()
    for where, block in _blocks(turns):
        if isinstance(block, ToolUseBlock):
            if block.id in made:
                raise FieldProblem(f"two calls have the id {printable(block.id)}", f"{where}.id")
            made.add(block.id)
        elif isinstance(block, ToolResultBlock):
            id_, path = block.tool_use_id, f"{where}.tool_use_id"
            if id_ not in made:
                raise FieldProblem(f"no call before it has the id {printable(id_)}", path)
            if id_ in answered:
                raise FieldProblem(f"the call {printable(id_)} has a result already", path)
            answered.add(id_)
    if turns[-1].role != "assistant":
        return
    for where, block in _blocks(turns, _last_run(turns)):
        if isinstance(block, ToolUseBlock):
            raise FieldProblem(
                "is a call without a result, in a turn of the assistant that ends the "
                "conversation: it cannot be continued",
                where,
            )


def _last_run(turns: tuple[Turn, ...]) -> int:
    """Where the assistant's last turn begins; system turns do not end it."""
    start = len(turns)
    while start and turns[start - 1].role != "user":
        start -= 1
    return start


def _blocks(turns: tuple[Turn, ...], start: int = 0) -> Iterator[tuple[str, object]]:
    for index, turn in enumerate(turns[start:], start):
        for position, block in enumerate(turn.content.blocks):
            yield f"messages[{index}].content[{position}]", block


# ---------------------------------------------------------------------------------- tools


@frozen
class CustomTool:
    """A tool of the client's own."""

    name: str
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        return Tool(
            self.name,
            self.description,
            schema_or_none(self.input_schema.value),
            self.strict is True,
        )


@frozen
class ForeignTool:
    """A tool whose form is known to Anthropic's models alone, run by their servers or not."""


AnyTool = CustomTool | ForeignTool


def _structure_tool(value: Any, _: Any) -> AnyTool:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    kind = value.get("type")
    if kind is not None and not isinstance(kind, str):
        raise FieldProblem(f"must be a string, not {json_type_name(kind)}", "type")
    if kind not in (None, "custom"):
        return ForeignTool()
    return converter.structure(value, CustomTool)


_MODES: dict[str, Literal["auto", "none", "required", "named"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


@frozen
class Choice:
    """``tool_choice``."""

    type: str = schema_field(one_of(*_MODES))
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @type.validator
    def _known(self, _: Any, value: str) -> None:
        _check_word(value, tuple(_MODES), "type")
        if value == "tool" and self.name is None:
            raise FieldProblem("is required", "name")

    def as_choice(self) -> ToolChoice:
        mode = _MODES[self.type]
        parallel = self.disable_parallel_tool_use is not True
        return ToolChoice(mode, self.name if mode == "named" else None, parallel)


# ------------------------------------------------------------------------------- thinking


_THINKING = ("enabled", "disabled", "adaptive", "between_tools")


@frozen
class Thinking:
    """``thinking``: ``adaptive`` leaves it to the model, as saying nothing does."""

    type: str = schema_field(one_of(*_THINKING))
    budget_tokens: int | None = field(default=None, validator=in_range(MIN_BUDGET))

    @type.validator
    def _known(self, _: Any, value: str) -> None:
        _check_word(value, _THINKING, "type")
        if value == "enabled" and self.budget_tokens is None:
            raise FieldProblem("is required", "budget_tokens")

    @property
    def budget(self) -> int | None:
        """Asked for; the other types have none."""
        return self.budget_tokens if self.type == "enabled" else None


@frozen
class OutputFormat:
    """The answer follows a JSON Schema."""

    type: str = schema_field(one_of("json_schema"))
    schema: JsonObject | None = field(default=None)

    @type.validator
    def _known(self, _: Any, value: str) -> None:
        _check_word(value, ("json_schema",), "type")

    @schema.validator
    def _given(self, _: Any, value: JsonObject | None) -> None:
        # Optional to cattrs only, so that a wrong type is named first.
        if value is None:
            raise FieldProblem("is required", "schema")

    def as_constraint(self) -> OutputConstraint:
        assert self.schema is not None
        return OutputConstraint("json_schema", self.schema.value)


@frozen
class OutputConfig:
    """``output_config``."""

    effort: str | None = schema_field(any_of(one_of(*EFFORT_WORDS), NULL), default=None)
    format: OutputFormat | None = None

    @effort.validator
    def _known(self, _: Any, value: str | None) -> None:
        if value is not None:
            _check_word(value, tuple(EFFORT_WORDS), "effort")


describe(ForeignTool, {"type": "object", "properties": {"type": STRING}, "required": ["type"]})
converter.register_structure_hook(AnyTool, _structure_tool)

# ------------------------------------------------------------------------------- the body


@frozen(kw_only=True)
class MessagesConversation:
    """The fields of a body that say what is asked, and of whom. Others, such as ``metadata``,
    are not seen."""

    messages: tuple[Turn, ...] = field()
    system: SystemText | None = None
    model: str | None = None
    tools: tuple[AnyTool, ...] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older place of ``output_config.format``, which wins."""

    @messages.validator
    def _coherent(self, _: Any, value: tuple[Turn, ...]) -> None:
        if not value:
            raise FieldProblem("must not be empty", "messages")
        _check_calls(value)

    def as_conversation(self) -> Conversation:
        """Raises InvalidRequest for what its fields do not go together as."""
        turns = [turn for said in self.messages for turn in turns_of(said.role, said.content)]
        texts = self.system.texts if self.system is not None else ()
        instructions = [text for text in texts if not text.lstrip().startswith(BILLING_HEADER)]
        if any(instructions):
            turns.insert(0, text_turn("system", instructions))
        offered = [
            (f"tools[{index}]", tool.as_tool())
            for index, tool in enumerate(self.tools or ())
            if isinstance(tool, CustomTool)
        ]
        tools = tuple(tool for _, tool in offered)
        choice = self.tool_choice.as_choice() if self.tool_choice is not None else ToolChoice()
        check_tools(tools, choice, paths=[path for path, _ in offered])
        return Conversation(
            merge_turns(turns),
            continue_final=self.messages[-1].role == "assistant",
            model=self.model,
            tools=tools,
            tool_choice=choice,
            thinking=self._thinking(),
        )

    def _thinking(self) -> ThinkingRequest:
        """``thinking`` says whether to think, if it does; else the effort may."""
        effort = self.output_config.effort if self.output_config is not None else None
        tier = EFFORT_WORDS[effort] if effort is not None else None
        if self.thinking is not None and self.thinking.type == "enabled":
            return ThinkingRequest(True, self.thinking.budget, tier)
        disabled = self.thinking is not None and self.thinking.type == "disabled"
        if disabled or (effort is not None and tier is None):
            return ThinkingRequest(enabled=False)
        return ThinkingRequest(effort=tier)

    def constraint(self) -> OutputConstraint | None:
        """What the answer has to look like. Raises InvalidRequest if that cannot be enforced."""
        config = self.output_config
        wanted = config.format if config is not None else None
        path = "output_config.format.schema"
        if wanted is None:
            wanted, path = self.output_format, "output_format.schema"
        if wanted is None:
            return None
        constraint = wanted.as_constraint()
        check_output(constraint, path)
        return constraint


def read_messages_conversation(data: dict[str, Any]) -> Conversation:
    """The conversation in a parsed body. Raises InvalidRequest naming the field and its index."""
    return structure(MessagesConversation, data).as_conversation()


def known_fields() -> frozenset[str]:
    """Every field that is read here. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(MessagesConversation))
