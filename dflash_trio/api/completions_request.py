"""The body of POST /v1/completions, checked field by field, as one GenerationRequest.

No template, no roles, no tools and no thinking: the prompt is what the model reads.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen

from ..generation.errors import InvalidRequest
from ..generation.request import GenerationRequest
from .chat_request import MAX_ANSWERS, StreamOptions
from .completions import CompletionEncoder
from .field_schemas import INTEGER, STRING, any_of, array_of, describe
from .generating import AnswerContext
from .json_body import json_type_name, parse_json_object
from .output_fields import OutputFields
from .validation import FieldProblem, converter, in_range, structure

MAX_LOGPROBS = 5
MAX_TOKEN = 2**31 - 1


@frozen
class Prompt:
    """``prompt``: text, or token ids of the answering model."""

    value: str | tuple[int, ...]


def _structure_prompt(value: Any, _: Any) -> Prompt:
    if isinstance(value, str):
        return Prompt(value)
    if not isinstance(value, list):
        raise FieldProblem(
            f"must be a string or an array of token ids, not {json_type_name(value)}"
        )
    if not value:
        raise FieldProblem("must not be empty")
    if not isinstance(value[0], str | list):
        return Prompt(_token_ids(value, ""))
    if len(value) > 1:
        raise FieldProblem(f"holds {len(value)} prompts; one is the limit, send them one by one")
    if isinstance(value[0], str):
        return Prompt(value[0])
    if not value[0]:
        raise FieldProblem("must not be empty", "[0]")
    return Prompt(_token_ids(value[0], "[0]"))


def _token_ids(value: list[Any], where: str) -> tuple[int, ...]:
    # By hand: one exception group for each of a million tokens would be slow.
    for index, token in enumerate(value):
        if type(token) is not int:
            raise FieldProblem(
                f"must be a token id, not {json_type_name(token)}", f"{where}[{index}]"
            )
        if not 0 <= token <= MAX_TOKEN:
            raise FieldProblem(f"must be from 0 to {MAX_TOKEN}", f"{where}[{index}]")
    return tuple(value)


converter.register_structure_hook(Prompt, _structure_prompt)
_TOKENS = array_of({**INTEGER, "minimum": 0, "maximum": MAX_TOKEN}, minItems=1)
describe(
    Prompt,
    any_of(
        STRING,
        _TOKENS,
        array_of(STRING, minItems=1, maxItems=1),
        array_of(_TOKENS, minItems=1, maxItems=1),
    ),
)


@frozen(kw_only=True)
class CompletionRequest(OutputFields):
    """The fields of a completion that mean something here; others are ignored."""

    prompt: Prompt
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = field(default=None, validator=in_range(1))
    n: int | None = field(default=None, validator=in_range(1, MAX_ANSWERS))
    best_of: int | None = field(default=None, validator=in_range(1, MAX_ANSWERS))
    echo: bool | None = None
    suffix: str | None = field(default=None)
    logprobs: int | None = field(default=None, validator=in_range(0, MAX_LOGPROBS))

    @suffix.validator
    def _no_filling_in(self, _: Any, value: str | None) -> None:
        if value:
            raise FieldProblem("filling in the middle is not available", "suffix")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def echoed(self) -> str:
        """What the answer begins with. Raises InvalidRequest where it cannot."""
        if not self.echo:
            return ""
        if self.logprobs is not None:
            raise InvalidRequest(
                "echo: is not possible with logprobs, which the prompt has none of.", param="echo"
            )
        if not isinstance(self.prompt.value, str):
            raise InvalidRequest("echo: is only possible with a prompt of text.", param="echo")
        return self.prompt.value

    def as_request(self, body_bytes: int) -> GenerationRequest:
        """What to generate. Raises InvalidRequest for fields that contradict each other."""
        n = self.n or 1
        if self.best_of not in (None, n):
            raise InvalidRequest(
                f"best_of: must be equal to n ({n}); answers are not made to be thrown away.",
                param="best_of",
            )
        return GenerationRequest(
            messages=(),
            raw_prompt=self.prompt.value,
            body_bytes=body_bytes,
            sampling=self.as_overrides(),
            max_tokens=self.max_tokens,
            stop=self.stop.strings,
            n=n,
            ignore_eos=self.ignore_eos is True,
            constraint=self.as_constraint(),
            logprobs=self.logprobs,
            cache_prompt=self.cache_prompt is not False,
        )


@frozen
class CompletionCall:
    """A parsed call: what to generate, and how the client wants to be told."""

    request: GenerationRequest
    stream: bool
    include_usage: bool
    echoed: str
    model: str | None = None
    """What the body calls the model; it selects nothing."""

    def new_encoder(self, context: AnswerContext) -> CompletionEncoder:
        return CompletionEncoder(context, include_usage=self.include_usage, echoed=self.echoed)


def parse_completion_call(raw: bytes) -> CompletionCall:
    """Read and check a body. Raises InvalidRequest. CPU-bound, linear in the body."""
    completion = structure(CompletionRequest, parse_json_object(raw))
    return CompletionCall(
        completion.as_request(len(raw)),
        stream=completion.stream is True,
        include_usage=completion.includes_usage,
        echoed=completion.echoed,
        model=completion.model,
    )


def known_fields() -> frozenset[str]:
    """Every field that this route reads. The others are ignored."""
    return frozenset(a.name for a in attrs.fields(CompletionRequest))
