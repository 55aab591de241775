"""Frozen configuration: what the operator asked for, before any file is opened.

Imports nothing of ours, so every floor may read it. A field that is ``None`` means "not given":
its default depends on the model file or the machine and is resolved when the model loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from attrs import field, frozen

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
FlashAttention = Literal["auto", "on", "off"]
SigtermPolicy = Literal["drain", "finalize"]
Thinking = Literal["auto", "on", "off"]

Effort = Literal["low", "medium", "high", "x-high", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

PROMPT_LOOKUP = "prompt-lookup"
"""The draft that is no file: what followed the same tokens before."""

DDTREE_BUDGET = 22

BACKENDS = ("cuda", "hip", "vulkan", "metal", "sycl", "cpu")


@frozen
class DevicePlacement:
    """A device as written by the operator: ``backend:index``.

    ``cpu:N`` names a CPU worker group; N only tells blocks apart.
    """

    backend: str
    index: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.index}"

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    @classmethod
    def parse(cls, text: str) -> DevicePlacement:
        """Read ``backend:index``; ValueError says what is wrong with the text."""
        backend, colon, index = text.partition(":")
        if backend not in BACKENDS:
            raise ValueError(
                f"unknown backend {backend!r}: devices are backend:index "
                f"with one of {', '.join(BACKENDS)}"
            )
        if not colon or not index.isascii() or not index.isdigit() or len(index) > 4:
            raise ValueError(f"{text!r} has no device index: write {backend}:0")
        return cls(backend, int(index))


@frozen
class SamplingDefaults:
    """A model's sampling values for requests that give none (operator's flags)."""

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    """``None``: a fresh random seed for each request."""


@frozen
class ModelCard:
    """A model's own defaults, read from a file beside it. They rank behind the operator's flags."""

    path: str
    """The file; empty for values that come from none."""
    sampling: SamplingDefaults = field(factory=SamplingDefaults)
    """Only the values named in ``given`` are the card's."""
    default_max_tokens: int | None = None
    hard_limit_reply_budget: int | None = None
    think_max_tokens: int | None = None
    # A mapping has no hash, and equality is enough to tell cards apart.
    reasoning_efforts: Mapping[Effort, int] = field(factory=dict, hash=False)
    """Only those that the card gives."""
    thinking: Thinking | None = None
    tool_parser: str | None = None
    turn_ends: tuple[str, ...] = ()
    """Strings that end an answer as a token for it would, for models that write none."""
    given: frozenset[str] = frozenset()
    """What the card says, by the names of these fields (``sampling.top_k``)."""


@frozen
class ModelConfig:
    """One model block of the command line or the configuration file."""

    path: str
    name: str
    position: int
    """Place among the configured blocks, from 0; errors say ``model block {position + 1}``."""
    aliases: tuple[str, ...] = ()
    target_device: DevicePlacement | None = None
    """``None`` is ``auto``: the first GPU with room, else ``cpu:0``."""
    target_devices: tuple[DevicePlacement, ...] = ()
    """GPUs that share the layers, instead of the one device."""
    target_layer_split: tuple[float, ...] = ()
    """Their shares; empty: even ones."""
    peer_access: bool = False
    """They may read each other's memory."""
    max_ctx: int | None = None
    """Tokens one sequence may hold; ``None``: min(trained context, 8192)."""
    max_concurrency: int = 1
    """Slots."""
    kv_pool_tokens: int | None = None
    """KV cells shared by the model's sequences; ``None``: max_ctx x max_concurrency."""
    decode_headroom: int = 128
    """Cells promised to a sequence beyond its prompt at admission."""
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attn: FlashAttention = "auto"
    chunk: int = 512
    """Prefill tokens in one step."""
    threads: int | None = None
    """``None``: usable cores / loaded CPU blocks."""
    gpu_layers: int | None = None
    """``None``: all of them on a GPU, none on ``cpu:N``."""
    cpu_moe: bool = False
    """Experts stay on the CPU."""
    ds4_fused_decode: bool = False
    """Says what is so in any case."""
    ds4_expert_top_k: int | None = None
    """Experts of a token; ``None``: the file's."""
    ds4_prefill: Literal["exact"] | None = None
    """Says what is so in any case."""
    mmap: bool = True
    mlock: bool = False
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    chat_template_file: str | None = None
    default_max_tokens: int | None = None
    """For requests that name no limit; ``None``: the card's, else min(16000, room)."""
    hard_limit_reply_budget: int | None = None
    """Tokens kept for the reply; ``None``: the card's, else min(4096, half the context)."""
    think_max_tokens: int | None = None
    """``None``: the card's, else default_max_tokens less the reply budget."""
    reasoning_efforts: Mapping[Effort, int] = field(factory=dict, hash=False)
    """Thinking tokens of each tier, only those given; others: the card's, else a share of
    think_max_tokens."""
    thinking: Thinking = "auto"
    """``auto``: what the template does when told nothing."""
    tool_parser: str | None = None
    """``None``: the card's, else told by the template."""
    model_card_file: str | None = None
    """``None``: the file beside the model, if there is one."""
    card: ModelCard | None = None
    """What that file says; ``None``: there is none."""
    sampling: SamplingDefaults = field(factory=SamplingDefaults)
    prefix_cache_slots: int = 8
    """Ended sequences that are kept for prompts that begin alike."""
    prefill_cache_slots: int = 0
    """Whole prompts that are kept as such."""
    disk_prefix_cache: str | None = None
    """The folder in which what is kept outlives the process; ``None``: it does not."""
    draft: str | None = None
    """The file of a draft, or ``PROMPT_LOOKUP``; ``None``: nothing is drafted."""
    draft_device: DevicePlacement | None = None
    """``None``: the target's."""
    draft_max: int | None = None
    """Tokens drafted at a time; ``None``: what the draft does by itself."""
    ddtree: bool = False
    """Guesses are trees: several tokens for a place."""
    ddtree_budget: int | None = None
    """Tokens of a tree at most; ``None``: ``DDTREE_BUDGET``."""
    lazy_draft: bool = False
    """The draft is loaded when a request comes, and freed after some idle minutes."""
    on_sigterm: SigtermPolicy | None = None
    """``None``: ``drain`` with one slot, ``finalize`` with more."""
    given: frozenset[str] = field(default=frozenset(), eq=False)
    """The fields above that the operator wrote down (``sampling.top_k``, ``reasoning_efforts.low``
    for one value of those): they come before the card, and the pages say so."""

    @property
    def sigterm_policy(self) -> SigtermPolicy:
        if self.on_sigterm is not None:
            return self.on_sigterm
        return "drain" if self.max_concurrency == 1 else "finalize"

    @property
    def draft_file(self) -> str | None:
        """The draft's file, if it has one."""
        return None if self.draft == PROMPT_LOOKUP else self.draft

    @property
    def tree_budget(self) -> int | None:
        """Tokens of a tree of guesses at most; ``None``: guesses are no trees."""
        return (self.ddtree_budget or DDTREE_BUDGET) if self.ddtree else None

    @property
    def keeps_prefixes(self) -> bool:
        """Prompts may go on from what is left of earlier ones."""
        return bool(self.prefix_cache_slots or self.prefill_cache_slots)

    @property
    def block_label(self) -> str:
        """How errors name this block to people."""
        return f"model block {self.position + 1} ({self.name})"


@frozen
class ListenerConfig:
    """The one HTTP address and how it behaves. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    """An address, a name, or ``unix:/path``."""
    port: int = 8080
    """0: any free one, printed."""
    routing_queue_limit: int = 32
    api_keys: tuple[bytes, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call; ``*`` is every one."""
    drain_timeout: float | None = None
    client_stall_timeout: float = 60.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_connections: int = 1024
    tls_cert: str | None = None
    tls_key: str | None = None


@frozen
class ServerConfig:
    """A whole launch, as the command line and the configuration file together say it."""

    models: tuple[ModelConfig, ...]
    """The blocks that load, in priority order: the primary first."""
    listener: ListenerConfig = field(factory=ListenerConfig)
    load_balancing: bool = False
    unused: tuple[str, ...] = ()
    """Names of configured blocks that do not load (balancing off)."""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
