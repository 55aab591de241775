"""What the server says of itself: models, health, status. Waits for no engine step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .. import __version__
from ..generation.status import ModelProperties, ModelStatus, ServerStatus

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
        "models": [_llama_server_entry(model) for model in status.models],
    }


def model_entry(model: ModelStatus) -> dict[str, Any]:
    """One model as OpenAI describes it, with its room beside."""
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "dflash_trio",
        "aliases": list(model.aliases),
        "context_length": model.room,
        "max_model_len": model.room,
        "meta": {"n_ctx_train": model.trained_ctx, "n_vocab": model.vocab_size},
    }


def _llama_server_entry(model: ModelStatus) -> dict[str, Any]:
    # Its clients read the first two; the empty rest is there for those that insist on the keys.
    return {
        "name": model.name,
        "model": model.name,
        "aliases": list(model.aliases),
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def find_model(status: ServerStatus, name: str) -> ModelStatus | None:
    """A loaded model by its name or one of its aliases."""
    return next((m for m in status.models if name == m.name or name in m.aliases), None)


def status_body(status: ServerStatus, recent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of ``/status/json``: every figure with the unit its name says (tokens, cells).

    ``recent``: the latest requests, newest first.
    """
    return {
        "state": status.state,
        "load_balancing": status.load_balancing,
        "models": [_model_status(model) for model in status.models],
        "routing": attrs.asdict(status.router),
        "unused_models": list(status.unused_models),
        "recent_requests": list(recent),
    }


def props_body(status: ServerStatus, properties: Sequence[ModelProperties]) -> dict[str, Any]:
    """The body of ``/props``: the primary in llama-server's words, then every model in ours.

    ``properties``: of the models of ``status``, in its order; at least one.
    """
    primary, its = status.models[0], properties[0]
    return {
        "default_generation_settings": {
            "n_ctx": primary.max_ctx,
            "params": {name: default.value for name, default in its.sampling.items()}
            | {"n_predict": its.limits["default_max_tokens"].value},
        },
        "total_slots": primary.ledger.slots,
        "model_alias": primary.name,
        "model_path": primary.path,
        "modalities": {"vision": False, "audio": False},
        "chat_template": its.chat_template,
        "bos_token": its.bos_token,
        "eos_token": its.eos_token,
        "build_info": f"dflash-trio {__version__}",
        "models": [
            _model_status(model)
            | {
                "defaults": {name: attrs.asdict(d) for name, d in prop.sampling.items()},
                "limits": {name: attrs.asdict(d) for name, d in prop.limits.items()},
                "chat_template_source": prop.chat_template,
                "bos_token": prop.bos_token,
                "eos_token": prop.eos_token,
            }
            for model, prop in zip(status.models, properties, strict=True)
        ],
        "routing": attrs.asdict(status.router),
    }


def _model_status(model: ModelStatus) -> dict[str, Any]:
    ledger, engine = model.ledger, model.engine
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
        "slots": {
            "total": ledger.slots,
            "reserved": ledger.slots_reserved,
            "available": model.slots_available,
        },
        "kv_pool": {
            "total": ledger.pool,
            "committed": ledger.committed,
            "used": engine.cells_used,
            "cached": engine.cells_cached,
            "available": model.cells_available,
        },
        "prefix_cache": {
            "kept": engine.prefixes_cached,
            "disk_entries": engine.prefixes_stored,
            "disk_bytes": engine.bytes_stored,
        },
        "in_flight": dict(model.in_flight),
        "paused": engine.sequences_paused,
        "draft": attrs.asdict(model.draft),
        "engine": {
            "steps": engine.steps,
            "sequences_prefilling": engine.sequences_prefilling,
            "sequences_decoding": engine.sequences_decoding,
            "prompt_tokens": engine.prompt_tokens,
            "completion_tokens": engine.completion_tokens,
        },
        "health": {"healthy": model.healthy, "reason": model.unhealthy_reason},
        "drains": model.drains,
        "chat_template": model.chat_template,
    }
