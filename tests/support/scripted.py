"""Scripted engines for the floors above: loads without files, models without weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_trio.config import ModelConfig
from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.drafting.provider import DraftProvider
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.prefix_store import PrefixStore
from dflash_trio.engine.scripted_runner import EOG, Script, ScriptedRunner
from dflash_trio.engine.worker import Load, LoadedModel
from tests.support.http_client import PATIENCE

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
"""Each content on a line, then ``>``: prompt sizes are easy to count in bytes."""


class Gate:
    """Holds an engine's steps until opened. Tests wait on states, not on time."""

    def __init__(self, *, open: bool = True) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        """Set when a step has come to the gate at least once."""
        if open:
            self._open.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def __call__(self, batch: Sequence[BatchSlice]) -> None:
        self.reached.set()
        # A bound, so that a failing test cannot hang the suite.
        assert self._open.wait(PATIENCE), "nobody opened the gate"


class BreaksDown:
    """An engine that stands still once a sequence has come so far, and dies when the gate opens."""

    def __init__(self, reason: str = "the device fell off", *, position: int = 8) -> None:
        self.gate = Gate(open=False)
        self._reason = reason
        self._position = position

    def __call__(self, batch: Sequence[BatchSlice]) -> None:
        if any(item.position > self._position for item in batch):
            self.gate(batch)
            raise RuntimeError(self._reason)


class FileGate:
    """Holds another process's engine, once a sequence has come so far, until the file is there.

    Both processes have one: the test's opens it.
    """

    def __init__(self, path: Path | str, *, position: int = 0) -> None:
        """``position``: of the first token that has to wait."""
        self._path = Path(path)
        self._position = position

    @property
    def fields(self) -> dict[str, Any]:
        """For a scripted server whose steps are held."""
        return {"gate": [str(self._path), self._position]}

    @property
    def load_fields(self) -> dict[str, Any]:
        """For one whose model loads until the gate is opened."""
        return {"load_gate": str(self._path)}

    def open(self) -> None:
        self._path.touch()

    def __call__(self, batch: Sequence[BatchSlice]) -> None:
        if any(item.position + len(item.tokens) > self._position for item in batch):
            self.wait()

    def wait(self) -> None:
        # In another process: nobody sets an event. The test has no more patience than this.
        for _ in range(int(PATIENCE / 0.005)):
            if self._path.exists():
                return
            time.sleep(0.005)
        raise AssertionError("nobody opened the gate")


def paced(seconds: float) -> Callable[[Sequence[BatchSlice]], None]:
    """Steps that take some time, as a real engine's do."""
    return lambda _: time.sleep(seconds)


def endless(_: bytes, length: int) -> int:
    """A script that goes on and on. Without one, a sampled answer ends after some hundred tokens
    where a route takes no ``ignore_eos``."""
    return ord("a") + length % 26


def endless_load(gate: Gate | None = None, **fields: Any) -> Load:
    """An engine whose answers nobody sees the end of: minutes, however fast the machine is.

    For what happens in the middle of one. Its steps pass the gate, if there is one.
    """

    def step(batch: Sequence[BatchSlice]) -> None:
        if gate is not None:
            gate(batch)
        time.sleep(0.002)

    return scripted_load(max_ctx=100_000, script=endless, before_decode=step, **fields)


def answer(text: str) -> Script:
    """A script that says ``text`` after the prompt's last ``>`` and then ends its turn."""

    def script(history: bytes, _: int) -> int | None:
        said = history.rpartition(b">")[2]
        wanted = text.encode()
        return wanted[len(said)] if len(said) < len(wanted) else EOG

    return script


def scripted_load(
    *,
    slots: int = 1,
    max_ctx: int = 2048,
    pool: int | None = None,
    headroom: int = 128,
    chunk: int = 64,
    script: Script | None = None,
    before_decode: Callable[[Sequence[BatchSlice]], None] | None = None,
    template: str | None = PLAIN_TEMPLATE,
    launches_ahead: bool = False,
    on_runner: Callable[[ScriptedRunner], None] = lambda _: None,
    prefixes: int = 0,
    open_store: Callable[[], PrefixStore] | None = None,
    drafts: Callable[[], DraftProvider] | None = None,
) -> Load:
    """What a worker runs first, for a scripted model. ``on_runner`` gets the runner itself,
    ``drafts`` makes its draft."""
    cells = pool if pool is not None else slots * max_ctx

    def load(on_progress: Callable[[float], None], stopped: threading.Event) -> LoadedModel:
        on_progress(0.0)
        runner = ScriptedRunner(
            slots=slots,
            cells=cells,
            script=script,
            before_decode=before_decode,
            chat_template=template,
            launches_ahead=launches_ahead,
        )
        on_runner(runner)
        on_progress(1.0)
        ledger = KVLedger(slots=slots, pool=cells, max_ctx=max_ctx, decode_headroom=headroom)
        store = open_store() if open_store is not None else None
        return LoadedModel(
            runner,
            ledger,
            chunk,
            prefixes=prefixes,
            store=store,
            drafts=drafts() if drafts is not None else None,
            verify_limit=63,
        )

    return load


def scripted_config(name: str = "scripted", **changes: object) -> ModelConfig:
    """A block's configuration to go with :func:`scripted_load`."""
    return ModelConfig(path=f"/nowhere/{name}.gguf", name=name, position=0, **changes)  # type: ignore[arg-type]
