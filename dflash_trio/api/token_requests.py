"""The bodies of the routes that count, tokenize and render, each checked field by field.

Each function here reads a whole body: CPU-bound, linear in it. Raises InvalidRequest.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from ..generation.request import GenerationRequest
from .chat_request import parse_chat_call
from .conversation import Conversation
from .json_body import json_type_name, parse_json_object
from .messages_request import read_messages_conversation
from .response_store import OwnedResponses
from .responses_call import KeptAnswers
from .responses_request import read_conversation_items
from .validation import FieldProblem, converter, structure


@frozen
class PromptCall:
    """A conversation, and the model whose reading of it is asked for."""

    model: str | None
    request: GenerationRequest


def parse_messages_count(raw: bytes) -> PromptCall:
    return _counting(read_messages_conversation(parse_json_object(raw)), len(raw))


def parse_responses_count(raw: bytes, responses: OwnedResponses | None = None) -> PromptCall:
    """``responses``: the kept answers that the body may refer to."""
    earlier = KeptAnswers(responses) if responses is not None else None
    read = read_conversation_items(parse_json_object(raw), earlier)
    return _counting(read.conversation, len(raw))


def parse_apply_template(raw: bytes) -> PromptCall:
    """A chat completion's body; what of it does not become the prompt is checked all the same."""
    call = parse_chat_call(raw)
    return PromptCall(call.model, call.request)


def _counting(conversation: Conversation, body_bytes: int) -> PromptCall:
    return PromptCall(conversation.model, conversation.for_counting(body_bytes))


@frozen
class TokenizeCall:
    """``parse_special`` is on if it is not given, the other two are off."""

    content: str
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


def parse_tokenize(raw: bytes) -> TokenizeCall:
    return structure(TokenizeCall, parse_json_object(raw))


@frozen
class TokenIds:
    """``tokens``: checked against a vocabulary later, when it is known which."""

    ids: tuple[int, ...]


def _structure_ids(value: Any, _: Any) -> TokenIds:
    # By hand: one exception group for each of a million tokens would be slow.
    if not isinstance(value, list):
        raise FieldProblem(f"must be an array, not {json_type_name(value)}")
    for index, token in enumerate(value):
        if type(token) is not int:
            raise FieldProblem(f"must be an integer, not {json_type_name(token)}", f"[{index}]")
    return TokenIds(tuple(value))


converter.register_structure_hook(TokenIds, _structure_ids)


@frozen
class DetokenizeCall:
    tokens: TokenIds
    model: str | None = None


def parse_detokenize(raw: bytes) -> DetokenizeCall:
    return structure(DetokenizeCall, parse_json_object(raw))


def known_fields() -> frozenset[str]:
    """Every field that tokenizing and detokenizing read. The others are ignored."""
    return frozenset(a.name for c in (TokenizeCall, DetokenizeCall) for a in attrs.fields(c))
