"""From a block of the configuration to a loaded model: what an engine's thread runs first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .config import ModelConfig
from .engine.admission import KVLedger
from .engine.architecture_options import header_overrides
from .engine.disk_cache import DiskCache, FolderError, state_key
from .engine.llama_runner import LlamaRunner, LlamaSpec
from .engine.model_file import ModelFileError, check_model_file
from .engine.model_runner import ModelLoadError
from .engine.placement import Placed
from .engine.worker import LoadedModel


def load_llama(
    model: ModelConfig,
    place: Placed,
    default_threads: int,
    on_progress: Callable[[float], None],
    stopped: threading.Event,
) -> LoadedModel:
    """Load a block's model with llama.cpp. Runs on its worker's thread."""
    spec = LlamaSpec(
        path=model.path,
        devices=place.devices,
        slots=model.max_concurrency,
        max_ctx=model.max_ctx,
        pool=model.kv_pool_tokens,
        chunk=model.chunk,
        threads=model.threads or default_threads,
        cache_type_k=model.cache_type_k,
        cache_type_v=model.cache_type_v,
        flash_attn=model.flash_attn,
        gpu_layers=model.gpu_layers,
        mmap=model.mmap,
        mlock=model.mlock,
        rope_freq_base=model.rope_freq_base,
        rope_freq_scale=model.rope_freq_scale,
        keeps_prefixes=model.keeps_prefixes,
        layer_split=model.target_layer_split,
        cpu_moe=model.cpu_moe,
        overrides=header_overrides(model),
    )
    runner = LlamaRunner(spec, on_progress=on_progress, stopped=stopped)
    ledger = KVLedger(
        slots=model.max_concurrency,
        pool=runner.pool,
        max_ctx=runner.max_ctx,
        decode_headroom=model.decode_headroom,
    )
    store = None
    if model.disk_prefix_cache is not None:
        try:
            key = state_key(check_model_file(model.path).parts, runner.state_facts)
            store = DiskCache(model.disk_prefix_cache, key)
        except (FolderError, ModelFileError, OSError) as error:
            runner.close()
            raise ModelLoadError(f"--disk-prefix-cache {error}") from error
    return LoadedModel(
        runner,
        ledger,
        model.chunk,
        tuple(spec.warnings),
        prefixes=model.prefix_cache_slots,
        prompts=model.prefill_cache_slots,
        store=store,
    )
