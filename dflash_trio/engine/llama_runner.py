"""The runner on llama.cpp, through llama-cpp-python's low-level calls.

Only the files of this folder called ``llama_*`` import llama_cpp; ``llama_abi`` binds what is
missing there. Every call that computes goes through ctypes, which releases the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

# llama_cpp before numpy: with some CUDA builds a model load crashes in the tokenizer's set-up when
# numpy's libraries came first (seen, cause unknown); importing in this order is enough.
import llama_cpp.llama_cpp as llama
from attrs import field, frozen

from ..config import CacheType, DevicePlacement, FlashAttention
from ..generation.events import TokenLogprob
from ..generation.request import SamplingParams
from .context_size import context_size, microbatch, size_warnings
from .llama_abi import (
    BackendDevice,
    library_identity,
    llama_errors,
    load_failure,
    native_flag_reader,
    silence_llama_log,
)
from .llama_batch import LlamaBatch
from .llama_fillers import ANY_TOKEN, filler_room, fillers
from .llama_logprobs import token_logprob
from .llama_memory import seq_cp, seq_pos_max, seq_rm
from .llama_metadata import cpu_batching, description, metadata
from .llama_model_params import CACHE_TYPES, FLASH_ATTENTION, ModelParams, find_devices
from .llama_outputs import OutputArray
from .llama_row_states import PendingCopies, read_state, write_state
from .llama_sampler import ChainSampler, GreedySampler, SamplingThreads
from .llama_tree import TreePaths
from .llama_vocabulary import LlamaVocabulary
from .model_runner import (
    Batching,
    BatchSlice,
    DecodeOutcome,
    EngineError,
    LoadingStopped,
    ModelInfo,
    ModelLoadError,
    TokenSampler,
)
from .pace import MANY_TOKENS, Pace, prompt_tokens


@frozen
class LlamaSpec:
    """How to load one model. ``None`` values are resolved from the file. Counts are tokens."""

    path: str
    devices: tuple[DevicePlacement, ...]
    """Several GPUs share the layers; the CPU stands alone."""
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
    keeps_prefixes: bool = False
    """Prompts may go on from what is left of earlier ones."""
    has_draft: bool = False
    """Tokens are guessed, and taken back where they were guessed wrong."""
    draft_outputs: int = 0
    """Tokens of a batch, beside one for each slot, that are guesses; each has an output."""
    tree_paths: int = 0
    """Leaves of a batch's trees, beside one for each slot: at most ``draft_outputs``, and 256 with
    the slots. More than 0: all sequences share the cells."""
    layer_split: tuple[float, ...] = ()
    """The devices' shares of the layers; empty: even ones."""
    cpu_moe: bool = False
    """Experts stay on the CPU."""
    overrides: Mapping[str, int] = field(factory=dict, hash=False)
    """Numbers in the place of the header's own, by their keys."""
    sampling_threads: int = 1
    """On which sequences draw their tokens at the same time."""
    warnings: list[str] = field(factory=list)
    """Filled while loading: lines for the operator."""


class LlamaRunner:
    """One llama.cpp model and context. Made, used and closed on one thread."""

    launches_ahead = True

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
        # The outputs of the last batch, and the largest of each, once somebody asks.
        self._logits: Any = None
        self._copies = PendingCopies()
        self._likeliest: Any = None
        self._pace = Pace()
        self._chunk = spec.chunk
        threads = spec.sampling_threads
        self._sampling = SamplingThreads(threads) if threads > 1 else None
        try:
            devices = find_devices(spec.devices)
            self._load_model(spec, devices, on_progress, stopped)
            self._make_context(spec, on_cpu=not devices)
            if stopped.is_set():
                raise LoadingStopped
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------ loading

    def _load_model(
        self,
        spec: LlamaSpec,
        devices: Sequence[BackendDevice],
        on_progress: Callable[[float], None],
        stopped: threading.Event,
    ) -> None:
        params = ModelParams(mmap=spec.mmap, mlock=spec.mlock)
        layers = params.place(devices, gpu_layers=spec.gpu_layers, split=spec.layer_split)
        if spec.cpu_moe:
            params.keep_experts_on_cpu()
        params.override(spec.overrides)

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

        params.raw.progress_callback = progress
        with llama_errors() as errors:
            self._model = llama.llama_model_load_from_file(os.fsencode(spec.path), params.raw)
        if raised:
            raise raised[0]
        if stopped.is_set():
            raise LoadingStopped
        if (reason := load_failure(self._model, errors)) is not None:
            raise ModelLoadError(f"{spec.path} cannot be loaded: {reason}")
        if llama.llama_model_has_encoder(self._model) or not llama.llama_model_has_decoder(
            self._model
        ):
            raise ModelLoadError(f"{spec.path} is an encoder model: only decoders can chat")
        self._vocabulary = LlamaVocabulary(self._model)
        self._outputs = OutputArray(self._vocabulary.size)
        trained = llama.llama_model_n_ctx_train(self._model)
        self._size = context_size(
            trained=trained,
            slots=spec.slots,
            max_ctx=spec.max_ctx,
            pool=spec.pool,
            unified=spec.tree_paths > 0,
        )
        self.max_ctx, self.pool = self._size.max_ctx, self._size.pool
        spec.warnings.extend(
            size_warnings(
                spec.path, self._size, trained=trained, max_ctx=spec.max_ctx, pool=spec.pool
            )
        )
        # Tokens that a sliding window remembers, 0 without one.
        self._window = int(llama.llama_model_n_swa(self._model))
        recurrent = llama.llama_model_is_recurrent(self._model)
        self.rewinds_freely = not (recurrent or llama.llama_model_is_hybrid(self._model))
        template = llama.llama_model_chat_template(self._model, None)
        self.info = ModelInfo(
            architecture=metadata(self._model, "general.architecture") or "unknown",
            description=description(self._model),
            trained_ctx=trained,
            vocab_size=self._vocabulary.size,
            chat_template=template.decode("utf-8", "replace") if template else None,
            device=",".join(map(str, spec.devices)),
            threads=spec.threads,
            gpu_layers=min(layers, llama.llama_model_n_layer(self._model) + 1),
        )

    def _make_context(self, spec: LlamaSpec, *, on_cpu: bool) -> None:
        params = llama.llama_context_default_params()
        self.shares_cells = not self._size.partitioned
        batch = spec.chunk + spec.slots + spec.draft_outputs
        if self._size.partitioned and not on_cpu:
            batch += filler_room(spec.chunk, spec.slots)
        params.n_seq_max = spec.slots + spec.tree_paths
        params.kv_unified = self.shares_cells
        params.n_ctx = self._size.cells
        params.n_batch = batch
        self._microbatch = microbatch(spec.chunk, spec.slots + spec.draft_outputs)
        params.n_ubatch = self._microbatch
        params.n_outputs_max = spec.slots + spec.draft_outputs
        params.n_threads = params.n_threads_batch = spec.threads
        params.type_k = CACHE_TYPES[spec.cache_type_k]
        params.type_v = CACHE_TYPES[spec.cache_type_v]
        params.flash_attn_type = FLASH_ATTENTION[spec.flash_attn]
        params.rope_freq_base = spec.rope_freq_base or 0.0
        params.rope_freq_scale = spec.rope_freq_scale or 0.0
        # A sliding window that remembers everything, where prompts go on from earlier ones, or
        # where guesses are taken back: what they push out of the window is gone.
        params.swa_full = spec.keeps_prefixes or spec.has_draft
        params.no_perf = True
        if on_cpu:
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
        self._trees = TreePaths(self._memory, spec.slots, spec.tree_paths)
        # With layers on the CPU the call itself computes, and there is nothing to wait for.
        layers = llama.llama_model_n_layer(self._model)
        self._is_asynchronous = not on_cpu and self.info.gpu_layers > layers
        rewinds = self.rewinds_freely and (not self._window or params.swa_full)  # for fillers
        self.wants_runs = bool(self._size.partitioned and self._is_asynchronous and rewinds)
        self._fills_rows = self.wants_runs and not spec.cpu_moe  # experts there take their time
        apart = self._size.partitioned and self._is_asynchronous
        self.batching = cpu_batching(self._model) if on_cpu else Batching(apart=apart)
        # Beside the model's files, all that the bytes of save() depend on. Sizes are among them:
        # they decide on the layout, and in some models on the factors of rotary positions.
        self.state_facts = (
            *(library_identity(), self.info.architecture, str(self.info.vocab_size)),
            *(spec.cache_type_k, spec.cache_type_v, spec.flash_attn),
            *(str(spec.rope_freq_base), str(spec.rope_freq_scale), str(params.swa_full)),
            *(str(0 if self.shares_cells else spec.slots), str(params.n_ctx)),
            *map(str, (self.info.device, self.info.gpu_layers, *sorted(spec.overrides.items()))),
        )
        self._batch = LlamaBatch(batch, params.n_outputs_max)

    # ------------------------------------------------------------------------------ running

    @property
    def vocabulary(self) -> LlamaVocabulary:
        assert self._vocabulary is not None
        return self._vocabulary

    def new_sampler(
        self, params: SamplingParams, prompt: Sequence[int]
    ) -> GreedySampler | ChainSampler:
        if params.temperature <= 0 and not params.has_penalties:
            return GreedySampler(self, params.logit_bias)
        return ChainSampler(self, params, prompt, self.max_ctx)

    @property
    def samples_ahead(self) -> bool:
        return self._sampling is not None

    def sample_ahead(self, wanted: Sequence[tuple[TokenSampler, int]]) -> None:
        if self._sampling is not None:
            self._all_logits()  # puts them in order, once: they are only read from here on
            self._sampling.draw_ahead(wanted)

    def warm_up(self) -> None:
        self.decode([BatchSlice(0, 0, (self.vocabulary.bos or 0,), 1)])
        self.rewind(0, 0)
        if self._is_asynchronous:
            # Small steps would never tell how fast prompts are. The first of the two is cold.
            count = min(2 * MANY_TOKENS, self._chunk, self.max_ctx)
            for _ in range(2):
                self._pace = Pace(min(MANY_TOKENS, count))
                if self.decode([BatchSlice(0, 0, (0,) * count, 1)]) is DecodeOutcome.DONE:
                    self.save(0)
                self.rewind(0, 0)

    def decode(
        self, batch: Sequence[BatchSlice], launched: Callable[[], None] = lambda: None
    ) -> DecodeOutcome:
        trees = any(item.parents is not None for item in batch)
        room = self._batch.capacity if self._fills_rows else 0
        between = fillers(batch, self.sequence_length, self.max_ctx, room, self._microbatch)
        self._batch.fill([*batch, *between], self._trees.prepare(batch) if trees else None)
        self._logits = self._likeliest = None
        if not self._is_asynchronous:
            # The call itself computes, without the interpreter: nobody wants that meanwhile.
            launched()
        begin = perf_counter()
        code = llama.llama_decode(self.context, self._batch.native)
        self._copies.carried_out()
        for filler in between:  # changes no cell that the step may yet read
            self.rewind(filler.seq_id, filler.position)
        if code == 0:
            if self._is_asynchronous:
                launched()
            # On a GPU the step may still be under way. Reading its output would wait for it too,
            # but then neither the step's time nor a hang in it would show as the step's.
            llama.llama_synchronize(self.context)
            self._pace.computed(prompt_tokens(batch), perf_counter() - begin)
            return DecodeOutcome.DONE
        self._trees.failed(partly=code != 1)
        if code == 1:
            return DecodeOutcome.NO_CELLS
        if code == 2:
            return DecodeOutcome.ABORTED
        raise EngineError(
            f"llama_decode failed with {code} on a batch of {len(self._batch)} tokens"
        )

    def batch_rows(self, batch: Sequence[BatchSlice]) -> list[int]:
        """Of each slice of the last batch: its first token's row in it."""
        return self._batch.first_rows[: len(batch)]

    def output_row(self, output: int) -> int:
        """The batch row whose logits are output ``output`` of the last batch."""
        return self._batch.row(output)

    def logits(self, output: int) -> Any:
        """float32[vocab], valid and writable until the next decode."""
        return self._all_logits()[self._batch.place(output)]

    def likeliest(self, output: int) -> int:
        """The token with the largest logit. Looked for in all outputs at once, when the first of
        them is asked for, but where tokens are guessed: most are never looked at then."""
        if self._batch.has_guesses:
            return int(self._all_logits()[self._batch.place(output)].argmax())
        if self._likeliest is None:
            self._likeliest = self._all_logits().argmax(axis=1)
        return int(self._likeliest[self._batch.place(output)])

    def _all_logits(self) -> Any:
        """float32[outputs, vocab] of the last batch, in its order."""
        if self._logits is None:
            self._logits = self._outputs.of(self.context, self._batch.outputs)
            if self._logits is None:
                raise EngineError("no logits")
        return self._logits

    def logprobs(self, output: int, token: int, top: int) -> TokenLogprob:
        return token_logprob(self.logits(output), token, top, self.vocabulary.shown_piece)

    def copy(self, source: int, target: int, length: int) -> None:
        if self.shares_cells:
            seq_cp(self._memory, source, target, 0, length)
            return
        # The whole sequence: of a part, a partitioned cache would end the process.
        seq_cp(self._memory, source, target, -1, -1)
        self._copies.add(source, target)
        self.rewind(target, length)

    def _carry_out_copies(self, row: int) -> None:
        """By a step for nobody, behind what the row has."""
        end = self.sequence_length(row)
        self.decode([BatchSlice(row, end, (ANY_TOKEN,), 0)])  # though it be full, or given up
        self.rewind(row, end)

    @property
    def saving_costs(self) -> float:
        return self._pace.saving_costs

    def save(self, seq_id: int) -> bytes:
        if self._copies.hinder_reading(seq_id):
            self._carry_out_copies(seq_id)
        begin = perf_counter()
        state = read_state(self.context, seq_id)
        self._pace.saved(perf_counter() - begin)
        return state

    def load(self, seq_id: int, state: bytes) -> None:
        if self._copies.hinder_writing(seq_id):
            self._carry_out_copies(seq_id)
        if not write_state(self.context, seq_id, state):
            raise EngineError(f"a saved state of {len(state)} bytes does not fit sequence {seq_id}")

    def can_rewind(self, seq_id: int, length: int) -> bool:
        if not self.rewinds_freely:
            return length == self.sequence_length(seq_id)
        if not self._window:
            return True
        # What has left the window is gone; llama.cpp would rewind all the same, to wrong answers.
        begin = int(llama.llama_memory_seq_pos_min(self._memory, seq_id))
        return begin <= max(0, length - self._window)

    def sequence_length(self, seq_id: int) -> int:
        return int(seq_pos_max(self._memory, seq_id)) + 1

    @property
    def tree_paths(self) -> int:
        return self._trees.count

    @property
    def paths_held(self) -> int:
        return self._trees.held

    def keep_path(self, seq_id: int, path: Sequence[int]) -> None:
        self._trees.keep(seq_id, path)

    def forget_paths(self, seq_id: int) -> None:
        self._trees.release(seq_id)

    def rewind(self, seq_id: int, length: int) -> None:
        self._trees.rewind(seq_id, length)
        if not seq_rm(self._memory, seq_id, length, -1):
            raise EngineError(f"the KV cache refused to rewind sequence {seq_id} to {length}")

    def abort(self) -> None:
        self._abort_flag[0] = b"\1"

    def rearm(self) -> None:
        self._abort_flag[0] = b"\0"

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.close()
        if self._vocabulary is not None:
            self._vocabulary.close()
        if self.context is not None:
            llama.llama_free(self.context)
            self.context = None
        if self._model is not None:
            llama.llama_model_free(self._model)
            self._model = None
