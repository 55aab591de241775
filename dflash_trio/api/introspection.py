"""What the server says of itself: models, health, status. Waits for no engine step."""

from __future__ import annotations

import time
from typing import Any

import attrs

from ..generation.status import ModelStatus, ServerStatus

_STARTED = int(time.time())


def health(status: ServerStatus) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of ``/health``."""
    if status.state == "loading":
        return 503, {"status": "loading"}
    sick = {m.name: m.unhealthy_reason for m in status.models if not m.healthy}
    if not sick:
        return 200, {"status": "ok"}
    if len(sick) < len(status.models):
        return 200, {"status": "degraded", "unhealthy": sick}
    return 503, {"status": "unhealthy", "unhealthy": sick}


def model_list(status: ServerStatus) -> dict[str, Any]:
    """The body of ``/v1/models``: OpenAI's list, and beside it llama-server's ``models``."""
    return {
        "object": "list",
        "data": [model_entry(model) for model in status.models],
        "models": [
            {"name": model.name, "model": model.name, "aliases": list(model.aliases)}
            for model in status.models
        ],
    }


def model_entry(model: ModelStatus) -> dict[str, Any]:
    """One model as OpenAI describes it, with its room beside."""
    room = min(model.max_ctx, model.ledger.pool)
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "dflash_trio",
        "aliases": list(model.aliases),
        "context_length": room,
        "max_model_len": room,
    }


def find_model(status: ServerStatus, name: str) -> ModelStatus | None:
    """A loaded model by its name or one of its aliases."""
    return next((m for m in status.models if name == m.name or name in m.aliases), None)


def status_body(status: ServerStatus) -> dict[str, Any]:
    """The body of ``/status/json``: every figure with the unit its name says (tokens, cells)."""
    return {
        "state": status.state,
        "load_balancing": status.load_balancing,
        "models": [_model_status(model) for model in status.models],
        "routing": attrs.asdict(status.router),
        "unused_models": list(status.unused_models),
    }


def _model_status(model: ModelStatus) -> dict[str, Any]:
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "path": model.path,
        "architecture": model.architecture,
        "placement": attrs.asdict(model.placement),
        "priority": model.priority,
        "primary": model.priority == 0,
        "max_ctx": model.max_ctx,
        "trained_ctx": model.trained_ctx,
        "slots": {"total": model.ledger.slots, "reserved": model.ledger.slots_reserved},
        "kv_pool": {
            "total": model.ledger.pool,
            "committed": model.ledger.committed,
            "used": model.engine.cells_used,
            "cached": 0,
        },
        "in_flight": dict(model.in_flight),
        "engine": {
            "steps": model.engine.steps,
            "sequences_prefilling": model.engine.sequences_prefilling,
            "sequences_decoding": model.engine.sequences_decoding,
            "prompt_tokens": model.engine.prompt_tokens,
            "completion_tokens": model.engine.completion_tokens,
        },
        "health": {"healthy": model.healthy, "reason": model.unhealthy_reason},
        "drains": model.drains,
        "chat_template": model.chat_template,
    }
