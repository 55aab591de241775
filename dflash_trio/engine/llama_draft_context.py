"""A draft's own model and context in llama.cpp, and the batches that go into it.

A context has a row for each of the target's. Its cache is partitioned, or one pool for all: see
``context_size.draft_context``.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp as llama
import numpy as np
from attrs import frozen

from ..config import DevicePlacement, FlashAttention
from .context_size import ContextSize
from .draft_file import DraftFile
from .llama_abi import llama_errors, native_flag_reader
from .llama_memory import seq_cp, seq_rm
from .llama_model_params import FLASH_ATTENTION, ModelParams, find_devices
from .llama_outputs import OutputArray
from .model_runner import EngineError, LoadingStopped, ModelLoadError


@frozen
class DraftSpec:
    """How to load one draft."""

    file: DraftFile
    devices: tuple[DevicePlacement, ...]
    """One GPU, or the CPU."""
    context: ContextSize
    """The draft's own."""
    chunk: int
    """Tokens of prompts that may be worked off in one go."""
    threads: int
    flash_attn: FlashAttention = "auto"
    mmap: bool = True


class DraftContext:
    """A loaded draft. Made, used and closed on its target's thread."""

    def __init__(
        self,
        spec: DraftSpec,
        *,
        on_progress: Callable[[float], None],
        stopped: threading.Event,
    ) -> None:
        """Load the model alone; :meth:`make_context` has to follow.

        ``on_progress`` gets 0.0 .. 1.0. Raises ModelLoadError, or LoadingStopped once ``stopped``
        is set; nothing stays allocated then.
        """
        self._spec = spec
        self.model: Any = None
        self.native: Any = None
        self._abort_flag = ctypes.create_string_buffer(b"\0\0", 2)
        self.on_cpu = all(device.is_cpu for device in spec.devices)
        params = ModelParams(mmap=spec.mmap, mlock=False)
        params.place(find_devices(spec.devices), gpu_layers=None)
        raised: list[BaseException] = []

        @llama.llama_progress_callback  # type: ignore[untyped-decorator]
        def progress(fraction: float, _user_data: Any) -> bool:
            try:
                on_progress(fraction)
            except BaseException as error:  # none can cross llama.cpp's frames
                raised.append(error)
                return False
            return not stopped.is_set()

        params.raw.progress_callback = progress
        path = spec.file.path
        with llama_errors() as errors:
            model = llama.llama_model_load_from_file(os.fsencode(path), params.raw)
        self.model = model or None
        try:
            if raised:
                raise raised[0]
            if stopped.is_set():
                raise LoadingStopped
            if self.model is None:
                reason = errors[-1] if errors else "llama.cpp gave no reason"
                raise ModelLoadError(f"the draft {path} cannot be loaded: {reason}")
        except BaseException:
            self.close()
            raise
        self.vocabulary_size = int(
            llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        )
        self._outputs = OutputArray(self.vocabulary_size)

    def make_context(
        self,
        *,
        batch: int,
        microbatch: int,
        outputs: int,
        target: Any = None,
    ) -> None:
        """``batch``, ``microbatch`` and ``outputs``: tokens. ``target``: a context whose model's
        tensors this one uses.

        Raises ModelLoadError.
        """
        spec = self._spec
        params = llama.llama_context_default_params()
        self.shares_cells = not spec.context.partitioned
        params.n_ctx = spec.context.cells
        params.kv_unified = self.shares_cells
        params.n_seq_max = spec.context.slots
        params.n_batch = batch
        params.n_ubatch = microbatch
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = spec.threads
        params.flash_attn_type = FLASH_ATTENTION[spec.flash_attn]
        params.swa_full = True  # rows are cut back, also beyond a window
        params.no_perf = True
        params.ctx_other = target
        # Asked on CPUs only.
        params.abort_callback = native_flag_reader()
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        if self.on_cpu:
            params.offload_kqv = False
            params.op_offload = False
        with llama_errors() as errors:
            self.native = llama.llama_init_from_model(self.model, params)
        if not self.native:
            self.native = None
            raise ModelLoadError(
                f"no context of {params.n_ctx} KV cells can be made for {spec.file.path}: "
                f"{errors[-1] if errors else 'probably out of memory'}; lower --max-ctx, "
                "--max-concurrency or --kv-pool-tokens, or leave --draft out"
            )
        self.memory = llama.llama_get_memory(self.native)

    def decode(self, batch: llama.llama_batch) -> bool:
        """Compute a batch; on a GPU it may be under way yet. False: there are no cells for it, or
        it was aborted. Of what its rows have then nothing is certain."""
        if self.aborted:
            return False
        code = llama.llama_decode(self.native, batch)
        if code not in (0, 1, 2):
            raise EngineError(f"llama_decode failed with {code} on a batch of the draft")
        return bool(code == 0)

    def abort(self) -> None:
        """Let the batch under way and all after it fail. From any thread."""
        self._abort_flag[0] = b"\1"

    @property
    def aborted(self) -> bool:
        return bool(self._abort_flag[0] != b"\0")

    def rearm(self) -> None:
        """Let batches be computed again."""
        self._abort_flag[0] = b"\0"

    def logits(self, outputs: int) -> Any:
        """float32[outputs, vocabulary] of the last batch, valid until the next one. Waits."""
        llama.llama_synchronize(self.native)
        logits = self._outputs.of(self.native, outputs)
        if logits is None:
            raise EngineError("the draft has no logits")
        return logits

    def rewind(self, row: int, length: int) -> None:
        """Drop a row's cells from position ``length`` on."""
        if not seq_rm(self.memory, row, length, -1):
            raise EngineError(f"the draft's cache refused to rewind row {row} to {length}")

    def copy(self, source: int, target: int, length: int) -> None:
        """Give row ``target``, which is empty, the first ``length`` positions of ``source``."""
        if self.shares_cells:
            seq_cp(self.memory, source, target, 0, length)
            return
        # As in the runner: of a part, a partitioned cache would end the process.
        seq_cp(self.memory, source, target, -1, -1)
        self.rewind(target, length)

    def close(self) -> None:
        """Idempotent. Before the target is closed."""
        if self.native is not None:
            llama.llama_free(self.native)
            self.native = None
        self.free_model()

    def free_model(self) -> None:
        """Where no context of it is wanted. Idempotent."""
        if self.model is not None:
            llama.llama_model_free(self.model)
            self.model = None


class DraftBatch:
    """Arrays that llama.cpp reads in place, filled whole and not token by token.

    ``capacity``: tokens. ``values``: float32 values of a row of features, 0 where none is fed.
    ``sections``: positions that such a row has (4 where rotary positions have several dimensions).
    """

    def __init__(self, capacity: int, values: int = 0, sections: int = 1) -> None:
        self.capacity = capacity
        self.tokens = np.zeros(capacity, dtype=np.int32)
        self.rows = np.zeros(capacity, dtype=np.int32)
        """Of each token: the sequence's."""
        self.outputs = np.zeros(capacity, dtype=np.int8)
        self.features = np.zeros((capacity if values else 0, values), dtype=np.float32)
        self.positions = np.zeros(capacity * sections, dtype=np.int32)
        """Those of the first dimension."""
        self._sections = sections
        self._one = np.ones(capacity, dtype=np.int32)
        self._row_pointers = (
            self.rows.ctypes.data + np.arange(capacity, dtype=np.uint64) * self.rows.itemsize
        ).astype(np.uint64)

        def pointer(array: Any, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        common = {
            "n_tokens": 0,
            "pos": pointer(self.positions, llama.llama_pos),
            "n_seq_id": pointer(self._one, ctypes.c_int32),
            "seq_id": pointer(self._row_pointers, ctypes.POINTER(llama.llama_seq_id)),
            "logits": pointer(self.outputs, ctypes.c_int8),
        }
        self._of_tokens = llama.llama_batch(
            token=pointer(self.tokens, llama.llama_token), embd=None, **common
        )
        self._of_features = llama.llama_batch(
            token=None, embd=pointer(self.features, ctypes.c_float), **common
        )

    def of_tokens(self, count: int) -> llama.llama_batch:
        """The first ``count`` tokens, as llama_decode takes them."""
        self._of_tokens.n_tokens = count
        return self._of_tokens

    def of_features(self, count: int) -> llama.llama_batch:
        """The first ``count`` rows of features, without outputs."""
        self.outputs[:count] = 0
        if self._sections > 1:
            # One dimension after the other. Text moves in all but the last alike.
            every = self.positions[: self._sections * count].reshape(self._sections, count)
            every[1:-1] = every[0]
            every[-1] = 0
        self._of_features.n_tokens = count
        return self._of_features
