"""A loaded model's tokens, readable from any thread until the model is freed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as llama

from ..text.guide import make_guide_tokenizer
from .model_runner import EngineError


class LlamaVocabulary:
    """Tokens of a loaded model. Thread-safe: unloading waits for readers that are inside.

    Readers do not wait for each other: llama.cpp only reads its vocabulary, and the engine's
    thread, which wants a token's bytes between two steps, must not stand behind somebody who
    tokenizes a book.
    """

    def __init__(self, model: Any) -> None:
        # Guards the two below, held for bookkeeping only.
        self._lock = threading.Condition()
        self._readers = 0
        self._vocab: Any = llama.llama_model_get_vocab(model)
        self.size: int = llama.llama_vocab_n_tokens(self._vocab)
        self.bos = self._token_or_none(llama.llama_vocab_bos(self._vocab))
        self.eos = self._token_or_none(llama.llama_vocab_eos(self._vocab))
        self.adds_bos: bool = bool(llama.llama_vocab_get_add_bos(self._vocab))
        eog: set[int] = set()
        control: dict[str, int] = {}
        for token in range(self.size):
            if llama.llama_vocab_is_eog(self._vocab, token):
                eog.add(token)
            if llama.llama_vocab_is_control(self._vocab, token):
                literal = llama.llama_vocab_get_text(self._vocab, token)
                if literal:
                    control[literal.decode("utf-8", "replace")] = token
        self.eog_tokens = frozenset(eog)
        self.control_tokens: Mapping[str, int] = control
        self._literals = {token: literal.encode() for literal, token in control.items()}
        self._pieces: list[bytes | None] = [None] * self.size
        # Held while the guide tokenizer is made, so that it is made once.
        self._guide_lock = threading.Lock()
        self._guide: Any = None

    @staticmethod
    def _token_or_none(token: int) -> int | None:
        return int(token) if token >= 0 else None

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """The native vocabulary, which stays loaded meanwhile. EngineError once it is not."""
        with self._lock:
            if self._vocab is None:
                raise EngineError("the model is no longer loaded")
            vocab = self._vocab
            self._readers += 1
        try:
            yield vocab
        finally:
            with self._lock:
                self._readers -= 1
                self._lock.notify_all()

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        raw = text.encode("utf-8")
        # A token is at least a byte, but for what a tokenizer may add.
        size = len(raw) + 8
        with self._reading() as vocab:
            while True:
                buffer = (ctypes.c_int32 * size)()
                count = llama.llama_tokenize(
                    vocab, raw, len(raw), buffer, size, False, parse_special
                )
                if count >= 0:
                    return buffer[:count]
                if -count <= size or count == -(2**31):
                    raise EngineError(f"tokenizing {len(raw)} bytes failed ({count})")
                size = -count

    def piece(self, token: int) -> bytes:
        known = self._pieces[token]
        if known is not None:
            return known
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            with self._reading() as vocab:
                count = llama.llama_token_to_piece(vocab, token, buffer, size, 0, False)
            if count >= 0:
                break
            size = -count
        piece = buffer.raw[:count]
        self._pieces[token] = piece
        return piece

    def shown_piece(self, token: int) -> bytes:
        literal = self._literals.get(token)
        return literal if literal is not None else self.piece(token)

    def guide_tokenizer(self) -> Any:
        with self._guide_lock:
            with self._reading():
                pass  # an EngineError, also when it has been made before
            if self._guide is None:
                # Token by token, each a reader of its own: unloading does not wait for all.
                pieces = list(map(self.piece, range(self.size)))
                self._guide = make_guide_tokenizer(pieces, self.control_tokens, self.eog_tokens)
            return self._guide

    def close(self) -> None:
        """After this the model may be freed: waits for readers that are inside."""
        with self._lock:
            self._vocab = None
            self._lock.wait_for(lambda: self._readers == 0)
