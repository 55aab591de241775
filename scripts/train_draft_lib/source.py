"""What is read from the target's GGUF: sizes, weights, vocabulary and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTROL = 3  # token type of llama.cpp's vocabularies


class UnfitTarget(Exception):
    """The file is no target that this script can train for; the text says why."""


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    context: int
    rope_base: float
    epsilon: float


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]
    merges: list[str]
    model: str
    pre: str
    ids: Mapping[str, int]
    """Special tokens by their name in the file: ``bos``, ``eos``, ``unknown``, ``padding``."""
    template: str
    add_bos: bool

    @property
    def ends(self) -> frozenset[int]:
        """What ends an answer."""
        names = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<|end_of_text|>")
        known = {i for i, t in enumerate(self.tokens) if self.types[i] == CONTROL and t in names}
        return frozenset(known | {self.ids[n] for n in ("eos", "eot") if n in self.ids})

    def mask_token(self) -> int:
        """A control token that no text holds: the last one that has no other part to play."""
        used = self.ends | set(self.ids.values())
        spare = [
            index
            for index, kind in enumerate(self.types)
            if kind == CONTROL and index not in used and "im_start" not in self.tokens[index]
        ]
        if not spare:
            raise UnfitTarget("its vocabulary has no spare control token: name one by --mask-token")
        return spare[min(3, len(spare) - 1)]


class Source:
    """The open file. Weights are made anew on every call of :meth:`weights`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = gguf.GGUFReader(path)
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise UnfitTarget(f"its architecture is {architecture}, and this script knows llama")
        heads = int(self.value("llama.attention.head_count"))
        width = int(self.value("llama.embedding_length"))
        head_size = int(self.value("llama.rope.dimension_count", width // heads))
        if int(self.value("llama.attention.key_length", head_size)) != head_size:
            raise UnfitTarget("it ropes a part of each head only")
        if int(self.value("llama.expert_count", 0)):
            raise UnfitTarget("it is a mixture of experts")
        self.sizes = Sizes(
            layers=int(self.value("llama.block_count")),
            width=width,
            heads=heads,
            kv_heads=int(self.value("llama.attention.head_count_kv", heads)),
            head_size=head_size,
            feed_forward=int(self.value("llama.feed_forward_length")),
            context=int(self.value("llama.context_length")),
            rope_base=float(self.value("llama.rope.freq_base", 10000.0)),
            epsilon=float(self.value("llama.attention.layer_norm_rms_epsilon")),
        )

    def value(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            if default is None:
                raise UnfitTarget(f"it has no {key}")
            return default
        return field.contents()

    def vocabulary(self) -> Vocabulary:
        names = ("bos", "eos", "eot", "unknown", "padding")
        ids = {n: self.value(f"tokenizer.ggml.{n}_token_id", -1) for n in names}
        model = self.value("tokenizer.ggml.model")
        return Vocabulary(
            tokens=self.value("tokenizer.ggml.tokens"),
            types=self.value("tokenizer.ggml.token_type"),
            merges=self.value("tokenizer.ggml.merges", []) if model == "gpt2" else [],
            model=model,
            pre=self.value("tokenizer.ggml.pre", "default"),
            ids={name: int(value) for name, value in ids.items() if value >= 0},
            template=self.value("tokenizer.chat_template"),
            add_bos=bool(self.value("tokenizer.ggml.add_bos_token", model != "gpt2")),
        )

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor, dequantized, rows as outputs; q and k in NeoX order (halves, not pairs)."""
        found = {}
        for tensor in self.reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                values = self._halves(values)
            found[tensor.name] = values
        if "output.weight" not in found:
            found["output.weight"] = found["token_embd.weight"]
        return found

    def _halves(self, rows: np.ndarray) -> np.ndarray:
        """From llama.cpp's order for this architecture, where a rotated pair lies side by side."""
        size = self.sizes.head_size
        pairs = rows.reshape(-1, size // 2, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
