"""Symbols of llama.cpp's libraries that llama-cpp-python ships but does not bind.

Bound by hand on the library handle that llama-cpp-python opened (a symbol of ggml is found
through it, since libllama links ggml), looked up lazily with a clear error when one is missing.
Only this module and ``llama_runner`` know that llama.cpp exists.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama
from attrs import field, frozen


class MissingSymbol(Exception):
    """The installed llama.cpp lacks a function this project needs."""


def _bind(name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = getattr(llama._lib, name)
    except AttributeError:
        raise MissingSymbol(
            f"the installed llama.cpp has no {name}: install the pinned llama-cpp-python"
        ) from None
    function.restype = result
    function.argtypes = list(arguments)
    return function


def bind_quick(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp that returns at once, called with the GIL held.

    Giving the GIL up and asking for it again costs nothing where nobody else wants it, and up to a
    switch interval where the event loop does: for a call of a microsecond, many times a step, that
    is most of its price.
    """
    library = ctypes.PyDLL(llama._lib._name, handle=llama._lib._handle)
    try:
        function = library[name]
    except AttributeError:
        raise MissingSymbol(
            f"the installed llama.cpp has no {name}: install the pinned llama-cpp-python"
        ) from None
    function.restype = result
    function.argtypes = list(arguments)
    return function


class GgufInitParams(ctypes.Structure):
    """``gguf_init_params``: how a header is read."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@frozen
class GgufSummary:
    """What a GGUF header says, read by llama.cpp's own parser."""

    architecture: str | None
    tensor_count: int
    needed_bytes: int
    """Size the file must have for its last tensor to be whole."""
    split_count: int
    """Parts of a split model; 1 for a file of its own."""
    facts: Mapping[str, int | float | str | tuple[int | float, ...]] = field(
        factory=dict, hash=False
    )
    """The architecture's numbers, without its name before their keys, and how many tokens the
    vocabulary has as ``tokenizer.ggml.tokens``."""
    tensors: tuple[tuple[str, int], ...] = ()
    """Names and bytes."""
    chat_template: str | None = field(default=None, hash=False)


def read_gguf_header(path: str) -> GgufSummary | None:
    """Parse a file's header and tensor table, reading no tensor; ``None`` when it is no GGUF."""
    silence_llama_log()  # the caller's error is the one line that people get
    pointer, size_t, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    init = _bind("gguf_init_from_file", pointer, text, GgufInitParams)
    free = _bind("gguf_free", None, pointer)
    find_key = _bind("gguf_find_key", ctypes.c_int64, pointer, text)
    key_type = _bind("gguf_get_kv_type", ctypes.c_int, pointer, ctypes.c_int64)
    get_str = _bind("gguf_get_val_str", text, pointer, ctypes.c_int64)
    get_u16 = _bind("gguf_get_val_u16", ctypes.c_uint16, pointer, ctypes.c_int64)
    count = _bind("gguf_get_n_tensors", ctypes.c_int64, pointer)
    offset = _bind("gguf_get_tensor_offset", size_t, pointer, ctypes.c_int64)
    tensor_size = _bind("gguf_get_tensor_size", size_t, pointer, ctypes.c_int64)
    tensor_name = _bind("gguf_get_tensor_name", text, pointer, ctypes.c_int64)
    data_offset = _bind("gguf_get_data_offset", size_t, pointer)

    string_type, uint16_type = 8, 2  # enum gguf_type
    context = init(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    if not context:
        return None
    try:
        architecture = None
        key = find_key(context, b"general.architecture")
        if key >= 0 and key_type(context, key) == string_type:
            architecture = get_str(context, key).decode("utf-8", "replace")
        template = None
        key = find_key(context, b"tokenizer.chat_template")
        if key >= 0 and key_type(context, key) == string_type:
            template = get_str(context, key).decode("utf-8", "replace")
        splits = 1
        key = find_key(context, b"split.count")
        if key >= 0 and key_type(context, key) == uint16_type:
            splits = max(1, int(get_u16(context, key)))
        total = int(count(context))
        tensors = tuple(
            (tensor_name(context, i).decode("utf-8", "replace"), int(tensor_size(context, i)))
            for i in range(total)
        )
        end = max((offset(context, i) + size for i, (_, size) in enumerate(tensors)), default=0)
        return GgufSummary(
            architecture,
            total,
            int(data_offset(context)) + int(end),
            splits,
            _numbers(context, architecture),
            tensors,
            template,
        )
    finally:
        free(context)


# Of enum gguf_type: the numbers, each with the C type of its value.
_NUMBER_TYPES: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
_ARRAY_TYPE = 9
_LONGEST_ARRAY = 4096  # no model has as many layers


def _numbers(context: Any, architecture: str | None) -> dict[str, Any]:
    """The header's numbers that describe the architecture."""
    pointer, index = ctypes.c_void_p, ctypes.c_int64
    count = _bind("gguf_get_n_kv", index, pointer)
    key_of = _bind("gguf_get_key", ctypes.c_char_p, pointer, index)
    type_of = _bind("gguf_get_kv_type", ctypes.c_int, pointer, index)
    data_of = _bind("gguf_get_val_data", pointer, pointer, index)
    element_type_of = _bind("gguf_get_arr_type", ctypes.c_int, pointer, index)
    length_of = _bind("gguf_get_arr_n", ctypes.c_size_t, pointer, index)
    elements_of = _bind("gguf_get_arr_data", pointer, pointer, index)

    prefix = f"{architecture}."
    found: dict[str, Any] = {}
    for i in range(count(context)):
        key = key_of(context, i).decode("utf-8", "replace")
        kind = type_of(context, i)
        if key == "tokenizer.ggml.tokens" and kind == _ARRAY_TYPE:
            found[key] = int(length_of(context, i))
        elif not key.startswith(prefix):
            continue
        elif kind in _NUMBER_TYPES:
            found[key.removeprefix(prefix)] = (
                _NUMBER_TYPES[kind].from_address(data_of(context, i)).value
            )
        elif kind == _ARRAY_TYPE and element_type_of(context, i) in _NUMBER_TYPES:
            length = min(int(length_of(context, i)), _LONGEST_ARRAY)
            element = _NUMBER_TYPES[element_type_of(context, i)]
            values = (element * length).from_address(elements_of(context, i)) if length else ()
            found[key.removeprefix(prefix)] = tuple(values)
    return found


@frozen
class BackendDevice:
    """One compute device as ggml lists it. Memory in bytes, 0 where the backend cannot say."""

    name: str
    """``backend:index`` in this project's spelling, as ``cuda:0``."""
    description: str
    free_memory: int
    total_memory: int
    handle: int
    """ggml_backend_dev_t."""


# ggml's device names, as "CUDA0", begin with these.
_BACKEND_OF_PREFIX = {
    "CUDA": "cuda",
    "ROCm": "hip",
    "HIP": "hip",
    "Vulkan": "vulkan",
    "Metal": "metal",
    "MTL": "metal",
    "SYCL": "sycl",
}


@functools.cache
def _load_backends() -> None:
    """Builds with loadable backends register their devices only after this call. Once."""
    silence_llama_log()
    llama.llama_backend_init()
    _bind("ggml_backend_load_all", None)()


def gpu_devices(memory_of: Collection[str] | None = None) -> tuple[BackendDevice, ...]:
    """The accelerators this build and this machine have. Empty on a CPU-only build.

    ``memory_of``: names of those whose memory is wanted; ``None``: all. The others have 0 of 0.
    On CUDA, asking makes a context on the device, which takes some hundred MiB of it for as long
    as the process lives.
    """
    _load_backends()
    count = _bind("ggml_backend_dev_count", ctypes.c_size_t)
    get = _bind("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name_of = _bind("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    description_of = _bind("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    ask = _bind(
        "ggml_backend_dev_memory",
        None,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_size_t),
    )
    found: list[BackendDevice] = []
    for i in range(count()):
        handle = get(i)
        ggml_name = name_of(handle).decode()
        prefix = ggml_name.rstrip("0123456789")
        backend = _BACKEND_OF_PREFIX.get(prefix)
        if backend is None:
            continue  # the CPU, BLAS and other helpers are not placements
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        name = f"{backend}:{ggml_name[len(prefix) :] or 0}"
        if memory_of is None or name in memory_of:
            ask(handle, ctypes.byref(free), ctypes.byref(total))
        found.append(
            BackendDevice(
                name=name,
                description=description_of(handle).decode("utf-8", "replace"),
                free_memory=free.value,
                total_memory=total.value,
                handle=int(handle),
            )
        )
    return tuple(found)


def cpu_buffer_type() -> int:
    """ggml_backend_buffer_type_t of plain memory."""
    pointer: int = _bind("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    return pointer


def peer_access_variable() -> str | None:
    """The environment variable that lets this build's GPUs read each other's memory, if it has one.

    ggml's CUDA and HIP backends look for it once, when they are loaded: before
    :func:`gpu_devices` is first called.
    """
    name = "GGML_CUDA_P2P"
    folder = Path(llama._lib._name).parent
    for path in folder.glob("*ggml-*"):
        if re.search(r"ggml-(cuda|hip)\.", path.name) is None:
            continue
        try:
            with (
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                if content.find(name.encode()) >= 0:
                    return name
        except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
            continue
    return None


@functools.cache
def library_identity() -> str:
    """Names the build of llama.cpp that is loaded: other builds may read saved states otherwise.

    By the content of libllama, which reads and writes them, and the names and sizes of what lies
    beside it.
    """
    path = str(llama._lib._name)
    folder = os.path.dirname(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read())
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_file():
            digest.update(f"{entry.name} {entry.stat().st_size}\n".encode())
    return f"{llama_cpp.__version__} {digest.hexdigest()}"


@functools.cache
def native_flag_reader() -> Any:
    """A native ``bool f(void *data)`` that is true while the byte at ``data`` is not zero.

    llama.cpp calls its abort callback some 500 times in a step. A Python function there costs
    more than the step itself, so it has to be machine code; the C library's own ``strlen``
    happens to be exactly that for a two-byte buffer that is either "" or one character long.
    """
    libc = ctypes.CDLL(None)  # the process itself, which has the C library in it
    return ctypes.cast(libc.strlen, llama.ggml_abort_callback)


_log_lines: list[str] = []


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _collect_log(level: int, text: bytes, _user_data: Any) -> None:
    # Only errors are worth a person's time; the rest of llama.cpp's chatter is dropped. To us a
    # lock that failed is an error, which llama.cpp only warns of. Bounded: the newest lines are
    # enough to explain a failure.
    if level == 4 or (level == 3 and b"mlock" in text):  # GGML_LOG_LEVEL_ERROR, _WARN
        _log_lines.append(text.decode("utf-8", "replace").strip())
        del _log_lines[:-20]


def silence_llama_log() -> None:
    """Keep llama.cpp's own lines off stderr; its errors are kept for :func:`llama_errors`."""
    llama.llama_log_set(_collect_log, ctypes.c_void_p(0))


@contextmanager
def llama_errors() -> Iterator[list[str]]:
    """Collects the error lines that llama.cpp logs meanwhile (of the whole process)."""
    _log_lines.clear()
    collected: list[str] = []
    try:
        yield collected
    finally:
        collected.extend(line for line in _log_lines if line)


def load_failure(model: Any, errors: list[str]) -> str | None:
    """Why a model was not loaded as asked; ``None``: it was. ``errors``: what was logged."""
    for line in errors:
        if "mlock" in line:  # it is loaded, but not locked
            said = line.splitlines()[0].removeprefix("warning: ")
            return (
                f"its weights cannot be locked ({said}): raise the limit of locked memory "
                "(ulimit -l unlimited, LimitMEMLOCK=infinity of systemd), or leave --mlock out"
            )
    if model:
        return None
    return errors[-1] if errors else "llama.cpp gave no reason"
