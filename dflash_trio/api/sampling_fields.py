"""The fields of OpenAI's APIs that say how tokens are drawn, and llama.cpp's beside them.

Chat completions, completions and Responses read the same ones: a field that works on one of them
works on all.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from ..generation.request import MAX_SEED, SamplingOverrides
from .field_schemas import NULL, any_of, array_of, describe
from .json_body import json_type_name, printable
from .validation import FieldProblem, converter, in_range

MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
"""Characters. Longer ones could hold back an answer for ever."""
MAX_BIASES = 1024


@frozen
class StopStrings:
    """``stop``: null, one string or several."""

    strings: tuple[str, ...] = ()


@frozen
class LogitBias:
    """``logit_bias``: token id to bias. -100 forbids a token, 100 forces it."""

    pairs: tuple[tuple[int, float], ...] = ()


def _structure_stop(value: Any, _: Any) -> StopStrings:
    if value is None:
        return StopStrings()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise FieldProblem(
            f"must be a string, an array of strings or null, not {json_type_name(value)}"
        )
    if len(stops) > MAX_STOPS:
        raise FieldProblem(f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        where = f"[{index}]" if stops is value else ""
        if not isinstance(stop, str):
            raise FieldProblem(f"must be a string, not {json_type_name(stop)}", where)
        if not stop:
            raise FieldProblem("must not be empty: it would match everywhere", where)
        if len(stop) > MAX_STOP_LENGTH:
            raise FieldProblem(f"is longer than {MAX_STOP_LENGTH} characters", where)
    return StopStrings(tuple(stops))


def _structure_bias(value: Any, _: Any) -> LogitBias:
    if value is None:
        return LogitBias()
    if not isinstance(value, dict):
        raise FieldProblem(f"must be an object of token ids, not {json_type_name(value)}")
    if len(value) > MAX_BIASES:
        raise FieldProblem(f"names {len(value)} tokens; at most {MAX_BIASES} are allowed")
    biases: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise FieldProblem(f"has the key {printable(key)}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FieldProblem(f"must be a number, not {json_type_name(bias)}", f".{key}")
        if not -100 <= bias <= 100:
            raise FieldProblem("must be from -100 to 100", f".{key}")
        biases.append((int(key), float(bias)))
    return LogitBias(tuple(biases))


converter.register_structure_hook(StopStrings, _structure_stop)
converter.register_structure_hook(LogitBias, _structure_bias)
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
describe(StopStrings, any_of(NULL, _STOP, array_of(_STOP, maxItems=MAX_STOPS)))
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": _BIAS,
    "maxProperties": MAX_BIASES,
}
describe(LogitBias, any_of(NULL, _BIASES))


@frozen(kw_only=True)
class SamplingFields:
    """Base of requests with these fields. ``None``: the answering model's default."""

    temperature: float | None = field(default=None, validator=in_range(0, 100))
    top_p: float | None = field(default=None, validator=in_range(0, 1))
    top_k: int | None = field(default=None, validator=in_range(0, 2**31 - 1))
    min_p: float | None = field(default=None, validator=in_range(0, 1))
    # Far below, it becomes zero in the single precision that the sampler computes in.
    repeat_penalty: float | None = field(default=None, validator=in_range(0.01, 100))
    presence_penalty: float | None = field(default=None, validator=in_range(-2, 2))
    frequency_penalty: float | None = field(default=None, validator=in_range(-2, 2))
    repeat_last_n: int | None = field(default=None, validator=in_range(-1, 2**31 - 1))
    seed: int | None = field(default=None, validator=in_range(-1, MAX_SEED))
    logit_bias: LogitBias = LogitBias()
    stop: StopStrings = StopStrings()
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None

    def as_overrides(self) -> SamplingOverrides:
        """What of it the sampler is told; the rest is the generation's."""
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            seed=self.seed,
            logit_bias=self.logit_bias.pairs,
        )
