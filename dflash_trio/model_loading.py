"""From a block of the configuration to a loaded model: what an engine's thread runs first."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from .config import PROMPT_LOOKUP, ModelConfig
from .engine.admission import KVLedger
from .engine.architecture_options import header_overrides
from .engine.context_size import context_size, draft_context, tree_paths, verify_tokens
from .engine.disk_cache import DiskCache, FolderError, state_key
from .engine.drafting.lazy import LazyDraft
from .engine.drafting.prompt_lookup import PromptLookup
from .engine.drafting.provider import DraftProvider
from .engine.llama_dflash import DFlashProvider
from .engine.llama_draft_context import DraftSpec
from .engine.llama_draft_model import DraftModelProvider
from .engine.llama_runner import LlamaRunner, LlamaSpec
from .engine.model_file import ModelFileError, check_model_file
from .engine.model_runner import ModelLoadError
from .engine.placement import Placed, PlacedDraft
from .engine.worker import LoadedModel
from .launch_plan import draft_warnings, most_guesses
from .routing.router import usable_cores

log = logging.getLogger("dflash_trio")

_SAMPLING_THREADS = 8
"""At most: handing work over is not free, and other models want cores too."""


def load_llama(
    model: ModelConfig,
    place: Placed,
    default_threads: int,
    on_progress: Callable[[float], None],
    stopped: threading.Event,
) -> LoadedModel:
    """Load a block's model with llama.cpp. Runs on its worker's thread."""
    slots, longest = model.max_concurrency, most_guesses(model, place)
    verified = verify_tokens(slots, longest, on_cpu=place.on_cpu) if longest else 0
    # Of the bar: what is loaded comes in one piece for people.
    share = 1.0
    if place.draft is not None and not model.lazy_draft:
        size = os.path.getsize(model.path)
        share = size / (size + place.draft.file.size_bytes)
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
        draft_outputs=max(0, verified - slots),
        tree_paths=0 if model.tree_budget is None else tree_paths(slots, verified),
        has_draft=longest > 0,
        layer_split=model.target_layer_split,
        cpu_moe=model.cpu_moe,
        overrides=header_overrides(model),
        # On the CPU a step leaves no core idle, and drawing is little beside it.
        sampling_threads=1 if place.on_cpu else max(1, min(_SAMPLING_THREADS, usable_cores() // 2)),
    )
    runner = LlamaRunner(
        spec, on_progress=lambda fraction: on_progress(fraction * share), stopped=stopped
    )
    spec.warnings.extend(draft_warnings(model, place))
    drafts: DraftProvider | None = None
    try:
        if model.draft is not None and not runner.rewinds_freely:
            raise ModelLoadError(
                f"{model.path} cannot take tokens back, as drafts want it: leave --draft out"
            )
        if model.draft == PROMPT_LOOKUP:
            drafts = PromptLookup(longest)
        elif place.draft is not None:

            def on_draft_progress(fraction: float) -> None:
                on_progress(share + fraction * (1.0 - share))

            drafts = _load_draft(
                model, place.draft, runner, spec.threads, on_draft_progress, stopped
            )
    except BaseException:
        runner.close()
        raise
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
            if drafts is not None:
                drafts.close()
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
        drafts=drafts,
        draft_device=None if place.draft is None else str(place.draft.device),
        tree_budget=model.tree_budget,
        verify_limit=verified,
    )


def _load_draft(
    model: ModelConfig,
    place: PlacedDraft,
    runner: LlamaRunner,
    threads: int,
    on_progress: Callable[[float], None],
    stopped: threading.Event,
) -> DraftProvider:
    """Load a block's draft, or what will load it when somebody comes."""
    file = place.file
    target = context_size(
        trained=runner.info.trained_ctx,
        slots=model.max_concurrency,
        max_ctx=model.max_ctx,
        pool=model.kv_pool_tokens,
    )
    spec = DraftSpec(
        file,
        devices=(place.device,),
        context=draft_context(target, file.spare, on_cpu=place.device.is_cpu),
        chunk=model.chunk,
        threads=threads,
        flash_attn=model.flash_attn,
        mmap=model.mmap,
    )

    progress = _nobody_watches if model.lazy_draft else on_progress

    def load() -> DraftProvider:
        log.info("%s loads its draft (%s) %s", model.name, file.kind, file.path)
        if file.is_block_draft:
            return DFlashProvider(
                runner.context,
                spec,
                on_progress=progress,
                stopped=stopped,
                batch_rows=runner.batch_rows,
                ranks=model.tree_budget is not None,
            )
        return DraftModelProvider(
            spec,
            vocabulary_size=runner.vocabulary.size,
            on_progress=progress,
            stopped=stopped,
        )

    if not model.lazy_draft:
        return load()
    return LazyDraft(load, kind=file.kind, longest=file.longest)


def _nobody_watches(_fraction: float) -> None:
    """Progress of what is loaded while requests wait."""
