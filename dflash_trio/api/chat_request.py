"""The body of POST /v1/chat/completions, checked field by field, as one GenerationRequest."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import MAX_SEED, GenerationRequest, Message, SamplingOverrides
from ..text.messages import content_text
from .conversation import SYSTEM_ROLES, part_text
from .json_body import json_type_name, parse_json_object, printable
from .validation import FieldProblem, converter, in_range, refuse_unavailable, structure

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
"""Characters. Longer ones could hold back an answer for ever."""
MAX_BIASES = 1024


@frozen
class Content:
    """Text of a turn: from a string, from null (``None``) or from text parts."""

    text: str | None


def _structure_content(value: Any, _: Any) -> Content:
    if value is None or isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise FieldProblem(
            f"must be a string, null or an array of parts, not {json_type_name(value)}"
        )
    texts = [part_text(part, f"[{index}]") for index, part in enumerate(value)]
    return Content(content_text(texts) if texts else None)


converter.register_structure_hook(Content, _structure_content)


@frozen
class ChatMessage:
    """One turn of the conversation."""

    role: str = field()
    content: Content = Content(None)
    name: str | None = None
    tool_calls: Any = field(default=None)
    function_call: Any = field(default=None)

    @role.validator
    def _known_role(self, _: Any, value: str) -> None:
        if value == "tool":
            raise FieldProblem("tool results are not available yet", "role")
        if value not in ROLES:
            raise FieldProblem(f"must be one of {', '.join(ROLES)}, not {printable(value)}", "role")

    @tool_calls.validator
    @function_call.validator
    def _no_tools_yet(self, attribute: Any, value: Any) -> None:
        if value:
            raise FieldProblem("tool calls are not available yet", attribute.name)

    def as_template_message(self, path: str) -> Message:
        if self.content.text is None:
            raise InvalidRequest(f"{path}.content: has no text.", param=f"{path}.content")
        message: dict[str, Any] = {"role": self.role, "content": self.content.text}
        if self.name is not None:
            message["name"] = self.name
        return message


@frozen
class StreamOptions:
    """``stream_options``; only true asks for a usage chunk."""

    include_usage: bool | None = None


@frozen
class ResponseFormat:
    """``response_format``; anything but text comes later."""

    type: str = field()

    @type.validator
    def _text_only(self, _: Any, value: str) -> None:
        if value != "text":
            raise FieldProblem("structured output is not available yet; use text", "type")


def _structure_stop(value: Any, _: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise FieldProblem(
            f"must be a string, an array of strings or null, not {json_type_name(value)}"
        )
    if len(stops) > MAX_STOPS:
        raise FieldProblem(f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        where = f"[{index}]" if stops is value else ""
        if not isinstance(stop, str):
            raise FieldProblem(f"must be a string, not {json_type_name(stop)}", where)
        if not stop:
            raise FieldProblem("must not be empty: it would match everywhere", where)
        if len(stop) > MAX_STOP_LENGTH:
            raise FieldProblem(f"is longer than {MAX_STOP_LENGTH} characters", where)
    return tuple(stops)


def _structure_bias(value: Any, _: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object of token ids, not {json_type_name(value)}")
    if len(value) > MAX_BIASES:
        raise FieldProblem(f"names {len(value)} tokens; at most {MAX_BIASES} are allowed")
    biases: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise FieldProblem(f"has the key {printable(key)}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FieldProblem(f"must be a number, not {json_type_name(bias)}", f".{key}")
        if not -100 <= bias <= 100:
            raise FieldProblem("must be from -100 to 100", f".{key}")
        biases.append((int(key), float(bias)))
    return tuple(biases)


@frozen
class StopStrings:
    """``stop``: null, one string or several."""

    strings: tuple[str, ...] = ()


@frozen
class LogitBias:
    """``logit_bias``: token id to bias. -100 forbids a token, 100 forces it."""

    pairs: tuple[tuple[int, float], ...] = ()


converter.register_structure_hook(StopStrings, lambda v, t: StopStrings(_structure_stop(v, t)))
converter.register_structure_hook(LogitBias, lambda v, t: LogitBias(_structure_bias(v, t)))


_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "grammar": (None, ""),
    "json_schema": (None,),
    "reasoning_effort": (None,),
    "reasoning": (None, {}),
    "thinking": (None,),
    "thinking_budget_tokens": (None,),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
    "web_search_options": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
}


@frozen
class ChatRequest:
    """The fields of a chat completion that mean something here; others are ignored."""

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = field(default=None, validator=in_range(1))
    max_completion_tokens: int | None = field(default=None, validator=in_range(1))
    temperature: float | None = field(default=None, validator=in_range(0, 100))
    top_p: float | None = field(default=None, validator=in_range(0, 1))
    top_k: int | None = field(default=None, validator=in_range(0, 2**31 - 1))
    min_p: float | None = field(default=None, validator=in_range(0, 1))
    # Far below, it becomes zero in the single precision that the sampler computes in.
    repeat_penalty: float | None = field(default=None, validator=in_range(0.01, 100))
    presence_penalty: float | None = field(default=None, validator=in_range(-2, 2))
    frequency_penalty: float | None = field(default=None, validator=in_range(-2, 2))
    repeat_last_n: int | None = field(default=None, validator=in_range(-1, 2**31 - 1))
    seed: int | None = field(default=None, validator=in_range(-1, MAX_SEED))
    logit_bias: LogitBias = LogitBias()
    stop: StopStrings = StopStrings()
    n: int | None = field(default=None, validator=in_range(1, 128))
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


@frozen
class ChatCall:
    """A parsed call: what to generate, and how the client wants to be told."""

    request: GenerationRequest
    stream: bool
    include_usage: bool
    model: str | None
    """What the body calls the model; it selects nothing."""


def parse_chat_call(raw: bytes) -> ChatCall:
    """Read and check a body. Raises InvalidRequest. CPU-bound, linear in the body."""
    data = parse_json_object(raw)
    refuse_unavailable(data, _ASKS_FOR_NOTHING)
    arguments = data.get("chat_template_kwargs")
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(
            f"chat_template_kwargs: must be an object, not {json_type_name(arguments)}.",
            param="chat_template_kwargs",
        )
    chat = structure(ChatRequest, data)
    if not chat.messages:
        raise InvalidRequest("messages: must not be empty.", param="messages")
    if (chat.n or 1) > 1:
        raise InvalidRequest("n: more than one answer is not available yet.", param="n")
    messages = tuple(
        message.as_template_message(f"messages[{index}]")
        for index, message in enumerate(chat.messages)
    )
    final = len(messages) - 1
    continues = messages[final]["role"] == "assistant"
    # System turns do not count as being between: they all move to the front.
    spoken = [message["role"] for message in messages if message["role"] not in SYSTEM_ROLES]
    if continues and spoken[-2:] == ["assistant", "assistant"]:
        raise InvalidRequest(
            f"messages[{final}]: two assistant turns at the end cannot both be continued.",
            param=f"messages[{final}]",
        )
    request = GenerationRequest(
        messages=messages,
        body_bytes=len(raw),
        sampling=SamplingOverrides(
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k,
            min_p=chat.min_p,
            repeat_penalty=chat.repeat_penalty,
            presence_penalty=chat.presence_penalty,
            frequency_penalty=chat.frequency_penalty,
            repeat_last_n=chat.repeat_last_n,
            seed=chat.seed,
            logit_bias=chat.logit_bias.pairs,
        ),
        # The newer name wins where a client sends both.
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        stop=chat.stop.strings,
        ignore_eos=chat.ignore_eos is True,
        continue_final=continues,
        template_arguments=arguments or {},
    )
    return ChatCall(
        request,
        stream=chat.stream is True,
        include_usage=chat.includes_usage,
        model=chat.model,
    )


def known_fields() -> frozenset[str]:
    """Every field that this route reads. The others are ignored."""
    return (
        frozenset(a.name for a in attrs.fields(ChatRequest))
        | _ASKS_FOR_NOTHING.keys()
        | {"chat_template_kwargs"}
    )
