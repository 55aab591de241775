"""What a model's header says of the memory that the model takes, layer by layer. Pure.

The keys and the tensors' names are GGUF's; what each means for memory is llama.cpp's doing and is
noted where it is used. Where an architecture has a cache that nothing here knows, the plain
formula stands in for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import evolve, frozen

Fact = int | float | str | tuple[int | float, ...]
Facts = Mapping[str, Fact]
"""Values of the header by their keys, those of the architecture without its name before them."""
Tensor = tuple[str, int]
"""A tensor's name and its bytes."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""A regular expression for the weights of experts, llama.cpp's own for ``--cpu-moe``."""
_EXPERT = re.compile(EXPERT_TENSORS)
_INPUT = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_RECURRENT = ("ssm_", "shortconv", "time_mix_")

# Of the models whose sliding window has no pattern in the header: every how many layers one has
# full attention, whether it comes first, and the window where that is not in the header either.
_WINDOW_PATTERNS: Mapping[str, tuple[int, bool, int]] = {
    "afmoe": (4, False, 0),
    "cohere2": (4, False, 0),
    "exaone-moe": (4, False, 128),
    "gemma2": (2, False, 4096),
    "gemma3": (6, False, 0),
    "gemma3n": (5, False, 0),
    "gpt-oss": (2, False, 0),
    "llama4": (4, False, 8192),
    "olmo2": (4, False, 0),
    "plamo3": (8, False, 0),
    "smallthinker": (4, True, 0),
}
_DEEPSEEK4 = "deepseek4"
_MOST_LAYERS = 4096  # a damaged header may say anything


@frozen
class LayerShape:
    """One layer's memory. Bytes of weights, values of cache a cell."""

    weights: int = 0
    experts: int = 0
    """Of those, the bytes of experts."""
    largest: int = 0
    """Bytes of its largest tensor."""
    k: int = 0
    v: int = 0
    windowed: bool = False
    """The cache remembers the window only."""
    compressed: tuple[tuple[int, int], ...] = ()
    """DeepSeek V4: further K values, each with the number of cells that share one of its cells."""
    state: int = 0
    """Bytes of recurrent state, for each sequence."""


@frozen
class ModelShape:
    """A model as the plan sees it."""

    architecture: str
    layers: tuple[LayerShape, ...]
    input_bytes: int
    """Embeddings, which stay on the CPU."""
    output_bytes: int
    """The output layer; the embeddings again where the two are one tensor."""
    tied_bytes: int
    """Of those, the embeddings'."""
    trained_ctx: int
    window: int
    heads: int
    vocabulary: int
    activations: int
    """Values of a token that computing holds at a time."""
    experts: int
    """Of a mixture; 0 of a dense model."""
    experts_used: int | None
    """For each token; ``None`` where layers differ or the header does not say."""
    hash_layers: int
    """DeepSeek V4: layers whose experts are looked up by the token."""

    @property
    def always_streams(self) -> bool:
        """The cache is partitioned by sequence whatever the context says."""
        return self.architecture == _DEEPSEEK4


def model_shape(architecture: str, facts: Facts, tensors: Sequence[Tensor]) -> ModelShape:
    """Read the shape out of a header. What it lacks counts as nothing."""
    names: dict[int, list[Tensor]] = {}
    others: list[Tensor] = []
    for name, size in tensors:
        match = _LAYER.match(name)
        if match is None:
            others.append((name, size))
        else:
            names.setdefault(int(match[1]), []).append((match[2], size))
    every = min(_whole(facts, "block_count") or 1 + max(names, default=-1), _MOST_LAYERS)
    # Heads that predict further tokens are not loaded.
    count = every - min(_whole(facts, "nextn_predict_layers"), every)
    window, is_windowed = _window(architecture, facts)
    layer = partial(_layer, architecture, facts, count, is_windowed)
    inputs = sum(size for name, size in others if name.startswith(_INPUT))
    output = sum(size for name, size in others if not name.startswith(_INPUT))
    tied = 0
    if not any(name == "output.weight" for name, _ in others):
        # One tensor for both: llama.cpp loads it a second time where the output is computed.
        tied = sum(size for name, size in others if name == "token_embd.weight")
    used = facts.get("expert_used_count")
    return ModelShape(
        architecture=architecture,
        layers=tuple(layer(number, names.get(number, [])) for number in range(every)),
        input_bytes=inputs,
        output_bytes=output + tied,
        tied_bytes=tied,
        trained_ctx=_whole(facts, "context_length"),
        window=window,
        heads=_largest(facts, "attention.head_count"),
        vocabulary=_whole(facts, "vocab_size") or _whole(facts, "tokenizer.ggml.tokens"),
        activations=_activations(facts),
        experts=_whole(facts, "expert_count") if _has_experts(names) else 0,
        experts_used=used if isinstance(used, int) else None,
        hash_layers=_whole(facts, "hash_layer_count"),
    )


def _has_experts(layers: Mapping[int, Sequence[Tensor]]) -> bool:
    return any(_EXPERT.search(f".{name}") for tensors in layers.values() for name, _ in tensors)


def _layer(
    architecture: str,
    facts: Facts,
    count: int,
    is_windowed: Callable[[int], bool],
    number: int,
    tensors: Sequence[Tensor],
) -> LayerShape:
    if number >= count:
        return LayerShape()
    windowed = is_windowed(number)
    stems = [name for name, _ in tensors]
    recurrent = any(name.startswith(_RECURRENT) for name in stems)
    attends = not recurrent or any(name.startswith(("attn_k.", "attn_kv")) for name in stems)
    # Gemma's last layers look into the caches of earlier ones.
    owns_cache = attends and number < count - _whole(facts, "attention.shared_kv_layers")
    k, v = _cache_values(facts, number, windowed) if owns_cache else (0, 0)
    compressed: tuple[tuple[int, int], ...] = ()
    indexer = _whole(facts, "attention.indexer.key_length")
    if architecture == _DEEPSEEK4:
        ratio = _of_layer(facts, "attention.compress_ratios", number)
        state = 0
        if ratio:
            # Its own keys beside the raw ones and, where four cells share one, an index of them;
            # and what it has not compressed yet, as keys and scores in 32 bits.
            overlap = 2 if ratio == 4 else 1
            rows = [k] + ([indexer] if ratio == 4 else [])
            compressed = tuple((row, ratio) for row in rows)
            state = sum(2 * 4 * overlap * row * overlap * ratio for row in rows)
        return _weighed(tensors, LayerShape(k=k, windowed=True, compressed=compressed, state=state))
    if any(name.startswith("indexer") for name in stems):
        k += indexer
    state = _recurrent_state(facts) if recurrent else 0
    return _weighed(tensors, LayerShape(k=k, v=v, windowed=windowed, state=state))


def _weighed(tensors: Sequence[Tensor], shape: LayerShape) -> LayerShape:
    return evolve(
        shape,
        weights=sum(size for _, size in tensors),
        largest=max((size for _, size in tensors), default=0),
        experts=sum(size for name, size in tensors if _EXPERT.search(f".{name}")),
    )


def _cache_values(facts: Facts, number: int, windowed: bool) -> tuple[int, int]:
    """Values of K and of V for one cell of a layer."""
    heads = _of_layer(facts, "attention.head_count", number)
    heads_kv = _of_layer(facts, "attention.head_count_kv", number, heads)
    head = _whole(facts, "embedding_length") // heads if heads else 0
    k = _whole(facts, "attention.key_length") or head
    v = _whole(facts, "attention.value_length") or head
    if windowed:
        k = _whole(facts, "attention.key_length_swa") or k
        v = _whole(facts, "attention.value_length_swa") or v
    if _whole(facts, "attention.key_length_mla") and _whole(facts, "attention.value_length_mla"):
        v = 0  # latent attention: the values are made of the keys
    return k * heads_kv, v * heads_kv


def _window(architecture: str, facts: Facts) -> tuple[int, Callable[[int], bool]]:
    """The sliding window, and which layers have it."""
    period, dense_first, window = _WINDOW_PATTERNS.get(architecture, (0, False, 0))
    window = _whole(facts, "attention.sliding_window", window)
    pattern = facts.get("attention.sliding_window_pattern")
    if not window:
        return 0, lambda number: False
    if isinstance(pattern, tuple):
        flags = pattern
        return window, lambda number: number < len(flags) and bool(flags[number])
    if isinstance(pattern, int):
        period = pattern
    if not period:  # unknown: as if every layer remembered everything
        return window, lambda number: False
    if dense_first:
        return window, lambda number: number % period != 0
    return window, lambda number: number % period < period - 1


def _recurrent_state(facts: Facts) -> int:
    """Bytes for a sequence in one layer of the Mamba kind: the convolution's and the state's."""
    inner, size = _whole(facts, "ssm.inner_size"), _whole(facts, "ssm.state_size")
    kernel, groups = _whole(facts, "ssm.conv_kernel"), _whole(facts, "ssm.group_count")
    return 4 * (max(0, kernel - 1) * (inner + 2 * groups * size) + inner * size)


def _activations(facts: Facts) -> int:
    """Values that a token needs while its layer is computed.

    Twice the feed-forward width (gate and up) and eight times the embedding's cover what
    llama.cpp reserves; a DeepSeek V4 carries several residual streams.
    """
    wide = _largest(facts, "feed_forward_length")
    expert = _largest(facts, "expert_feed_forward_length")
    if expert:
        used = _largest(facts, "expert_used_count") + _largest(facts, "expert_shared_count")
        wide = max(wide, used * expert)
    streams = max(1, _whole(facts, "hyper_connection.count"))
    return 2 * wide + 8 * streams * _whole(facts, "embedding_length")


def _whole(facts: Facts, key: str, default: int = 0) -> int:
    value = facts.get(key)
    return value if isinstance(value, int) and value >= 0 else default


def _of_layer(facts: Facts, key: str, number: int, default: int = 0) -> int:
    """A value that may be one for all layers or one for each."""
    value = facts.get(key)
    if not isinstance(value, tuple):
        return _whole(facts, key, default)
    own = value[number] if number < len(value) else default
    return own if isinstance(own, int) and own >= 0 else default


def _largest(facts: Facts, key: str) -> int:
    value = facts.get(key)
    if isinstance(value, tuple):
        return max((each for each in value if isinstance(each, int) and each > 0), default=0)
    return _whole(facts, key)
