"""Frozen snapshots for the status pages. Reading one waits for nothing and changes nothing."""

from __future__ import annotations

from attrs import field, frozen


@frozen
class LedgerStatistics:
    """A model's capacity as promised to requests. Slots and KV cells."""

    slots: int
    slots_reserved: int
    pool: int
    committed: int
    """Cells promised to the reservations that live now."""


@frozen
class EngineStatistics:
    """What a worker last published, once per step."""

    steps: int = 0
    sequences_prefilling: int = 0
    sequences_decoding: int = 0
    cells_used: int = 0
    """KV cells that hold a token now."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Totals since the model loaded."""


@frozen
class PlacementStatus:
    """Where a model landed."""

    target_device: str
    threads: int
    gpu_layers: int


@frozen
class ModelStatus:
    """One served model on the status pages."""

    name: str
    aliases: tuple[str, ...]
    path: str
    architecture: str
    placement: PlacementStatus
    priority: int
    """0 is the primary."""
    max_ctx: int
    trained_ctx: int
    ledger: LedgerStatistics
    engine: EngineStatistics
    in_flight: dict[str, int]
    """Reservations by phase: reserved, prefill, decode, draining."""
    healthy: bool
    unhealthy_reason: str | None
    drains: bool
    """True: finishes its requests at shutdown; False: finalizes them."""
    chat_template: str
    """Where the template came from: the file's own, a given file, or a built-in one."""


@frozen
class RouterStatistics:
    """Who waits for capacity."""

    waiting: int
    waiting_limit: int
    preparing: int
    draining: bool


@frozen
class ServerStatus:
    """The whole server at one moment."""

    state: str
    """``loading``, ``ready``, ``draining``."""
    models: tuple[ModelStatus, ...]
    router: RouterStatistics
    load_balancing: bool
    unused_models: tuple[str, ...] = field(default=())
