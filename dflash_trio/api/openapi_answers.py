"""What answers look like, as JSON Schemas: what every one of a kind has, not all it may have."""

from __future__ import annotations

from .field_schemas import INTEGER, OBJECT, STRING, Schema, any_of, array_of, object_of, one_of

_NULLABLE_STRING = any_of(STRING, {"type": "null"})
_COUNT: Schema = {"type": "integer", "minimum": 0}
_BOOLEAN: Schema = {"type": "boolean"}
_LOGPROBS = any_of(OBJECT, {"type": "null"})

OPENAI_ERROR = object_of(
    {
        "error": object_of(
            {
                "message": STRING,
                "type": one_of("invalid_request_error", "server_error"),
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            }
        )
    }
)
ANTHROPIC_ERROR = object_of(
    {
        "type": one_of("error"),
        "error": object_of({"type": STRING, "message": STRING}),
        "request_id": STRING,
    }
)

_USAGE = object_of(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": _COUNT}),
        "completion_tokens_details": object_of(
            {"reasoning_tokens": _COUNT},
            {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT},
        ),
    }
)
_IDENTITY = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_TOOL_CALL = object_of(
    {
        "id": STRING,
        "type": one_of("function"),
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
)

CHAT_COMPLETION = object_of(
    {
        **_IDENTITY,
        "object": one_of("chat.completion"),
        "choices": array_of(
            object_of(
                {
                    "index": _COUNT,
                    "message": object_of(
                        {"role": one_of("assistant"), "content": _NULLABLE_STRING},
                        {"reasoning_content": STRING, "tool_calls": array_of(_TOOL_CALL)},
                    ),
                    "logprobs": _LOGPROBS,
                    "finish_reason": one_of("stop", "length", "tool_calls"),
                }
            ),
            minItems=1,
        ),
        "usage": _USAGE,
    }
)
TEXT_COMPLETION = object_of(
    {
        **_IDENTITY,
        "object": one_of("text_completion"),
        "choices": array_of(
            object_of(
                {
                    "index": _COUNT,
                    "text": STRING,
                    "logprobs": _LOGPROBS,
                    "finish_reason": one_of("stop", "length"),
                }
            ),
            minItems=1,
        ),
        "usage": _USAGE,
    }
)
MESSAGE = object_of(
    {
        "id": STRING,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": STRING,
        "content": array_of(object_of({"type": one_of("text", "thinking", "tool_use")})),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": _NULLABLE_STRING,
        "usage": object_of({"input_tokens": _COUNT, "output_tokens": _COUNT}),
    }
)
RESPONSE = object_of(
    {
        "id": STRING,
        "object": one_of("response"),
        "created_at": INTEGER,
        "model": STRING,
        "status": one_of("completed", "incomplete", "failed", "in_progress", "cancelled"),
        "output": array_of(object_of({"id": STRING, "type": STRING})),
        "error": any_of(OBJECT, {"type": "null"}),
        "incomplete_details": any_of(OBJECT, {"type": "null"}),
    }
)
RESPONSE_DELETED = object_of({"id": STRING, "object": one_of("response"), "deleted": _BOOLEAN})
ITEM_LIST = object_of(
    {
        "object": one_of("list"),
        "data": array_of(object_of({"type": STRING})),
        "first_id": _NULLABLE_STRING,
        "last_id": _NULLABLE_STRING,
        "has_more": _BOOLEAN,
    }
)

MESSAGES_COUNT = object_of({"input_tokens": _COUNT})
RESPONSES_COUNT = object_of({"object": one_of("response.input_tokens"), "input_tokens": _COUNT})
TOKENS = object_of(
    {
        "tokens": array_of(
            any_of(
                INTEGER,
                object_of({"id": INTEGER, "piece": any_of(STRING, array_of(INTEGER))}),
            )
        )
    }
)
TEXT = object_of({"content": STRING})
PROMPT = object_of({"prompt": STRING})

MODEL = object_of(
    {
        "id": STRING,
        "object": one_of("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "context_length": _COUNT,
        "max_model_len": _COUNT,
    }
)
MODEL_LIST = object_of(
    {"object": one_of("list"), "data": array_of(MODEL), "models": array_of(OBJECT)}
)
PROPS = object_of({"models": array_of(OBJECT), "total_slots": _COUNT})
STATUS = object_of(
    {
        "state": STRING,
        "models": array_of(OBJECT),
        "routing": OBJECT,
        "recent_requests": array_of(OBJECT),
        "taken_at": {"type": "number"},
    }
)
HEALTH = object_of({"status": one_of("ok", "degraded", "loading", "unhealthy")})
DOCUMENT = object_of({"openapi": STRING, "info": OBJECT, "paths": OBJECT})
