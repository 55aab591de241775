"""The body of POST /v1/messages, checked field by field, as one GenerationRequest."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import GenerationRequest, SamplingOverrides
from .generating import AnswerContext
from .json_body import parse_json_object
from .messages import MessagesEncoder
from .messages_request import MessagesConversation
from .sampling_fields import MAX_STOP_LENGTH, MAX_STOPS
from .validation import FieldProblem, in_range, structure


@frozen(kw_only=True)
class MessagesBody(MessagesConversation):
    """A conversation, and how it is to be answered."""

    max_tokens: int = field(validator=in_range(1))
    stream: bool | None = None
    # Anthropic's own models stop at 1; those here are of many families.
    temperature: float | None = field(default=None, validator=in_range(0, 2))
    top_p: float | None = field(default=None, validator=in_range(0, 1))
    top_k: int | None = field(default=None, validator=in_range(0, 2**31 - 1))
    stop_sequences: tuple[str, ...] | None = field(default=None)

    @stop_sequences.validator
    def _usable(self, _: Any, value: tuple[str, ...] | None) -> None:
        if value is None:
            return
        if len(value) > MAX_STOPS:
            raise FieldProblem(
                f"has {len(value)} strings; at most {MAX_STOPS} are allowed", "stop_sequences"
            )
        for index, stop in enumerate(value):
            where = f"stop_sequences[{index}]"
            if not stop:
                raise FieldProblem("must not be empty: it would match everywhere", where)
            if len(stop) > MAX_STOP_LENGTH:
                raise FieldProblem(f"is longer than {MAX_STOP_LENGTH} characters", where)

    def __attrs_post_init__(self) -> None:
        budget = self.thinking.budget if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise FieldProblem(
                "must be less than max_tokens, which thinking counts towards",
                "thinking.budget_tokens",
            )


@frozen
class MessagesCall:
    """A parsed call: what to generate, and how the client wants to be told."""

    request: GenerationRequest
    stream: bool
    model: str | None = None
    """What the body calls the model; it selects nothing."""

    def new_encoder(self, context: AnswerContext) -> MessagesEncoder:
        return MessagesEncoder(context)


def parse_messages_call(raw: bytes) -> MessagesCall:
    """Read and check a body. Raises InvalidRequest. CPU-bound, linear in the body."""
    body = structure(MessagesBody, parse_json_object(raw))
    constraint = body.constraint()
    # What counting counts, and all that does not become the prompt.
    counted = body.as_conversation().for_counting(len(raw))
    if constraint is not None and counted.tool_choice.forces:
        raise InvalidRequest(
            "tool_choice: demands a call, which cannot have the form that output_config.format "
            "demands of the answer as well; send one of them.",
            param="tool_choice",
        )
    request = attrs.evolve(
        counted,
        sampling=SamplingOverrides(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
        ),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
        constraint=constraint,
    )
    return MessagesCall(request, stream=body.stream is True, model=body.model)


def known_fields() -> frozenset[str]:
    """Every field that this route reads. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(MessagesBody))
