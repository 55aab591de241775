"""The tokens that a GGUF file lists, read without loading it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from attrs import field, frozen

from .llama_abi import GgufInitParams, bind_quick, silence_llama_log

_STRING, _ARRAY, _UINT32, _INT32 = 8, 9, 4, 5  # of enum gguf_type


@frozen
class FileTokens:
    """A file's vocabulary. Empty where it lists none."""

    kind: str | None
    """How text is cut into tokens, as the header calls it."""
    texts: tuple[bytes, ...] = field(repr=False)
    types: tuple[int, ...] = field(repr=False)
    """llama.cpp's kinds of tokens; empty where the file does not say."""
    mask: int | None
    """What stands for a token to be guessed."""


def read_file_tokens(path: str) -> FileTokens | None:
    """``None``: it is no GGUF. Takes about a microsecond a token."""
    silence_llama_log()
    pointer, text, index = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    init = bind_quick("gguf_init_from_file", pointer, text, GgufInitParams)
    free = bind_quick("gguf_free", None, pointer)
    find = bind_quick("gguf_find_key", index, pointer, text)
    type_of = bind_quick("gguf_get_kv_type", ctypes.c_int, pointer, index)
    element_type_of = bind_quick("gguf_get_arr_type", ctypes.c_int, pointer, index)
    length_of = bind_quick("gguf_get_arr_n", ctypes.c_size_t, pointer, index)
    elements_of = bind_quick("gguf_get_arr_data", pointer, pointer, index)
    element_of = bind_quick("gguf_get_arr_str", text, pointer, index, ctypes.c_size_t)
    text_of = bind_quick("gguf_get_val_str", text, pointer, index)
    number_of = bind_quick("gguf_get_val_u32", ctypes.c_uint32, pointer, index)

    file = init(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    if not file:
        return None
    try:

        def key(name: str, kind: int, elements: int | None = None) -> int | None:
            found = int(find(file, f"tokenizer.ggml.{name}".encode()))
            if found < 0 or type_of(file, found) != kind:
                return None
            if elements is not None and element_type_of(file, found) != elements:
                return None
            return found

        texts: tuple[bytes, ...] = ()
        types: tuple[int, ...] = ()
        kind: str | None = None
        mask: int | None = None
        if (at := key("tokens", _ARRAY, _STRING)) is not None:
            texts = tuple(element_of(file, at, i) for i in range(length_of(file, at)))
        if (at := key("token_type", _ARRAY, _INT32)) is not None:
            numbers: Any = ctypes.c_int32 * int(length_of(file, at))
            types = tuple(numbers.from_address(elements_of(file, at)) if len(texts) else ())
        if (at := key("model", _STRING)) is not None:
            kind = text_of(file, at).decode("utf-8", "replace")
        if (at := key("mask_token_id", _UINT32)) is not None:
            mask = int(number_of(file, at))
        return FileTokens(kind, texts, types, mask)
    finally:
        free(file)
