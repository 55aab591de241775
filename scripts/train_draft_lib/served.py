"""What llama.cpp itself makes of a draft, in a process without torch: the check of an export.

``python -m train_draft_lib.served TARGET DRAFT TEXTS.npz OUT.npz`` with a Python that has
llama-cpp-python. ``TEXTS.npz`` holds int32 rows ``text0``, ``text1``...; for each ``OUT.npz`` holds
``inputs`` (what llama.cpp reads at the draft's target layers), ``choices`` (the target's greedy
choice after each token), ``anchors`` and, for each anchor, ``proposals`` of a whole block.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

# llama_cpp before numpy: on some GPU machines the other order crashes both.
import llama_cpp.llama_cpp as llama
import numpy as np

POINTER, INT = ctypes.c_void_p, ctypes.c_int32


class Embd(ctypes.Structure):
    """llama.cpp's ``llama_embd``."""

    _fields_ = (("data", POINTER), ("rows", ctypes.c_size_t), ("width", ctypes.c_size_t))


def bound(symbol: str, result: Any, *arguments: Any) -> Any:
    found = getattr(llama._lib, symbol)
    found.restype, found.argtypes = result, arguments
    return found


SET_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
LAYER_IDS = "_Z28llama_model_target_layer_idsPK11llama_model"
LAYER_COUNT = "_Z30llama_model_target_layer_ids_nPK11llama_model"


class Pair:
    """A target and its draft, one sequence each, on the CPU."""

    def __init__(self, target: Path, draft: Path, length: int) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self.models = [
            llama.llama_model_load_from_file(str(p).encode(), params) for p in (target, draft)
        ]
        if not all(self.models):
            raise SystemExit("served: llama.cpp loads one of the two files not at all")
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = length + 32
        settings.n_outputs_max = length + 32
        self.target = llama.llama_init_from_model(self.models[0], settings)
        settings.ctx_other = self.target
        self.draft = llama.llama_init_from_model(self.models[1], settings)
        llama.llama_set_causal_attn(self.draft, False)
        model = self.models[1]
        count = bound(LAYER_COUNT, ctypes.c_uint32, POINTER)(model)
        ids = bound(LAYER_IDS, ctypes.POINTER(INT), POINTER)(model)
        self.layers = [ids[i] for i in range(count)]
        switch = bound(SET_INPUT, None, POINTER, ctypes.c_uint32, ctypes.c_bool)
        for layer in self.layers:
            switch(self.target, layer, True)
        self.width = llama.llama_model_n_embd(self.models[0])
        vocabulary = llama.llama_model_get_vocab(self.models[0])
        self.vocabulary_size = llama.llama_vocab_n_tokens(vocabulary)
        self.mask = llama.llama_vocab_mask(llama.llama_model_get_vocab(model))
        buffer = ctypes.create_string_buffer(32)
        llama.llama_model_meta_val_str(model, b"dflash.block_size", buffer, 32)
        self.block = int(buffer.value)
        self.extended = bound("llama_batch_ext_init", POINTER, POINTER)(self.draft)

    def read(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The target's layer inputs [N, layers * width] and its greedy choices [N]."""
        llama.llama_memory_clear(llama.llama_get_memory(self.target), True)
        logits = self._decode(self.target, list(tokens), 0)
        get = bound(GET_INPUT, ctypes.POINTER(ctypes.c_float), POINTER, ctypes.c_uint32)
        shape = (len(tokens), self.width)
        rows = [np.ctypeslib.as_array(get(self.target, i), shape).copy() for i in self.layers]
        return np.concatenate(rows, 1), logits.argmax(1).astype(np.int32)

    def inject(self, rows: np.ndarray, first: int) -> None:
        clear = bound("llama_batch_ext_clear", None, POINTER)
        add = bound("llama_batch_ext_add_embd", INT, POINTER, INT, Embd)
        place = bound("llama_batch_ext_set_pos", ctypes.c_bool, POINTER, INT, ctypes.POINTER(INT))
        process = bound("llama_process", INT, POINTER, INT, POINTER)
        clear(self.extended)
        rows = np.ascontiguousarray(rows, np.float32)
        for offset, row in enumerate(rows):
            index = add(self.extended, 0, Embd(row.ctypes.data, 1, len(row)))
            at = first + offset
            place(self.extended, index, (INT * 4)(at, at, at, 0))
        if process(self.draft, 1, self.extended):
            raise SystemExit("served: llama.cpp took no features")

    def forget(self, position: int) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.draft), 0, position, -1)

    def propose(self, token: int, position: int, block: int) -> np.ndarray:
        logits = self._decode(self.draft, [token] + [self.mask] * (block - 1), position)
        self.forget(position)
        return logits[1:].argmax(1).astype(np.int32)

    def _decode(self, context: Any, tokens: list[int], position: int) -> np.ndarray:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = int(token)
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        failed = llama.llama_decode(context, batch)
        llama.llama_batch_free(batch)
        if failed:
            raise SystemExit("served: llama.cpp decodes the batch not at all")
        llama.llama_synchronize(context)
        shape = (len(tokens), self.vocabulary_size)
        return np.ctypeslib.as_array(llama.llama_get_logits(context), shape).copy()


def main(argv: list[str]) -> int:
    target, draft, texts, out = map(Path, argv)
    found = np.load(texts)
    rows = [found[name] for name in sorted(found.files)]
    pair = Pair(target, draft, max(map(len, rows)))
    answers: dict[str, np.ndarray] = {}
    for name, tokens in zip(sorted(found.files), rows, strict=True):
        inputs, choices = pair.read(tokens)
        anchors = np.arange(1, len(tokens), 3, dtype=np.int32)
        pair.forget(0)
        proposals, done = [], 0
        for anchor in anchors:
            pair.inject(inputs[done:anchor], done)
            done = int(anchor)
            proposals.append(pair.propose(int(tokens[anchor]), done, pair.block))
        answers |= {
            f"{name}.inputs": inputs,
            f"{name}.choices": choices,
            f"{name}.anchors": anchors,
            f"{name}.proposals": np.stack(proposals),
        }
    np.savez(out, **answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
