"""The server's description of itself: an OpenAPI 3.1 document of all its routes.

What requests look like is read off the classes that check them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import field, frozen

from .. import __version__
from . import openapi_answers as answers
from .chat_request import ChatRequest
from .completions_request import CompletionRequest
from .error_responses import speaks_anthropic
from .field_schemas import INTEGER, STRING, Schema, one_of, schema_of
from .messages_call import MessagesBody
from .messages_request import MessagesConversation
from .responses_call import ResponsesFields
from .responses_request import ResponsesConversation
from .token_requests import DetokenizeCall, TokenizeCall

_STATUSES = {
    400: "Malformed, out of range, or beyond every model's room.",
    401: "A key is needed.",
    403: "A foreign Host or Origin on a local server.",
    404: "There is no such thing here.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is compressed.",
    500: "The engine could not go on.",
    503: "All is busy, loading, unhealthy or shutting down; see Retry-After.",
}
_OF_EVERY_ROUTE = (400, 401, 403, 500, 503)
_OF_BODIES = (408, 413, 415)


@frozen
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: Schema
    bodies: tuple[type, ...] = ()
    """The classes that read the body, each its own part of the fields."""
    streams: bool = False
    """Whether the body's ``stream`` may ask for server-sent events."""
    names_something: bool = False
    """Whether what it asks for may not exist."""
    query: dict[str, Schema] = field(factory=dict)
    content_types: tuple[str, ...] = ("application/json",)
    """Of its answer."""
    open: bool = False
    """Whether it wants no key where the others do."""

    @property
    def schema_name(self) -> str:
        return "".join(
            word.capitalize() for word in self.path.replace("-", "/").replace("_", "/").split("/")
        )


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation (OpenAI's chat completions).",
        answers.CHAT_COMPLETION,
        (ChatRequest,),
        streams=True,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text (OpenAI's completions).",
        answers.TEXT_COMPLETION,
        (CompletionRequest,),
        streams=True,
    ),
    Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation (Anthropic's Messages).",
        answers.MESSAGE,
        (MessagesBody,),
        streams=True,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count a conversation's tokens, as Anthropic does.",
        answers.MESSAGES_COUNT,
        (MessagesConversation,),
        names_something=True,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answer a conversation (OpenAI's Responses).",
        answers.RESPONSE,
        (ResponsesConversation, ResponsesFields),
        streams=True,
        names_something=True,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count a conversation's tokens, as OpenAI does.",
        answers.RESPONSES_COUNT,
        (ResponsesConversation,),
        names_something=True,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        "A response that this process made and still keeps.",
        answers.RESPONSE,
        names_something=True,
        query={"stream": one_of("true", "false")},
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "Forget a response.",
        answers.RESPONSE_DELETED,
        names_something=True,
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "End a response that is under way.",
        answers.RESPONSE,
        names_something=True,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "The items that a response answered.",
        answers.ITEM_LIST,
        names_something=True,
        query={
            "order": one_of("asc", "desc"),
            "after": STRING,
            "limit": {**INTEGER, "minimum": 1, "maximum": 100},
        },
    ),
    Operation(
        "POST",
        "/tokenize",
        "A text's tokens.",
        answers.TOKENS,
        (TokenizeCall,),
        names_something=True,
    ),
    Operation(
        "POST",
        "/detokenize",
        "The text of tokens.",
        answers.TEXT,
        (DetokenizeCall,),
        names_something=True,
    ),
    Operation(
        "POST",
        "/apply-template",
        "The prompt that a chat completion's body becomes.",
        answers.PROMPT,
        (ChatRequest,),
        names_something=True,
    ),
    Operation("GET", "/v1/models", "The loaded models, in priority order.", answers.MODEL_LIST),
    Operation(
        "GET",
        "/v1/models/{name}",
        "One of them, by name or alias.",
        answers.MODEL,
        names_something=True,
    ),
    Operation("GET", "/props", "What the models were set up with.", answers.PROPS),
    Operation("GET", "/health", "Whether models can serve.", answers.HEALTH, open=True),
    Operation("GET", "/status/json", "All the server knows about itself.", answers.STATUS),
    Operation(
        "GET",
        "/status/stream",
        "The same as server-sent events, as it changes; without end.",
        STRING,
        content_types=("text/event-stream",),
    ),
    Operation(
        "GET", "/", "The status page, for people.", STRING, content_types=("text/html",), open=True
    ),
    Operation(
        "GET",
        "/page/{version}/{file}",
        "What the status page is made of.",
        STRING,
        names_something=True,
        content_types=("text/javascript", "text/css", "image/svg+xml"),
        open=True,
    ),
    Operation(
        "GET",
        "/metrics",
        "Numbers for Prometheus.",
        STRING,
        content_types=("text/plain", "application/openmetrics-text"),
    ),
    Operation("GET", "/openapi.json", "This document.", answers.DOCUMENT),
)


def plain_route(rule: str) -> str:
    """A rule of the framework's as a path of the description, without ``/v1``."""
    path = rule.removeprefix("/v1").replace("<path:", "<")
    return path.replace("<", "{").replace(">", "}")


def route_labels() -> dict[str, str]:
    """Each path as it is described, by the path without ``/v1``."""
    return {operation.path.removeprefix("/v1"): operation.path for operation in OPERATIONS}


@cache
def openapi_document(*, keyed: bool) -> dict[str, Any]:
    """The document. ``keyed``: whether this server wants keys. Not to be changed."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Schema] = {
        "OpenAIError": answers.OPENAI_ERROR,
        "AnthropicError": answers.ANTHROPIC_ERROR,
    }
    for operation in OPERATIONS:
        entry = _entry(operation)
        if operation.bodies:
            schemas[operation.schema_name] = _merged(operation.bodies)
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    security: list[dict[str, list[str]]] = [{"bearer": []}, {"apiKey": []}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dflash-trio",
            "version": __version__,
            "description": "Several GGUF models behind one HTTP address. Every path that begins "
            "with /v1 answers without it too. Fields that are not named here are ignored; null "
            "means not given.",
        },
        "security": security if keyed else [*security, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _entry(operation: Operation) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}{operation.path}",
        "responses": _responses(operation),
    }
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    ]
    if parameters:
        entry["parameters"] = parameters
    if operation.bodies:
        schema = {"$ref": f"#/components/schemas/{operation.schema_name}"}
        entry["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if operation.open:
        entry["security"] = []
    return entry


def _responses(operation: Operation) -> dict[str, Any]:
    good: dict[str, Any] = {kind: {"schema": operation.answer} for kind in operation.content_types}
    if operation.streams:
        good["text/event-stream"] = {"schema": STRING}
    responses = {"200": {"description": "The answer.", "content": good}}
    kind = "AnthropicError" if speaks_anthropic(operation.path) else "OpenAIError"
    error: Schema = {"$ref": f"#/components/schemas/{kind}"}
    statuses = [*_OF_EVERY_ROUTE]
    if operation.bodies:
        statuses += _OF_BODIES
    if operation.names_something:
        statuses.append(404)
    for status in sorted(statuses):
        # A load balancer asks for its health in one shape, good or bad.
        unhealthy = operation.path == "/health" and status == 503
        schema = operation.answer if unhealthy else error
        responses[str(status)] = {
            "description": _STATUSES[status],
            "content": {"application/json": {"schema": schema}},
        }
    return responses


def _merged(classes: tuple[type, ...]) -> Schema:
    """One object with the fields of all of them."""
    schemas = [schema_of(cls) for cls in classes]
    properties = {name: value for s in schemas for name, value in s["properties"].items()}
    required = [name for s in schemas for name in s.get("required", ())]
    return {"type": "object", "properties": properties, "required": required}
