"""What a client asked for, in no API's dialect, and what one model makes of it.

A dialect parser produces one :class:`GenerationRequest`; each model that is tried turns it into
its own :class:`PreparedPrompt`, because templates, tokenizers and defaults differ per model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import field, frozen

from ..config import Effort, SamplingDefaults
from .channels import ChannelSplitter
from .constraint import TokenConstraint

Message = Mapping[str, Any]
"""One turn in the shape chat templates expect: at least ``role`` and ``content``."""

MAX_SEED = 2**64 - 1


@frozen
class SamplingOverrides:
    """Sampling fields of one request; ``None`` takes the answering model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    """0 .. 2**64-1, or -1 for a fresh random one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias added to its logit), ids in the answering model's vocabulary."""


@frozen
class SamplingParams:
    """Everything a sampler needs, with no default left open.

    ``temperature`` 0 is greedy: the filters are then skipped, penalties and biases are not.
    ``penalty_last_n`` counts tokens of the prompt and the answer looked back at; -1 is all.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    """``None``: the sampler draws its own from the operating system."""
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def resolve_sampling(overrides: SamplingOverrides, defaults: SamplingDefaults) -> SamplingParams:
    """Fill a request's open sampling fields with the answering model's defaults."""

    def pick(given: Any, default: Any) -> Any:
        return default if given is None else given

    seed = pick(overrides.seed, defaults.seed)
    return SamplingParams(
        temperature=pick(overrides.temperature, defaults.temperature),
        top_p=pick(overrides.top_p, defaults.top_p),
        top_k=pick(overrides.top_k, defaults.top_k),
        min_p=pick(overrides.min_p, defaults.min_p),
        repeat_penalty=pick(overrides.repeat_penalty, defaults.repeat_penalty),
        presence_penalty=pick(overrides.presence_penalty, 0.0),
        frequency_penalty=pick(overrides.frequency_penalty, 0.0),
        penalty_last_n=pick(overrides.repeat_last_n, 64),
        seed=None if seed is None or seed < 0 else seed,
        logit_bias=overrides.logit_bias,
    )


@frozen
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """A JSON Schema of its arguments, an object's; ``None``: not described."""
    strict: bool = False
    """The arguments of a call that is forced must follow the schema; others are not checked."""


@frozen
class ToolChoice:
    """Whether tools are called."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    """``required``: at least one call; ``named``: a call of ``name``; both are enforced."""
    name: str | None = None
    """One of the request's tools; only with ``named``."""
    parallel: bool = True
    """Several calls may be made in one turn."""

    @property
    def forces(self) -> bool:
        return self.mode in ("required", "named")


@frozen
class OutputConstraint:
    """What the whole answer, after any thinking, has to look like. Enforced token by token."""

    kind: Literal["json_object", "json_schema", "regex", "gbnf", "lark"]
    source: Any = None
    """The schema (a JSON value), or the text of the expression or grammar."""


@frozen
class ThinkingRequest:
    """How much a model that can think should. Models that cannot ignore it."""

    enabled: bool | None = None
    """``None``: as the answering model's operator or template decides."""
    budget_tokens: int | None = None
    effort: Effort | None = None
    """A tier of the answering model; a budget beside it wins."""


@frozen
class GenerationRequest:
    """One generation, protocol-neutral. Immutable, so several models may prepare it at once."""

    messages: tuple[Message, ...]
    """Empty with a raw prompt."""
    body_bytes: int
    """Size of the request's body: what preparing it may hold in memory."""
    sampling: SamplingOverrides = field(factory=SamplingOverrides)
    max_tokens: int | None = None
    """``None``: the answering model's default."""
    stop: tuple[str, ...] = ()
    n: int = 1
    """Alternatives wanted; each takes a slot of the same model."""
    ignore_eos: bool = False
    continue_final: bool = False
    """The last message is an assistant turn to be continued, not answered."""
    template_arguments: Mapping[str, Any] = field(factory=dict)
    """Extra variables for the chat template."""
    raw_prompt: str | tuple[int, ...] | None = None
    """Instead of messages: text, in which control tokens' literals count as such, or token ids of
    the answering model."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    constraint: OutputConstraint | None = None
    thinking: ThinkingRequest = ThinkingRequest()
    logprobs: int | None = None
    """``None``: none; else how many alternatives to report beside each token's own."""
    cache_prompt: bool = True
    """The prompt may be continued from what earlier ones left in the KV cache."""


@frozen
class ThinkingPlan:
    """How one generation's thinking is told from its answer, and when it is closed for it."""

    new_splitter: Callable[[], ChannelSplitter] = field(eq=False, repr=False)
    """For each answer one."""
    limit: int
    """Tokens of thinking after which the engine closes the block."""
    limited_by: Literal["budget", "reply_budget"]
    """What ``limit`` comes from: the request and the model's ceilings, or the room that is kept
    for the reply."""
    close_tokens: tuple[int, ...]
    """What the engine says in the model's place to close it."""
    resume_tokens: tuple[int, ...] = ()
    """What the engine says when the model has closed it by itself and the answer that follows is
    under a grammar."""


@frozen
class PreparedPrompt:
    """A request as one model reads it: made once per request and model, off the event loop."""

    tokens: tuple[int, ...] = field(repr=False)
    max_tokens: int
    """Tokens to generate at most, as asked for: the model's room may end the answer before."""
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """The request's stop strings."""
    turn_ends: tuple[str, ...] = ()
    """Strings that end a turn as an end-of-turn token would, for models that have none."""
    ignore_eos: bool = False
    n: int = 1
    """Answers to generate, from one prefill."""
    thinking: ThinkingPlan | None = None
    """``None``: all of the output is answer."""
    constraint: TokenConstraint | None = field(default=None, eq=False, repr=False)
    """Of the answer, once any thinking is over."""
    logprobs: int | None = None
    """Alternatives to report for each token; ``None``: no log probabilities at all."""
    shown_tokens: Mapping[int, bytes] = field(factory=dict, repr=False)
    """Control tokens that are part of the output's text, since its format is written in them."""
    tool_format: str | None = None
    """A name of ``text.tool_calls``: how calls in the answer are read. ``None``: it has none."""
    tools: tuple[Tool, ...] = field(default=(), repr=False)
    cache_prompt: bool = True
    """It may begin with what is kept of earlier prompts, and be kept itself."""
    parallel_calls: bool = True
    """False: the answer ends with its first call."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)
