"""Options that only some architectures know, judged by the model's header. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import ModelConfig
from .model_shape import ModelShape

DEEPSEEK4 = "deepseek4"


def refused_option(model: ModelConfig, shape: ModelShape) -> str | None:
    """What is wrong with an option for this model, with what to do; ``None`` if nothing is."""
    return next(_refusals(model, shape), None)


def header_overrides(model: ModelConfig) -> dict[str, int]:
    """What takes the place of the header's own numbers when the model loads."""
    if model.ds4_expert_top_k is None:
        return {}
    return {f"{DEEPSEEK4}.expert_used_count": model.ds4_expert_top_k}


def _refusals(model: ModelConfig, shape: ModelShape) -> Iterator[str]:
    if model.cpu_moe and not shape.experts:
        yield (
            f"--cpu-moe keeps experts on the CPU, and {model.path} ({shape.architecture}) has "
            "none: leave it out, or keep whole layers there with --gpu-layers"
        )
    for flag, given in (
        ("--ds4-fused-decode", model.ds4_fused_decode),
        ("--ds4-expert-top-k", model.ds4_expert_top_k is not None),
        ("--ds4-prefill", model.ds4_prefill is not None),
    ):
        if given and shape.architecture != DEEPSEEK4:
            yield (
                f"{flag} is for the architecture {DEEPSEEK4}, and {model.path} is of "
                f"{shape.architecture}: leave it out"
            )
    if model.ds4_expert_top_k is not None:
        yield from _expert_refusals(model, shape, model.ds4_expert_top_k)


def _expert_refusals(model: ModelConfig, shape: ModelShape, wanted: int) -> Iterator[str]:
    flag, used = f"--ds4-expert-top-k {wanted}", shape.experts_used
    if used is None:
        # llama.cpp lets a number be put in the place of a number only.
        yield f"{flag} cannot replace what {model.path} says for each layer: leave it out"
    elif wanted > shape.experts:
        yield f"{flag} is more than the {shape.experts} experts of {model.path}: lower it"
    elif wanted != used and shape.hash_layers:
        # The table that names the experts of a token has exactly as many columns.
        yield (
            f"{flag} does not go with {model.path}, whose first {shape.hash_layers} layers look "
            f"up {used} experts for each token: give {used} or leave it out"
        )
