"""Frozen snapshots for the status pages. Reading one waits for nothing and changes nothing."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from .histogram import HistogramSnapshot

Source = Literal["flag", "card", "family", "built-in"]
"""Written down by the operator, said by the model's card, known of its family, or decided by the
server."""


DraftState = Literal["awake", "napping", "unloaded", "given-up"]
"""At work; left out of steps for a while, as it wins too little; not loaded now, until a request
comes; not to be loaded again, as that failed."""


@frozen
class LedgerStatistics:
    """A model's capacity as promised to requests. Slots and KV cells."""

    slots: int
    slots_reserved: int
    pool: int
    committed: int
    """Cells promised to the reservations that live now."""
    paused: int = 0
    """Reservations whose cells were taken back until there are enough again. While there are any,
    nobody is admitted."""


@frozen
class DraftStatistics:
    """What became of a model's drafts, since it loaded."""

    kind: str
    """``prompt-lookup``, ``draft-model``, ``dflash``."""
    tree_budget: int | None = None
    """Guesses that are verified as a tree have at most so many tokens; ``None``: as a chain."""
    steps: int = 0
    """Steps of the model in which guesses were verified."""
    runs: int = 0
    """How often a sequence had guesses verified: as often as it had a part in those steps."""
    proposed: int = 0
    """Tokens that were guessed and verified."""
    accepted: int = 0
    """Those of them that came."""
    committed: int = 0
    """Tokens that sequences got out of those runs. A run that ends with the answer may have no
    token of the model's own behind its guesses."""
    draft_seconds: float = 0.0
    """Time that went into guessing."""
    verify_seconds: float = 0.0
    """Time of the steps that verified, their sampling included."""
    state: DraftState = "awake"

    @property
    def acceptance(self) -> float | None:
        """The share of guesses that came, 0 to 1; ``None`` before the first."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def committed_per_run(self) -> float | None:
        """Tokens that a sequence got out of a step with guesses, on average: those that were right,
        and the one that the model adds itself, if the answer goes on so far. ``None`` before the
        first."""
        return self.committed / self.runs if self.runs else None


@frozen
class EngineStatistics:
    """What a worker last published, once per step."""

    steps: int = 0
    sequences_prefilling: int = 0
    sequences_decoding: int = 0
    sequences_paused: int = 0
    pauses: int = 0
    """How often a generation was paused since the model loaded."""
    cells_used: int = 0
    """KV cells that hold a token of a running sequence now."""
    cells_cached: int = 0
    """KV cells in beginnings of prompts that are kept. Given up as soon as cells are needed."""
    prefixes_cached: int = 0
    """Ended sequences and whole prompts that are kept in rows and in memory."""
    prefixes_stored: int = 0
    bytes_stored: int = 0
    """Those on disk for this model in this configuration."""
    prompt_tokens: int = 0
    """Prefilled since the model loaded, again after a pause included."""
    cached_tokens: int = 0
    """Taken from what is kept instead of being prefilled, likewise."""
    completion_tokens: int = 0
    """Sampled since the model loaded."""
    drafts: DraftStatistics | None = None
    """``None``: the model has no draft."""


@frozen
class EngineTimings:
    """How long an engine's work took, in seconds, since its model loaded."""

    draft: HistogramSnapshot
    """Of each step for which tokens were guessed: until the guesses were there, before ``decode``.
    What the draft learns from a step's outcome lies within ``sample``."""
    decode: HistogramSnapshot
    """Of each step: the device computes. Where it computes ahead, ``deliver`` lies within."""
    sample: HistogramSnapshot
    """Of each step: its tokens are chosen and turned into text, and who has ended is retired."""
    deliver: HistogramSnapshot
    """Of each delivery: the event loop is told what happened."""
    inter_token: HistogramSnapshot
    """Between two deliveries of text of the same answer. Pauses and others' prefills included."""


@frozen
class PlacementStatus:
    """Where a model landed."""

    target_device: str
    draft_device: str | None
    """``None``: it has no draft."""
    threads: int
    gpu_layers: int


@frozen
class DraftStatus:
    """A model's speculative decoding. All ``None``: it has none."""

    kind: str | None = None
    state: DraftState | None = None
    verification: Literal["chain", "tree"] | None = None
    """Whether one token is guessed for each place, or several."""
    tree_budget: int | None = None
    """Tokens of a tree at most; ``None`` for chains."""
    acceptance: float | None = None
    """The share of drafted tokens that were accepted, 0 to 1; ``None`` before the first."""
    committed_per_step: float | None = None
    """Tokens that a sequence got out of a step with guesses, on average: those that were accepted,
    and one more, if the answer goes on so far. ``None`` before the first."""
    proposed: int | None = None
    accepted: int | None = None
    """Drafted tokens that were verified, and those of them that came."""
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    """Time that went into guessing, and of the steps that verified."""

    @classmethod
    def of(cls, drafts: DraftStatistics | None) -> DraftStatus:
        """``None``: there is no draft."""
        if drafts is None:
            return cls()
        return cls(
            kind=drafts.kind,
            state=drafts.state,
            verification="chain" if drafts.tree_budget is None else "tree",
            tree_budget=drafts.tree_budget,
            acceptance=drafts.acceptance,
            committed_per_step=drafts.committed_per_run,
            proposed=drafts.proposed,
            accepted=drafts.accepted,
            draft_seconds=drafts.draft_seconds,
            verify_seconds=drafts.verify_seconds,
        )


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
    vocab_size: int
    ledger: LedgerStatistics
    engine: EngineStatistics
    in_flight: dict[str, int]
    """Reservations by phase: reserved, prefill, decode, draining."""
    draft: DraftStatus
    healthy: bool
    unhealthy_reason: str | None
    drains: bool
    """True: finishes its requests at shutdown; False: finalizes them."""
    chat_template: str
    """Where the template came from: the file's own, a given file, or a built-in one."""

    @property
    def room(self) -> int:
        """The longest prompt plus answer of one sequence, in tokens."""
        return min(self.max_ctx, self.ledger.pool)

    @property
    def slots_available(self) -> int:
        """Slots that a request could have now. A model that is unhealthy, or has somebody paused,
        has none."""
        admits = self.healthy and not self.ledger.paused
        return self.ledger.slots - self.ledger.slots_reserved if admits else 0

    @property
    def cells_available(self) -> int:
        """KV cells that could be promised now; see ``slots_available``."""
        admits = self.healthy and not self.ledger.paused
        return self.ledger.pool - self.ledger.committed if admits else 0


@frozen
class Default:
    """What stands in for a value that a request leaves open, or bounds it."""

    value: float | int | str | None
    source: Source


@frozen
class ModelProperties:
    """What does not change about a served model while it runs."""

    sampling: dict[str, Default]
    limits: dict[str, Default]
    """In tokens, slots and KV cells; ``thinking`` and ``tool_parser`` by their words."""
    chat_template: str
    """Its source text."""
    bos_token: str
    eos_token: str
    """Spelled out; empty if there is none."""


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
