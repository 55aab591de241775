"""How llama.cpp is told to load a model: devices, splits, overrides."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama

from ..config import CacheType, DevicePlacement, FlashAttention
from .llama_abi import BackendDevice, cpu_buffer_type, gpu_devices
from .model_runner import ModelLoadError
from .model_shape import EXPERT_TENSORS
from .placement import missing_device

ALL_LAYERS = 9999

CACHE_TYPES: dict[CacheType, int] = {
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
FLASH_ATTENTION: dict[FlashAttention, int] = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

_LOAD_MODES: dict[tuple[bool, bool], int] = {
    (False, False): llama.LLAMA_LOAD_MODE_NONE,
    (True, False): llama.LLAMA_LOAD_MODE_MMAP,
    (False, True): llama.LLAMA_LOAD_MODE_MLOCK,
    (True, True): llama.LLAMA_LOAD_MODE_MMAP_MLOCK,
}


class _BufferOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class ModelParams:
    """``llama_model_params``, together with the arrays that it only points to.

    Keep it until the model is loaded.
    """

    def __init__(self, *, mmap: bool, mlock: bool) -> None:
        self.raw = llama.llama_model_default_params()
        self.raw.load_mode = _LOAD_MODES[mmap, mlock]
        self._kept: list[Any] = []

    def place(
        self,
        devices: Sequence[BackendDevice],
        *,
        gpu_layers: int | None,
        split: Sequence[float] = (),
    ) -> int:
        """Put layers on ``devices``, none of them with an empty list; how many are asked for.

        ``split``: the devices' shares of the layers; even ones if empty.
        """
        layers = 0 if not devices else ALL_LAYERS if gpu_layers is None else gpu_layers
        self.raw.n_gpu_layers = layers
        # An explicit list, NULL-terminated: an empty one keeps a CPU block off every GPU.
        handles = (ctypes.c_void_p * (len(devices) + 1))(*(d.handle for d in devices), None)
        self.raw.devices = ctypes.cast(handles, ctypes.c_void_p)
        self._kept.append(handles)
        self.raw.split_mode = llama.LLAMA_SPLIT_MODE_NONE
        if len(devices) > 1:
            self.raw.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
            # As long as llama.cpp reads it. Without shares it would go by what is free.
            shares = (ctypes.c_float * llama.llama_max_devices())(*(split or [1.0] * len(devices)))
            self.raw.tensor_split = shares
            self._kept.append(shares)
        return layers

    def keep_experts_on_cpu(self) -> None:
        overrides = (_BufferOverride * 2)()
        overrides[0].pattern = EXPERT_TENSORS.encode()
        overrides[0].buffer_type = cpu_buffer_type()
        self.raw.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        self._kept.append(overrides)

    def override(self, numbers: Mapping[str, int]) -> None:
        """Put numbers in the place of what the file's header says."""
        if not numbers:
            return
        # An empty key ends the list.
        overrides = (llama.llama_model_kv_override * (len(numbers) + 1))()
        for entry, (key, value) in zip(overrides, numbers.items(), strict=False):
            entry.tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
            entry.key = key.encode()
            entry.value.val_i64 = value
        self.raw.kv_overrides = overrides
        self._kept.append(overrides)


def find_devices(placements: Sequence[DevicePlacement]) -> list[BackendDevice]:
    """The GPUs of a placement; none for the CPU.

    Raises ModelLoadError for a device that this build or this machine lacks.
    """
    found: list[BackendDevice] = []
    for placement in placements:
        if placement.is_cpu:
            continue
        devices = gpu_devices(memory_of=())  # what there is room for was decided before
        match = next((device for device in devices if device.name == str(placement)), None)
        if match is None:
            raise ModelLoadError(missing_device(placement, devices))
        found.append(match)
    return found
