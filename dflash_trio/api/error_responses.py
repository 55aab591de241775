"""The domain's errors as HTTP answers, in the shape of the API that was called.

Routes raise and never care about shapes: which API was called, and so which shape its errors have,
is decided here, by the path alone. So a path that leads nowhere, a refused key and a body that is
not JSON are told in the same shape as everything else under that path.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve, field, frozen

from ..generation.errors import (
    Draining,
    EngineFailed,
    GenerationError,
    InvalidRequest,
    Loading,
    PreparationFull,
    PromptTooLong,
    QueueFull,
    Unhealthy,
    UnknownModel,
)

_ANTHROPIC_PATHS = ("/v1/messages", "/messages")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""The others are ``invalid_request_error`` below 500 and ``api_error`` from there."""


@frozen
class ErrorAnswer:
    """An error, not yet in any API's shape."""

    status: int
    message: str
    kind: str
    """OpenAI's ``type``."""
    param: str | None = None
    of_the_prompt: bool = False
    """``param`` is the field that holds the prompt on the path that was called."""
    code: str | None = None
    retry_after: int | None = None
    """Seconds for the ``Retry-After`` header."""
    closes: bool = False
    """Whether the connection ends with it."""
    headers: dict[str, str] = field(factory=dict)

    def openai_body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        return {
            "type": "error",
            "error": {
                "type": _ANTHROPIC_TYPES.get(self.status, other),
                "message": self.message,
            },
            "request_id": request_id,
        }

    def body_for(self, path: str, request_id: str) -> dict[str, Any]:
        """The body in the shape that clients of this path read."""
        if speaks_anthropic(path):
            return self.anthropic_body(request_id)
        answer = evolve(self, param=prompt_field(path)) if self.of_the_prompt else self
        return answer.openai_body()

    def all_headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", **self.headers}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.closes:
            headers["connection"] = "close"
        return headers

    def json_for(self, path: str, request_id: str) -> str:
        return json.dumps(self.body_for(path, request_id), ensure_ascii=True)


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API; mistyped ends of it do too."""
    return path.startswith(_ANTHROPIC_PATHS)


def prompt_field(path: str) -> str:
    """The field of the body that holds the prompt."""
    route = path.removeprefix("/v1").strip("/").partition("/")[0]
    return {"responses": "input", "completions": "prompt", "tokenize": "content"}.get(
        route, "messages"
    )


_UNAVAILABLE: dict[type[GenerationError], tuple[str, int]] = {
    # error -> (code, seconds to retry after)
    QueueFull: ("queue_full", 1),
    PreparationFull: ("queue_full", 2),
    Draining: ("server_shutting_down", 5),
    Loading: ("model_loading", 5),
    Unhealthy: ("model_unhealthy", 30),
}


def answer_for(error: GenerationError) -> ErrorAnswer:
    """The HTTP answer of a domain error."""
    message = str(error)
    for kind, (code, seconds) in _UNAVAILABLE.items():
        if isinstance(error, kind):
            return ErrorAnswer(
                503,
                message,
                "server_error",
                code=code,
                retry_after=seconds,
                closes=isinstance(error, Draining),
            )
    if isinstance(error, PromptTooLong):
        return ErrorAnswer(
            400,
            message,
            "invalid_request_error",
            of_the_prompt=True,
            code="context_length_exceeded",
        )
    if isinstance(error, InvalidRequest):
        return ErrorAnswer(
            400, message, "invalid_request_error", param=error.param, code=error.code
        )
    if isinstance(error, UnknownModel):
        return ErrorAnswer(
            404, message, "invalid_request_error", param="model", code="model_not_found"
        )
    if isinstance(error, EngineFailed):
        return ErrorAnswer(500, message, "server_error", code="engine_failed")
    return ErrorAnswer(500, message, "server_error")


def http_answer(status: int, message: str, headers: dict[str, str] | None = None) -> ErrorAnswer:
    """The answer for an error of HTTP itself: 404, 405, 408, 413, 415, ..."""
    code = {
        401: "invalid_api_key",
        403: "forbidden",
        404: "not_found",
        405: "method_not_allowed",
        408: "request_timeout",
        413: "request_too_large",
        415: "unsupported_media_type",
    }.get(status)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    # A body that was not read to its end must not be taken for the next request.
    closes = status in (408, 413)
    return ErrorAnswer(status, message, kind, code=code, closes=closes, headers=headers or {})


INTERNAL_ERROR = ErrorAnswer(
    500, "The server failed on this request; its log says why.", "server_error"
)
