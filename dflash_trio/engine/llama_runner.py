"""The runner on llama.cpp, through llama-cpp-python's low-level calls.

The only file that imports llama_cpp (``llama_abi`` beside it binds what is missing there). Every
call that computes goes through ctypes, which releases the GIL for its duration.
"""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# llama_cpp before numpy: with some CUDA builds a model load crashes in the tokenizer's set-up when
# numpy's libraries came first (seen, cause unknown); importing in this order is enough.
import llama_cpp.llama_cpp as llama
import numpy as np
from attrs import field, frozen

from ..config import CacheType, DevicePlacement, FlashAttention
from ..generation.request import SamplingParams
from .llama_abi import (
    BackendDevice,
    gpu_devices,
    llama_errors,
    native_flag_reader,
    silence_llama_log,
)
from .model_runner import (
    BatchSlice,
    DecodeOutcome,
    EngineError,
    LoadingStopped,
    ModelInfo,
    ModelLoadError,
)

_CACHE_TYPES: dict[CacheType, int] = {
    "f32": llama.GGML_TYPE_F32,
    "f16": llama.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which the bindings do not name
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q4_0": llama.GGML_TYPE_Q4_0,
    "q4_1": llama.GGML_TYPE_Q4_1,
    "iq4_nl": llama.GGML_TYPE_IQ4_NL,
    "q5_0": llama.GGML_TYPE_Q5_0,
    "q5_1": llama.GGML_TYPE_Q5_1,
}
_FLASH_ATTENTION: dict[FlashAttention, int] = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_CELL_PADDING = 256  # llama.cpp rounds a stream's cells up to a multiple of this
_DEFAULT_MAX_CTX = 8192


@frozen
class LlamaSpec:
    """How to load one model. ``None`` values are resolved from the file. Counts are tokens."""

    path: str
    device: DevicePlacement | None
    slots: int
    max_ctx: int | None
    pool: int | None
    chunk: int
    threads: int
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attn: FlashAttention = "auto"
    gpu_layers: int | None = None
    mmap: bool = True
    mlock: bool = False
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    warnings: list[str] = field(factory=list)
    """Filled while loading: lines for the operator."""


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
        self._pieces: list[bytes | None] = [None] * self.size

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

    def close(self) -> None:
        """After this the model may be freed: waits for readers that are inside."""
        with self._lock:
            self._vocab = None
            self._lock.wait_for(lambda: self._readers == 0)


class _GreedySampler:
    """The largest logit. Ten times cheaper than a candidate array over the whole vocabulary."""

    def __init__(self, runner: LlamaRunner, logit_bias: Sequence[tuple[int, float]]) -> None:
        self._runner = runner
        self._tokens = np.array([token for token, _ in logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in logit_bias], dtype=np.float32)

    def sample(self, output: int) -> int:
        logits = self._runner.logits(output)
        if not len(self._tokens):
            return int(logits.argmax())
        # In place, and undone: copying the row would cost more than looking through it.
        plain = logits[self._tokens]
        # `at`, so that a token named twice gets both biases, as llama.cpp's chain does it.
        np.add.at(logits, self._tokens, self._biases)
        token = int(logits.argmax())
        logits[self._tokens] = plain
        return token

    def close(self) -> None:
        pass


class _ChainSampler:
    """llama.cpp's own sampler chain, in llama.cpp's order: bias, penalties, filters, draw."""

    def __init__(
        self, runner: LlamaRunner, params: SamplingParams, prompt: Sequence[int], max_ctx: int
    ) -> None:
        self._runner = runner
        chain_params = llama.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain: Any = llama.llama_sampler_chain_init(chain_params)
        size = runner.vocabulary.size
        add = self._add
        if params.logit_bias:
            array = (llama.llama_logit_bias * len(params.logit_bias))()
            for slot, (token, bias) in zip(array, params.logit_bias, strict=True):
                slot.token, slot.bias = token, bias
            add(llama.llama_sampler_init_logit_bias(size, len(array), array))
        look_back = 0
        if params.has_penalties:
            look_back = params.penalty_last_n
            if not 0 <= look_back <= max_ctx:
                # All of it. Clamped, because llama.cpp allocates as many tokens as it is told.
                look_back = max_ctx
            add(
                llama.llama_sampler_init_penalties(
                    size,
                    look_back,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.temperature <= 0:
            add(llama.llama_sampler_init_greedy())
        else:
            if params.top_k > 0:
                add(llama.llama_sampler_init_top_k(params.top_k))
            if params.top_p < 1.0:
                add(llama.llama_sampler_init_top_p(params.top_p, 1))
            if params.min_p > 0.0:
                add(llama.llama_sampler_init_min_p(params.min_p, 1))
            # Not below this: logits divided by less overflow, and the draw is nonsense then.
            add(llama.llama_sampler_init_temp(max(params.temperature, 1e-6)))
            add(llama.llama_sampler_init_dist(native_seed(params.seed)))
        for token in prompt[-look_back:] if look_back else ():
            llama.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        llama.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, output: int) -> int:
        return int(
            llama.llama_sampler_sample(
                self._chain, self._runner.context, self._runner.output_row(output)
            )
        )

    def close(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None


def native_seed(seed: int | None) -> int:
    """A request's 64-bit seed as llama.cpp's 32-bit one; ``None`` lets llama.cpp draw its own.

    Small seeds map to themselves, larger ones by CRC-32, and never to llama.cpp's "random"
    (0xFFFFFFFF), so that the same seed always repeats.
    """
    random_seed = 0xFFFFFFFF
    if seed is None:
        return random_seed
    if seed < random_seed:
        return seed
    return min(zlib.crc32(seed.to_bytes(8, "little")), random_seed - 1)


class LlamaRunner:
    """One llama.cpp model and context. Made, used and closed on one thread."""

    def __init__(
        self, spec: LlamaSpec, *, on_progress: Callable[[float], None], stopped: threading.Event
    ) -> None:
        """Load the model; takes seconds to minutes.

        ``on_progress`` gets 0.0 .. 1.0. Setting ``stopped`` ends the loading with LoadingStopped.
        Raises ModelLoadError with a line for the operator; nothing stays allocated then.
        """
        silence_llama_log()
        llama.llama_backend_init()
        # What close() frees; set as it comes to exist.
        self._model: Any = None
        self.context: Any = None
        self._vocabulary: LlamaVocabulary | None = None
        self._abort_flag = ctypes.create_string_buffer(b"\0\0", 2)
        self._rows: list[int] = []
        try:
            device = resolve_device(spec.device)
            self._load_model(spec, device, on_progress, stopped)
            self._make_context(spec, device)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------ loading

    def _load_model(
        self,
        spec: LlamaSpec,
        device: BackendDevice | None,
        on_progress: Callable[[float], None],
        stopped: threading.Event,
    ) -> None:
        params = llama.llama_model_default_params()
        layers = 0 if device is None else 9999 if spec.gpu_layers is None else spec.gpu_layers
        params.n_gpu_layers = layers
        # An explicit device list, NULL-terminated: an empty one keeps a CPU block off every GPU.
        handles = [device.handle] if device is not None else []
        device_list = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        params.devices = ctypes.cast(device_list, ctypes.c_void_p)
        params.split_mode = 0  # LLAMA_SPLIT_MODE_NONE: one block, one device
        params.load_mode = {
            (False, False): llama.LLAMA_LOAD_MODE_NONE,
            (True, False): llama.LLAMA_LOAD_MODE_MMAP,
            (False, True): llama.LLAMA_LOAD_MODE_MLOCK,
            (True, True): llama.LLAMA_LOAD_MODE_MMAP_MLOCK,
        }[spec.mmap, spec.mlock]

        # What the callback raised: no exception can cross llama.cpp's frames, so it is carried
        # around them.
        raised: list[BaseException] = []

        @llama.llama_progress_callback  # type: ignore[untyped-decorator]
        def progress(fraction: float, _user_data: Any) -> bool:
            try:
                on_progress(fraction)
            except BaseException as error:
                raised.append(error)
                return False
            return not stopped.is_set()

        params.progress_callback = progress
        with llama_errors() as errors:
            self._model = llama.llama_model_load_from_file(os.fsencode(spec.path), params)
        if raised:
            raise raised[0]
        if stopped.is_set():
            raise LoadingStopped
        if not self._model:
            self._model = None
            reason = errors[-1] if errors else "llama.cpp gave no reason"
            raise ModelLoadError(f"{spec.path} cannot be loaded: {reason}")
        if llama.llama_model_has_encoder(self._model) or not llama.llama_model_has_decoder(
            self._model
        ):
            raise ModelLoadError(f"{spec.path} is an encoder model: only decoders can chat")
        self._vocabulary = LlamaVocabulary(self._model)
        trained = llama.llama_model_n_ctx_train(self._model)
        if spec.max_ctx is not None and spec.max_ctx > trained:
            spec.warnings.append(
                f"--max-ctx {spec.max_ctx} is beyond the {trained} tokens that {spec.path} was "
                "trained on: answers may turn to noise there"
            )
        self.max_ctx = spec.max_ctx or min(trained, _DEFAULT_MAX_CTX)
        self.pool = spec.pool or self.max_ctx * spec.slots
        template = llama.llama_model_chat_template(self._model, None)
        self.info = ModelInfo(
            architecture=self._metadata("general.architecture") or "unknown",
            description=self._describe(),
            trained_ctx=trained,
            vocab_size=self._vocabulary.size,
            chat_template=template.decode("utf-8", "replace") if template else None,
            device=device.name if device is not None else str(spec.device or "cpu:0"),
            threads=spec.threads,
            gpu_layers=min(layers, llama.llama_model_n_layer(self._model) + 1),
        )

    def _make_context(self, spec: LlamaSpec, device: BackendDevice | None) -> None:
        params = llama.llama_context_default_params()
        # A cache partitioned by sequence where no cells are shared and the pool is every slot's
        # whole context: faster, and what bit-equal answers need. Else one cache for all.
        partitioned = self.pool >= spec.slots * self.max_ctx
        batch = spec.chunk + spec.slots
        params.n_seq_max = spec.slots
        params.kv_unified = not partitioned
        params.n_ctx = (
            spec.slots * _padded(self.max_ctx) if partitioned else max(_padded(self.pool), 256)
        )
        params.n_batch = batch
        params.n_ubatch = min(512, batch)
        params.n_outputs_max = spec.slots
        params.n_threads = params.n_threads_batch = spec.threads
        params.type_k = _CACHE_TYPES[spec.cache_type_k]
        params.type_v = _CACHE_TYPES[spec.cache_type_v]
        params.flash_attn_type = _FLASH_ATTENTION[spec.flash_attn]
        params.rope_freq_base = spec.rope_freq_base or 0.0
        params.rope_freq_scale = spec.rope_freq_scale or 0.0
        params.swa_full = False
        params.no_perf = True
        if device is None:
            # On a GPU build these two would still move a CPU block's work to the GPU.
            params.offload_kqv = False
            params.op_offload = False
        params.abort_callback = native_flag_reader()
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        with llama_errors() as errors:
            self.context = llama.llama_init_from_model(self._model, params)
        if not self.context:
            self.context = None
            raise ModelLoadError(
                f"no context of {params.n_ctx} KV cells can be made for {spec.path}: "
                f"{errors[-1] if errors else 'probably out of memory'}; "
                "lower --max-ctx, --max-concurrency or --kv-pool-tokens"
            )
        self._memory = llama.llama_get_memory(self.context)
        self._make_batch(batch)
        # The first decode pages the weights in and builds the graph: better now than on a client.
        self.decode([BatchSlice(0, 0, (self.vocabulary.bos or 0,), True)])
        self.rewind(0, 0)

    def _make_batch(self, capacity: int) -> None:
        """One batch for the runner's life; numpy arrays that llama.cpp reads in place."""
        self._capacity = capacity
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._one = np.ones(capacity, dtype=np.int32)
        self._output = np.zeros(capacity, dtype=np.int8)
        # seq_id is an array of pointers, each to the one id of its token.
        self._seq_pointers = (
            self._seq.ctypes.data + np.arange(capacity, dtype=np.uint64) * self._seq.itemsize
        ).astype(np.uint64)

        def pointer(array: Any, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        self._batch = llama.llama_batch(
            n_tokens=0,
            token=pointer(self._token, llama.llama_token),
            embd=None,
            pos=pointer(self._pos, llama.llama_pos),
            n_seq_id=pointer(self._one, ctypes.c_int32),
            seq_id=pointer(self._seq_pointers, ctypes.POINTER(llama.llama_seq_id)),
            logits=pointer(self._output, ctypes.c_int8),
        )

    def _metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(256)
        length = llama.llama_model_meta_val_str(self._model, key.encode(), buffer, 256)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _describe(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self._model, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    # ------------------------------------------------------------------------------ running

    @property
    def vocabulary(self) -> LlamaVocabulary:
        assert self._vocabulary is not None
        return self._vocabulary

    def new_sampler(
        self, params: SamplingParams, prompt: Sequence[int]
    ) -> _GreedySampler | _ChainSampler:
        if params.temperature <= 0 and not params.has_penalties:
            return _GreedySampler(self, params.logit_bias)
        return _ChainSampler(self, params, prompt, self.max_ctx)

    def decode(self, batch: Sequence[BatchSlice]) -> DecodeOutcome:
        # Cleared before, not after: a request to abort that comes just as a step ends is then
        # over with that step, and never cuts the next one, where others may have a share.
        self._abort_flag[0] = b"\0"
        at = 0
        self._rows.clear()
        for item in batch:
            if not item.tokens:
                raise EngineError("an empty slice")
            end = at + len(item.tokens)
            if end > self._capacity:
                raise EngineError(f"a batch of more than {self._capacity} tokens")
            self._token[at:end] = item.tokens
            self._pos[at:end] = np.arange(item.position, item.position + end - at)
            self._seq[at:end] = item.seq_id
            self._output[at:end] = 0
            self._output[end - 1] = item.wants_output
            self._rows.append(end - 1)
            at = end
        self._batch.n_tokens = at
        code = llama.llama_decode(self.context, self._batch)
        if code == 0:
            return DecodeOutcome.DONE
        if code == 1:
            return DecodeOutcome.NO_CELLS
        if code == 2:
            return DecodeOutcome.ABORTED
        raise EngineError(f"llama_decode failed with {code} on a batch of {at} tokens")

    def output_row(self, output: int) -> int:
        """The batch row whose logits belong to slice ``output`` of the last batch."""
        return self._rows[output]

    def logits(self, output: int) -> Any:
        """float32[vocab], valid and writable until the next decode."""
        pointer = llama.llama_get_logits_ith(self.context, self._rows[output])
        if not pointer:
            raise EngineError(f"no logits for slice {output}")
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary.size,))

    def sequence_length(self, seq_id: int) -> int:
        return int(llama.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def rewind(self, seq_id: int, length: int) -> None:
        if not llama.llama_memory_seq_rm(self._memory, seq_id, length, -1):
            raise EngineError(f"the KV cache refused to rewind sequence {seq_id} to {length}")

    def abort(self) -> None:
        self._abort_flag[0] = b"\1"

    def close(self) -> None:
        if self._vocabulary is not None:
            self._vocabulary.close()
        if self.context is not None:
            llama.llama_free(self.context)
            self.context = None
        if self._model is not None:
            llama.llama_model_free(self._model)
            self._model = None


def _padded(cells: int) -> int:
    return -(-cells // _CELL_PADDING) * _CELL_PADDING


def resolve_device(placement: DevicePlacement | None) -> BackendDevice | None:
    """The GPU for a placement; ``None`` for the CPU. ``auto``: the first GPU, else the CPU.

    Raises ModelLoadError for a device that this build or this machine lacks.
    """
    if placement is not None and placement.is_cpu:
        return None
    devices = gpu_devices()
    if placement is None:
        return devices[0] if devices else None
    for device in devices:
        if device.name == str(placement):
            return device
    known = ", ".join([*(device.name for device in devices), "cpu:0"])
    raise ModelLoadError(f"there is no device {placement} here; this build and host have: {known}")
