"""The body of POST /v1/responses, checked field by field, as one GenerationRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import GenerationRequest, OutputConstraint
from .field_schemas import OBJECT, STRING, JsonObject, describe, one_of, schema_field
from .generating import AnswerContext
from .json_body import json_type_name, parse_json_object, printable
from .output_fields import FORMATS
from .response_store import OwnedResponses, bytes_held
from .responses import Keeping, ResponsesEncoder
from .responses_items import ConversationItem
from .responses_request import EarlierAnswers, read_conversation_items
from .responses_request import known_fields as conversation_fields
from .sampling_fields import SamplingFields
from .tools import check_output
from .validation import FieldProblem, converter, in_range, structure

MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""Pairs, and characters of a key and of a value: OpenAI's bounds."""
LOGPROBS = "message.output_text.logprobs"
"""What ``include`` says to get log probabilities."""
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")


@frozen
class Metadata:
    """``metadata``: strings to strings, given back with the response."""

    pairs: Mapping[str, str]


def _structure_metadata(value: Any, _: Any) -> Metadata:
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object, not {json_type_name(value)}")
    if len(value) > MAX_METADATA:
        raise FieldProblem(f"has {len(value)} keys; at most {MAX_METADATA} are allowed")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise FieldProblem(
                f"has the key {printable(key)}, longer than {MAX_METADATA_KEY} characters"
            )
        if not isinstance(text, str):
            raise FieldProblem(f"must be a string, not {json_type_name(text)}", f".{key}")
        if len(text) > MAX_METADATA_VALUE:
            raise FieldProblem(f"is longer than {MAX_METADATA_VALUE} characters", f".{key}")
    return Metadata(value)


converter.register_structure_hook(Metadata, _structure_metadata)
describe(Metadata, {**OBJECT, "additionalProperties": STRING, "maxProperties": MAX_METADATA})


@frozen
class TextFormat:
    """``text.format``. A schema is enforced whether ``strict`` or not."""

    type: str = schema_field(one_of(*FORMATS))
    name: str | None = None
    schema: JsonObject | None = field(default=None)
    strict: bool | None = None
    description: str | None = None

    @type.validator
    def _known_type(self, _: Any, value: str) -> None:
        if value not in FORMATS:
            raise FieldProblem(
                f"must be one of {', '.join(FORMATS)}, not {printable(value)}", "type"
            )

    @schema.validator
    def _given(self, _: Any, value: JsonObject | None) -> None:
        if self.type == "json_schema" and value is None:
            raise FieldProblem("is required", "schema")

    def as_constraint(self) -> OutputConstraint | None:
        if self.type == "json_object":
            constraint = OutputConstraint("json_object")
        elif self.type == "json_schema" and self.schema is not None:
            constraint = OutputConstraint("json_schema", self.schema.value)
        else:
            return None
        check_output(constraint, "text.format.schema" if self.schema else "text.format")
        return constraint


@frozen
class TextSettings:
    """``text``. How wordy an answer is, no model here can be told."""

    format: TextFormat | None = None
    verbosity: str | None = None


@frozen(kw_only=True)
class ResponsesFields(SamplingFields):
    """The fields of a body beside its conversation that mean something here."""

    stream: bool | None = None
    stream_options: JsonObject | None = None
    store: bool | None = None
    background: bool | None = field(default=None)
    max_output_tokens: int | None = field(default=None, validator=in_range(1))
    max_tool_calls: int | None = field(default=None, validator=in_range(1))
    include: tuple[str, ...] | None = None
    top_logprobs: int | None = field(default=None, validator=in_range(0, MAX_TOP_LOGPROBS))
    text: TextSettings | None = None
    metadata: Metadata | None = None
    truncation: str | None = field(default=None)
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    client_metadata: JsonObject | None = None

    @background.validator
    def _not_in_the_background(self, _: Any, value: bool | None) -> None:
        if value:
            raise FieldProblem(
                "answers are made only while their client listens, so that none runs for "
                "nobody; leave it out, and use stream for long ones",
                "background",
            )

    @truncation.validator
    def _known_truncation(self, _: Any, value: str | None) -> None:
        if value not in (None, "auto", "disabled"):
            raise FieldProblem(
                f"must be one of auto, disabled, not {printable(value or '')}", "truncation"
            )

    @property
    def alternatives(self) -> int | None:
        """Log probabilities wanted beside each token's own; ``None``: none at all."""
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    def as_constraint(self) -> OutputConstraint | None:
        wanted = self.text.format if self.text is not None else None
        return wanted.as_constraint() if wanted is not None else None


@frozen
class ResponsesCall:
    """A parsed call: what to generate, and how the client wants to be told."""

    request: GenerationRequest
    stream: bool
    settings: Mapping[str, Any]
    """The fields of the response that say what was asked for."""
    keeping: Keeping | None = None
    """``None``: nobody could look the answer up."""
    model: str | None = None
    """What the body calls the model; it selects nothing."""

    def new_encoder(self, context: AnswerContext) -> ResponsesEncoder:
        return ResponsesEncoder(context, self.settings, self.keeping)


@frozen
class KeptAnswers:
    """The kept answers of one owner, as bodies refer to them."""

    responses: OwnedResponses

    def conversation(self, response_id: str) -> tuple[ConversationItem, ...]:
        kept = self.responses.get(response_id)
        if kept is not None:
            return kept.input_items + kept.output_items
        under_way = self.responses.under_way(response_id)
        raise InvalidRequest(
            f"previous_response_id: {printable(response_id)} is still being answered."
            if under_way is not None and under_way.readable
            else f"previous_response_id: no answer {printable(response_id)} is kept here: "
            "answers are kept in bounded memory of this process, the oldest making room for new "
            "ones, and those made with store: false are not. Send the whole conversation.",
            param="previous_response_id",
            code="previous_response_not_found" if under_way is None else None,
        )

    def item(self, item_id: str) -> ConversationItem | None:
        return self.responses.item(item_id)


def parse_responses_call(raw: bytes, responses: OwnedResponses | None = None) -> ResponsesCall:
    """Read and check a body. Raises InvalidRequest. CPU-bound, linear in the conversation.

    ``responses``: the kept answers that the body may refer to, where its own is kept too.
    """
    data = parse_json_object(raw)
    earlier: EarlierAnswers | None = KeptAnswers(responses) if responses is not None else None
    read = read_conversation_items(data, earlier)
    fields = structure(ResponsesFields, data)
    conversation = read.conversation
    constraint = fields.as_constraint()
    if constraint is not None and conversation.tool_choice.forces:
        raise InvalidRequest(
            "tool_choice: demands a call, which cannot have the form that text.format demands of "
            "the answer as well; send one of them.",
            param="tool_choice",
        )
    request = GenerationRequest(
        messages=conversation.messages,
        body_bytes=len(raw) + read.earlier_bytes,
        sampling=fields.as_overrides(),
        max_tokens=fields.max_output_tokens,
        stop=fields.stop.strings,
        ignore_eos=fields.ignore_eos is True,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        constraint=constraint,
        thinking=conversation.thinking,
        logprobs=fields.alternatives,
        cache_prompt=fields.cache_prompt is not False,
    )
    keeping = None
    if responses is not None:
        kept = fields.store is not False
        items = read.items if kept else ()
        keeping = Keeping(responses, items, bytes_held(items), kept)
    return ResponsesCall(
        request,
        stream=fields.stream is True,
        settings=_settings(data, fields),
        keeping=keeping,
        model=conversation.model,
    )


def _settings(data: Mapping[str, Any], fields: ResponsesFields) -> dict[str, Any]:
    """A response's fields that say what was asked for, as the body has them."""
    reasoning = data.get("reasoning") or {}
    text = data.get("text") or {}
    summary, verbosity = reasoning.get("summary"), text.get("verbosity")
    return {
        "background": False,
        "instructions": data.get("instructions"),
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": dict(fields.metadata.pairs) if fields.metadata is not None else {},
        "parallel_tool_calls": data.get("parallel_tool_calls") is not False,
        "previous_response_id": data.get("previous_response_id"),
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": summary if summary in SUMMARIES else None,
        },
        "safety_identifier": fields.safety_identifier,
        # There is one tier, whatever is asked for.
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": fields.temperature,
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": verbosity if verbosity in VERBOSITIES else "medium",
        },
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": [_shown_tool(tool) for tool in data.get("tools") or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool["type"] != "function":
        return tool
    # Clients' types want these two even where the request left them out.
    return {"parameters": None, "strict": None, **tool}


def known_fields() -> frozenset[str]:
    """Every field that this route reads. The others are ignored."""
    return conversation_fields() | frozenset(a.name for a in attrs.fields(ResponsesFields))
