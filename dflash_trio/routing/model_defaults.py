"""What holds for a model where a request says nothing, and who said so.

Four voices, the first that speaks decides: the operator's flag, the model's card, what is known of
its family, and what is built in.

No budget reaches beyond what it is taken from. How much room a model has is known only once it is
loaded, and a card is written for a model, not for one machine, so a number that is too large is cut
instead of refused, and keeps its source: the reply limit and the reply budget are cut to the room,
the ceiling on thinking too, and every tier of effort to that ceiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import attrs
from attrs import field, frozen

from ..config import Effort, ModelCard, ModelConfig, SamplingDefaults, Thinking
from ..generation.status import Default, Source

DEFAULT_MAX_TOKENS = 16000
"""For requests that name no limit, on models whose room is larger."""

REPLY_BUDGET = 4096
"""Kept for the reply, on models whose context is at least twice as long."""

_SHARES: Mapping[Effort, tuple[int, int]] = {
    "low": (1, 8),
    "medium": (1, 2),
    "high": (1, 1),
    "x-high": (1, 1),
    "max": (1, 1),
}
"""Of the most tokens that a reply may think."""

SAMPLING_NAMES: tuple[str, ...] = tuple(each.name for each in attrs.fields(SamplingDefaults))

T = TypeVar("T")


@frozen
class ModelDefaults:
    """One loaded model's defaults, with nothing left open."""

    sampling: SamplingDefaults
    default_max_tokens: int
    """For requests that name no limit."""
    hard_limit_reply_budget: int
    """Tokens kept for the reply."""
    think_max_tokens: int
    """The most tokens that one reply may think."""
    efforts: Mapping[Effort, int] = field(hash=False)
    """Thinking tokens of every tier."""
    thinking: Thinking
    """``auto``: what the template does when told nothing."""
    tool_parser: str | None
    """A name of ``text.tool_calls``; ``None``: the template tells."""
    sources: Mapping[str, Source] = field(hash=False)
    """Of each value, named as in ``ModelConfig.given``: ``default_max_tokens``,
    ``sampling.top_k``, ``reasoning_efforts.low``."""

    def of_sampling(self) -> dict[str, Default]:
        """The sampling values for the status pages."""
        return {
            name: Default(getattr(self.sampling, name), self.sources[f"sampling.{name}"])
            for name in SAMPLING_NAMES
        }

    def of_limits(self) -> dict[str, Default]:
        """Everything else for the status pages."""
        return {
            name: Default(getattr(self, name), self.sources[name])
            for name in (
                "default_max_tokens",
                "hard_limit_reply_budget",
                "think_max_tokens",
                "thinking",
                "tool_parser",
            )
        } | {
            f"reasoning_effort_{effort.replace('-', '_')}": Default(
                tokens, self.sources[f"reasoning_efforts.{effort}"]
            )
            for effort, tokens in self.efforts.items()
        }


def resolve_defaults(
    config: ModelConfig, *, room: int, max_ctx: int, family: ModelCard | None = None
) -> ModelDefaults:
    """Decide every default of a model.

    ``room``: what one sequence may hold in all, prompt and reply; ``max_ctx``: its context.
    ``family``: what is known of models of this kind, in the shape of a card.
    """
    voices = _Voices(config, family)

    def tokens(name: str, built_in: int, most: int) -> int:
        return min(voices.decide(name, built_in), most)

    reply_limit = tokens("default_max_tokens", DEFAULT_MAX_TOKENS, room)
    reply_budget = tokens("hard_limit_reply_budget", min(REPLY_BUDGET, max_ctx // 2), room)
    # Half of a short reply at most is kept from the thinking, as in each single request.
    kept = min(reply_budget, reply_limit // 2)
    think_max = tokens("think_max_tokens", reply_limit - kept, room)
    efforts = {
        effort: tokens(f"reasoning_efforts.{effort}", think_max * share // whole, think_max)
        for effort, (share, whole) in _SHARES.items()
    }
    built_in = SamplingDefaults()
    sampling = {
        name: voices.decide(f"sampling.{name}", getattr(built_in, name)) for name in SAMPLING_NAMES
    }
    thinking: Thinking = voices.decide("thinking", "auto")
    tool_parser: str | None = voices.decide("tool_parser", None)
    return ModelDefaults(
        sampling=SamplingDefaults(**sampling),
        default_max_tokens=reply_limit,
        hard_limit_reply_budget=reply_budget,
        think_max_tokens=think_max,
        efforts=efforts,
        thinking=thinking,
        tool_parser=tool_parser,
        sources=voices.sources,
    )


class _Voices:
    """Who may speak, in order, and who did."""

    def __init__(self, config: ModelConfig, family: ModelCard | None) -> None:
        self.sources: dict[str, Source] = {}
        self._ranked: list[tuple[Source, ModelConfig | ModelCard]] = [("flag", config)]
        if config.card is not None:
            self._ranked.append(("card", config.card))
        if family is not None:
            self._ranked.append(("family", family))

    def decide(self, name: str, built_in: T) -> T:
        for source, voice in self._ranked:
            if _says(voice, name):
                self.sources[name] = source
                return cast("T", _value(voice, name))
        self.sources[name] = "built-in"
        return built_in


_SILENT = (ModelConfig("", "", 0), ModelCard(""))


def _says(voice: ModelConfig | ModelCard, name: str) -> bool:
    # A configuration that was put together in code names nothing as given, but whoever set a value
    # meant it.
    silent = next(each for each in _SILENT if type(each) is type(voice))
    return name in voice.given or _value(voice, name) != _value(silent, name)


def _value(voice: ModelConfig | ModelCard, name: str) -> object:
    group, _, key = name.rpartition(".")
    if group == "reasoning_efforts":
        return voice.reasoning_efforts.get(cast("Effort", key))
    return cast("object", getattr(voice.sampling if group == "sampling" else voice, key))
