"""A real server process on scripted engines: real sockets and signals, answers in milliseconds.

``python -m tests.support.scripted_server '{"models": [{...}], "listener": {...}}'``; for the
fields of a model see ``MODEL_FIELDS``, for those of the listener ``ListenerConfig``. A third part,
``"bounds"``, replaces times that are no options: ``{"dflash_trio.routing.drain.CUT_GRACE": 60}``.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time

# structlog imports it where it is installed, for tracebacks in colours: an eighth of the start of a
# server, of which the suite starts hundreds.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from collections.abc import Sequence
from typing import Any

from dflash_trio.config import ListenerConfig, ModelConfig, ServerConfig
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.worker import Load
from dflash_trio.log_setup import set_up_logging
from dflash_trio.server import serve
from tests.support.scripted import FileGate, answer, endless, scripted_config, scripted_load

MODEL_FIELDS = {
    "name": "scripted",
    "slots": 1,
    "max_ctx": 2048,
    "pool": None,
    "step_seconds": 0.0,
    "answer": None,
    "endless": False,
    "load_seconds": 0.0,
    "on_sigterm": None,
    "gate": None,
    "load_gate": None,
}


def build(fields: dict[str, Any]) -> tuple[ModelConfig, Load]:
    """One scripted model from its JSON fields."""
    unknown = fields.keys() - MODEL_FIELDS.keys()
    assert not unknown, f"unknown fields: {unknown}"
    model = {**MODEL_FIELDS, **fields}

    def wait(_: Any) -> None:
        time.sleep(model["load_seconds"])
        if model["load_gate"]:
            FileGate(model["load_gate"]).wait()

    said = answer(model["answer"]) if model["answer"] is not None else None
    gate = FileGate(model["gate"][0], position=model["gate"][1]) if model["gate"] else None

    def step(batch: Sequence[BatchSlice]) -> None:
        if gate is not None:
            gate(batch)
        if model["step_seconds"]:
            time.sleep(model["step_seconds"])

    load = scripted_load(
        slots=model["slots"],
        max_ctx=model["max_ctx"],
        pool=model["pool"],
        script=endless if model["endless"] else said,
        before_decode=step,
        on_runner=wait,
    )
    config = scripted_config(
        model["name"], max_concurrency=model["slots"], on_sigterm=model["on_sigterm"]
    )
    return config, load


def main() -> int:
    specification = json.loads(sys.argv[1])
    set_up_logging("console", "info")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    for name, seconds in specification.get("bounds", {}).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(sys.modules[module], constant, seconds)
    fields = {"port": 0, **specification.get("listener", {})}
    fields["api_keys"] = tuple(key.encode() for key in fields.get("api_keys", ()))
    listener = ListenerConfig(**fields)
    loads = [build(fields) for fields in specification["models"]]
    config = ServerConfig(tuple(model for model, _ in loads), listener, len(loads) > 1)
    return serve(config, loads)


if __name__ == "__main__":
    sys.exit(main())
