"""The body of POST /v1/chat/completions, checked field by field, as one GenerationRequest."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import GenerationRequest, ThinkingRequest
from .chat_completions import ChatEncoder
from .chat_messages import ChatMessage, read_messages
from .chat_tools import ChatTool, ChatToolChoice, read_tools
from .field_schemas import JsonObject
from .generating import AnswerContext
from .json_body import json_type_name, parse_json_object
from .output_fields import OutputFields
from .thinking_fields import EffortWord, ReasoningObject, ThinkingObject, thinking_request
from .validation import in_range, refuse_unavailable, structure

MAX_ANSWERS = 128
"""``n`` at most; fewer where no model has so many slots."""
MAX_TOP_LOGPROBS = 20


@frozen
class StreamOptions:
    """``stream_options``; only true asks for a usage chunk."""

    include_usage: bool | None = None


_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    # Superseded by tools, which every client of these years has.
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
    "web_search_options": (None,),
}


@frozen(kw_only=True)
class ChatRequest(OutputFields):
    """The fields of a chat completion that mean something here; others are ignored."""

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = field(default=None, validator=in_range(1))
    max_completion_tokens: int | None = field(default=None, validator=in_range(1))
    n: int | None = field(default=None, validator=in_range(1, MAX_ANSWERS))
    logprobs: bool | None = None
    top_logprobs: int | None = field(default=None, validator=in_range(0, MAX_TOP_LOGPROBS))
    tools: tuple[ChatTool, ...] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: EffortWord | None = None
    reasoning: ReasoningObject | None = None
    thinking: ThinkingObject | None = None
    thinking_budget_tokens: int | None = field(default=None, validator=in_range(-1))
    chat_template_kwargs: JsonObject | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def alternatives(self) -> int | None:
        """Log probabilities wanted beside each token's own; ``None``: none at all."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest(
                "top_logprobs: is only possible with logprobs: true.", param="top_logprobs"
            )
        return None

    def as_thinking(self) -> ThinkingRequest:
        arguments = self.chat_template_kwargs.value if self.chat_template_kwargs else {}
        enable = arguments.get("enable_thinking")
        if enable is not None and not isinstance(enable, bool):
            path = "chat_template_kwargs.enable_thinking"
            raise InvalidRequest(
                f"{path}: must be true or false, not {json_type_name(enable)}.", param=path
            )
        return thinking_request(
            effort=self.reasoning_effort,
            reasoning=self.reasoning,
            thinking=self.thinking,
            budget_tokens=self.thinking_budget_tokens,
            enable_thinking=enable,
        )

    def as_request(self, body_bytes: int) -> GenerationRequest:
        """What to generate. Raises InvalidRequest for fields that contradict each other."""
        messages, continues = read_messages(self.messages)
        tools, choice = read_tools(
            self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False
        )
        constraint = self.as_constraint()
        if constraint is not None and choice.forces:
            raise InvalidRequest(
                "tool_choice: demands a call, which cannot have the form that is demanded of the "
                "answer as well; send one of them.",
                param="tool_choice",
            )
        return GenerationRequest(
            messages=messages,
            body_bytes=body_bytes,
            sampling=self.as_overrides(),
            # The newer name wins where a client sends both.
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop.strings,
            n=self.n or 1,
            ignore_eos=self.ignore_eos is True,
            continue_final=continues,
            template_arguments=self.chat_template_kwargs.value if self.chat_template_kwargs else {},
            tools=tools,
            tool_choice=choice,
            constraint=constraint,
            thinking=self.as_thinking(),
            logprobs=self.alternatives,
            cache_prompt=self.cache_prompt is not False,
        )


@frozen
class ChatCall:
    """A parsed call: what to generate, and how the client wants to be told."""

    request: GenerationRequest
    stream: bool
    include_usage: bool
    model: str | None
    """What the body calls the model; it selects nothing."""

    def new_encoder(self, context: AnswerContext) -> ChatEncoder:
        return ChatEncoder(context, include_usage=self.include_usage)


def parse_chat_call(raw: bytes) -> ChatCall:
    """Read and check a body. Raises InvalidRequest. CPU-bound, linear in the body."""
    data = parse_json_object(raw)
    refuse_unavailable(data, _ASKS_FOR_NOTHING)
    chat = structure(ChatRequest, data)
    return ChatCall(
        chat.as_request(len(raw)),
        stream=chat.stream is True,
        include_usage=chat.includes_usage,
        model=chat.model,
    )


def known_fields() -> frozenset[str]:
    """Every field that this route reads. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(ChatRequest)) | _ASKS_FOR_NOTHING.keys()
