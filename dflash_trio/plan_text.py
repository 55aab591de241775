"""A launch's plan for its readers: whole for ``--check``, short for a start, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from . import __version__
from .cli.errors import printable
from .engine.memory_plan import Need, mib
from .launch_plan import LaunchPlan, ModelPlan

_LABEL = 10

_AT_SIGTERM = {
    "drain": "finishes its active requests",
    "finalize": "ends its active requests properly, at once",
}


def render_check(plan: LaunchPlan) -> str:
    """The plan as lines for people, the warnings last."""
    return "".join(f"{printable(line)}\n" for line in _check_lines(plan))


def render_json(plan: LaunchPlan) -> str:
    """The plan as one JSON object in one line of ASCII. Sizes are bytes, times seconds."""
    return json.dumps(as_json(plan), ensure_ascii=True) + "\n"


def banner(plan: LaunchPlan) -> Iterator[str]:
    """The plan in a line for the launch and one for each model, in priority order."""
    models = plan.models
    order = f"{len(models)} models, tried in this order" if len(models) > 1 else "one model"
    yield f"dflash-server {__version__}: {order}"
    for priority, model in enumerate(models, 1):
        memory = (*model.memory, *model.draft_memory)
        needs = ", ".join(f"{mib(need.total)} MiB on {device}" for device, need in memory)
        draft = "" if model.config.draft is None else f"drafts by {_draft_kind(model)}, "
        yield (
            f"{priority}. {printable(model.config.name)}: {model.file.architecture} on "
            f"{', '.join(model.devices)}, context {model.context.max_ctx}, {_slots(model)}, "
            f"{model.context.pool} KV cells, {draft}about {needs}, "
            f"{model.config.sigterm_policy}s at SIGTERM"
        )


def load_detail(model: ModelPlan) -> str:
    """What is being loaded, beside its name: how much, and where to."""
    return f"{mib(model.file.size_bytes)} MiB to {', '.join(model.devices)}"


# ------------------------------------------------------------------------------- for people


def _check_lines(plan: LaunchPlan) -> Iterator[str]:
    config = plan.config
    yield "The launch is fine. Nothing was loaded or bound."
    yield _row("listener", f"{plan.address} (whether it is free was not checked)")
    yield _row("", _listener(plan))
    if config.load_balancing:
        yield _row("balancing", "on: a request goes to the next model while those before are busy")
    elif config.unused:
        yield _row("balancing", f"off: not loaded and not checked: {', '.join(config.unused)}")
    for priority, model in enumerate(plan.models, 1):
        yield from _model_lines(priority, model)
    needs = ", ".join(f"{mib(size)} MiB on {device}" for device, size in plan.memory.items())
    yield _row("in all", f"about {needs}")
    if plan.traces.endpoint is not None:
        yield _row("traces", f"to {plan.traces.endpoint}")
    for warning in plan.lines_of_warning():
        yield _row("warning", warning)


def _listener(plan: LaunchPlan) -> str:
    listener = plan.config.listener
    keys = len(listener.api_keys)
    limit = listener.drain_timeout
    patience = "to their end" if limit is None else f"{limit:g} s at most"
    parts = (
        "no API key" if not keys else "one API key" if keys == 1 else f"{keys} API keys",
        f"{listener.routing_queue_limit} requests may wait",
        f"a shutdown waits for answers {patience}",
    )
    return ", ".join(parts)


def _model_lines(priority: int, model: ModelPlan) -> Iterator[str]:
    config, context, card = model.config, model.context, model.config.card
    names = "".join(f", also {alias}" for alias in config.aliases)
    yield f"{priority}. {config.name}{names}{' (primary)' if priority == 1 else ''}"
    yield _row("file", f"{config.path}: {model.file.architecture}, {_size(model)}")
    threads = f", {_count(model.threads, 'thread')}" if model.place.on_cpu else ""
    yield _row("device", f"{', '.join(model.devices)}{threads}")
    trained = model.file.shape.trained_ctx
    yield _row("context", f"{context.max_ctx} tokens, of {trained} that it was trained on")
    kind = "each slot has its own" if model.partitioned else "shared by all slots"
    yield _row("slots", f"{context.slots}, with {context.pool} KV cells, {kind}")
    yield _row("cache", f"K in {config.cache_type_k}, V in {config.cache_type_v}")
    for device, need in model.memory:
        yield _row("memory", f"about {need.shown()} on {device}")
    yield from _draft_lines(model)
    yield _row("SIGTERM", f"{config.sigterm_policy}: {_AT_SIGTERM[config.sigterm_policy]}")
    if card is not None:
        values = ", ".join(f"{name} {_value(value)}" for name, value in model.from_card.items())
        yield _row("card", f"{card.path}: {values or 'nothing that holds'}")


def _draft_kind(model: ModelPlan) -> str:
    draft = model.place.draft
    return str(model.config.draft) if draft is None else draft.file.kind


def _draft_lines(model: ModelPlan) -> Iterator[str]:
    config, draft = model.config, model.place.draft
    if draft is not None:
        when = ", loaded when a request comes" if config.lazy_draft else ""
        budget = config.tree_budget
        trees = "" if budget is None else f", in trees of at most {_count(budget, 'token')}"
        yield _row("draft", f"{draft.file.path}: {draft.file.kind} on {draft.device}{trees}{when}")
        for device, need in model.draft_memory:
            yield _row("", f"about {need.shown()} on {device}")
    elif config.draft is not None:
        yield _row("draft", f"{config.draft}, which loads nothing")


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _size(model: ModelPlan) -> str:
    parts = len(model.file.parts)
    return f"{mib(model.file.size_bytes)} MiB{f' in {parts} parts' if parts > 1 else ''}"


def _slots(model: ModelPlan) -> str:
    return _count(model.context.slots, "slot")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)


# ----------------------------------------------------------------------------- for machines


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan in plain values, as docs/running.md lists them."""
    listener = plan.config.listener
    return {
        "version": __version__,
        "listener": {
            "address": plan.address,
            "tls": listener.tls_cert is not None,
            "api_keys": len(listener.api_keys),
            "routing_queue_limit": listener.routing_queue_limit,
            "max_connections": listener.max_connections,
            "drain_timeout": listener.drain_timeout,
        },
        "load_balancing": plan.config.load_balancing,
        "models": [_model_json(number, model) for number, model in enumerate(plan.models)],
        "unused_models": list(plan.config.unused),
        "memory": dict(plan.memory),
        "traces": plan.traces.endpoint,
        "warnings": list(plan.lines_of_warning()),
    }


def _model_json(priority: int, model: ModelPlan) -> dict[str, Any]:
    config, context = model.config, model.context
    return {
        "name": config.name,
        "aliases": list(config.aliases),
        "block": config.position + 1,
        "priority": priority,
        "primary": priority == 0,
        "path": config.path,
        "size_bytes": model.file.size_bytes,
        "architecture": model.file.architecture,
        "devices": list(model.devices),
        "threads": model.threads,
        "trained_ctx": model.file.shape.trained_ctx,
        "max_ctx": context.max_ctx,
        "max_concurrency": context.slots,
        "kv_pool_tokens": context.pool,
        "kv_pool_partitioned": model.partitioned,
        "cache_type_k": config.cache_type_k,
        "cache_type_v": config.cache_type_v,
        "memory": [_need_json(device, need) for device, need in model.memory],
        "draft": _draft_json(model),
        "on_sigterm": config.sigterm_policy,
        "model_card": None if config.card is None else config.card.path,
        "from_card": dict(model.from_card),
    }


def _draft_json(model: ModelPlan) -> dict[str, Any] | None:
    config, draft = model.config, model.place.draft
    if config.draft is None:
        return None
    return {
        "kind": _draft_kind(model),
        "path": config.draft_file,
        "device": None if draft is None else str(draft.device),
        "lazy": config.lazy_draft,
        "tree_budget": config.tree_budget,
        "memory": [_need_json(device, need) for device, need in model.draft_memory],
    }


def _need_json(device: str, need: Need) -> dict[str, Any]:
    return {
        "device": device,
        "weights": need.weights,
        "kv_cache": need.cache,
        "computing": need.computing,
        "total": need.total,
    }
