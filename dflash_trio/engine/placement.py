"""Where each block loads: decided once, before anything does, for all blocks together.

Devices that are written come first, in the order of the blocks; then each ``auto`` takes the first
GPU with room beside everything that is planned by then, else the CPU. What a block will take is an
estimate from its header (:mod:`.memory_plan`), and a device that cannot hold it ends the start.

GPUs are asked for nothing where every block is on the CPU: already the question would occupy some
of their memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from attrs import evolve, frozen

from ..config import DevicePlacement, ModelConfig
from .architecture_options import refused_option
from .context_size import (
    context_size,
    draft_batch,
    draft_context,
    microbatch,
    pending_bytes,
    verify_tokens,
)
from .draft_file import DEFAULT_LONGEST, DraftFile
from .host_memory import host_memory
from .llama_abi import BackendDevice, gpu_devices, peer_access_variable
from .llama_fillers import filler_room
from .memory_plan import Demand, DoesNotFit, Need, Needs, Plan, Room, estimate
from .model_file import ModelFile

CPU = DevicePlacement("cpu", 0)


class PlacementError(Exception):
    """A block that cannot load as it is placed. One line, naming it and what to do."""


@frozen
class PlacedDraft:
    """A block's draft with its device."""

    file: DraftFile
    device: DevicePlacement
    needs: Needs

    def shown(self) -> str:
        need = self.needs.cpu if self.device.is_cpu else self.needs.gpus[0]
        return f"its draft {self.file.path} {need.shown()} on {self.device}"


@frozen
class Placed:
    """A block with its devices."""

    devices: tuple[DevicePlacement, ...]
    """Several GPUs share the layers; the CPU stands alone."""
    needs: Needs
    warnings: tuple[str, ...] = ()
    draft: PlacedDraft | None = None

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].is_cpu

    def shown(self) -> str:
        """The estimate in a line for the operator's log."""
        needs = (self.needs.cpu,) if self.on_cpu else self.needs.gpus
        parts = (
            f"{need.shown()} on {device}" for device, need in zip(self.devices, needs, strict=True)
        )
        draft = "" if self.draft is None else f"; {self.draft.shown()}"
        return f"will take about {', '.join(parts)}{draft}"


def place_models(
    models: Sequence[ModelConfig],
    files: Sequence[ModelFile],
    drafts: Sequence[DraftFile | None] = (),
) -> list[Placed]:
    """The places of the blocks that load, in their order. ``drafts``: of each block; empty: none
    has one that is a file. Raises PlacementError."""
    drafts = drafts or (None,) * len(models)
    for model, file in zip(models, files, strict=True):
        refused = refused_option(model, file.shape)
        if refused is not None:
            raise PlacementError(f"{model.block_label}: {refused}")
        if model.peer_access:
            _enable_peer_access(model)
    named_devices = [device for model in models for device in _named(model)]
    wants_gpu = not all(map(_written, models)) or any(not d.is_cpu for d in named_devices)
    # Nothing is to be found on a GPU that nobody named, not even what asking it leaves there.
    named = set(map(str, named_devices))
    asked = named if all(map(_written, models)) else None
    gpus = gpu_devices(asked) if wants_gpu else ()
    plan = Plan(
        tuple(Room(gpu.name, gpu.free_memory, gpu.total_memory) for gpu in gpus), host_memory()
    )
    placed: dict[int, Placed] = {}
    for automatic in (False, True):
        for i, (model, file, draft) in enumerate(zip(models, files, drafts, strict=True)):
            if bool(_written(model)) is not automatic:
                devices = _written(model) or _chosen(model, file, draft, plan)
                placed[i], plan = _place(model, file, draft, devices, gpus, plan)
                if draft is not None:
                    placed[i], plan = _place_draft(model, file, draft, placed[i], gpus, plan)
    return [placed[i] for i in range(len(models))]


def _written(model: ModelConfig) -> tuple[DevicePlacement, ...]:
    """The devices that the operator named; none for ``auto``."""
    if model.target_devices:
        return model.target_devices
    return (model.target_device,) if model.target_device is not None else ()


def _named(model: ModelConfig) -> tuple[DevicePlacement, ...]:
    """All devices in what the operator wrote, the draft's too."""
    draft = (model.draft_device,) if model.draft_device is not None else ()
    return (*_written(model), *draft)


def _chosen(
    model: ModelConfig, file: ModelFile, draft: DraftFile | None, plan: Plan
) -> tuple[DevicePlacement, ...]:
    need = estimate(demand_of(model, file, draft, gpus=1)).gpus[0]
    if draft is not None and model.draft_device is None:
        theirs = estimate(draft_demand(model, file, draft, gpus=1)).gpus[0]
        need = Need(
            need.weights + theirs.weights,
            need.cache + theirs.cache,
            need.computing + theirs.computing,
        )
    for room in plan.rooms:
        if plan.has_room(room.name, need):
            return (DevicePlacement.parse(room.name),)
    return (CPU,)


def _place(
    model: ModelConfig,
    file: ModelFile,
    draft: DraftFile | None,
    devices: tuple[DevicePlacement, ...],
    gpus: Sequence[BackendDevice],
    plan: Plan,
) -> tuple[Placed, Plan]:
    label = model.block_label
    for device in devices:
        if not device.is_cpu and str(device) not in [gpu.name for gpu in gpus]:
            raise PlacementError(f"{label}: {missing_device(device, gpus)}")
    on_cpu = devices[0].is_cpu
    if on_cpu and model.gpu_layers:
        raise PlacementError(
            f"{label}: --gpu-layers {model.gpu_layers} needs a GPU, and this block "
            "is placed on the CPU: leave it out, or see --list-devices"
        )
    needs = estimate(demand_of(model, file, draft, gpus=0 if on_cpu else len(devices)))
    before = plan
    try:
        plan = plan.taking([] if on_cpu else [str(device) for device in devices], needs)
    except DoesNotFit as error:
        raise PlacementError(f"{label}: {model.path} {error}: {_remedy(model, on_cpu)}") from error
    warnings = [f"{model.path} {line}" for line in plan.warnings[len(before.warnings) :]]
    if on_cpu and gpus and not _written(model):
        need = estimate(demand_of(model, file, draft, gpus=1)).gpus[0]
        warnings.append(f"no GPU has {need.shown()} free: {model.path} goes to the CPU")
    return Placed(devices, needs, tuple(warnings)), plan


def _place_draft(
    model: ModelConfig,
    file: ModelFile,
    draft: DraftFile,
    target: Placed,
    gpus: Sequence[BackendDevice],
    plan: Plan,
) -> tuple[Placed, Plan]:
    label = model.block_label
    # Of several, the one with the output layer: what a draft borrows is there.
    theirs = target.devices[-1]
    device = theirs if model.draft_device is None else model.draft_device
    if not device.is_cpu and str(device) not in [gpu.name for gpu in gpus]:
        raise PlacementError(f"{label}: --draft-device: {missing_device(device, gpus)}")
    same = device == theirs or (device.is_cpu and theirs.is_cpu)
    if draft.borrows and not same:
        raise PlacementError(
            f"{label}: --draft-device {device}: {draft.path} uses the embeddings of its model, "
            f"which is on {theirs}: leave --draft-device out"
        )
    gpus_of_draft = 0 if device.is_cpu else 1
    needs = estimate(
        draft_demand(model, file, draft, gpus=gpus_of_draft, beside_gpu=not target.on_cpu)
    )
    before = plan
    try:
        plan = plan.taking([] if device.is_cpu else [str(device)], needs)
    except DoesNotFit as error:
        raise PlacementError(
            f"{label}: the draft {draft.path} {error}: {_remedy(model, target.on_cpu)}, or leave "
            "--draft out"
        ) from error
    warnings = [f"the draft {draft.path} {line}" for line in plan.warnings[len(before.warnings) :]]
    placed = PlacedDraft(draft, device, needs)
    return evolve(target, draft=placed, warnings=(*target.warnings, *warnings)), plan


def draft_demand(
    model: ModelConfig,
    file: ModelFile,
    draft: DraftFile,
    *,
    gpus: int,
    beside_gpu: bool | None = None,
) -> Demand:
    """A block's draft as the estimate wants it, on that many GPUs (one or none). ``beside_gpu``:
    its model is on one; ``None``: as the draft is."""
    beside_gpu = bool(gpus) if beside_gpu is None else beside_gpu
    target = demand_of(model, file, draft, gpus=gpus)
    slots = model.max_concurrency
    batch = draft_batch(slots, draft.block) if draft.is_block_draft else target.microbatch
    tokens = model.chunk + (target.outputs or slots)
    if beside_gpu and target.context.partitioned:
        tokens += filler_room(model.chunk, slots)
    step = tokens * draft.feature_bytes
    waiting = pending_bytes(step) if draft.is_block_draft else 0
    return Demand(
        shape=draft.shape,
        context=draft_context(target.context, draft.spare, on_cpu=not gpus),
        microbatch=batch,
        flash_attention=target.flash_attention,
        keeps_prefixes=True,
        pinned=not model.mmap,
        outputs=batch if draft.is_block_draft else None,
        # What it reads of its target: in the target's graph, in llama.cpp's memory on the host
        # for a batch of each of the two, and while it waits.
        extra_bytes=target.microbatch * draft.feature_bytes,
        host_bytes=step + batch * draft.feature_bytes + waiting,
        split=(1.0,) * gpus,
    )


def demand_of(
    model: ModelConfig, file: ModelFile, draft: DraftFile | None = None, *, gpus: int
) -> Demand:
    """A block as the estimate wants it, on that many GPUs."""
    slots = model.max_concurrency
    outputs = slots
    if model.draft is not None:
        longest = draft.longest if draft is not None else model.draft_max or DEFAULT_LONGEST
        longest = model.tree_budget or longest
        outputs = max(slots, verify_tokens(slots, longest, on_cpu=not gpus))
    return Demand(
        shape=file.shape,
        context=context_size(
            trained=file.shape.trained_ctx,
            slots=slots,
            max_ctx=model.max_ctx,
            pool=model.kv_pool_tokens,
            unified=model.tree_budget is not None,
        ),
        microbatch=microbatch(model.chunk, outputs),
        outputs=outputs,
        cache_type_k=model.cache_type_k,
        cache_type_v=model.cache_type_v,
        flash_attention=model.flash_attn != "off",
        # What guesses were wrong is taken back, so that a window has to remember more, too.
        keeps_prefixes=model.keeps_prefixes or model.draft is not None,
        gpu_layers=model.gpu_layers,
        cpu_moe=model.cpu_moe,
        pinned=model.mlock or not model.mmap,
        split=(model.target_layer_split or (1.0,) * gpus) if gpus else (),
    )


def missing_device(device: DevicePlacement, gpus: Sequence[BackendDevice]) -> str:
    known = ", ".join([*(gpu.name for gpu in gpus), str(CPU)])
    return f"there is no device {device} here; this build and host have: {known}"


def _remedy(model: ModelConfig, on_cpu: bool) -> str:
    levers = ["--max-ctx", "--max-concurrency", "--kv-pool-tokens"]
    if on_cpu:
        return f"lower {', '.join(levers[:-1])} or {levers[-1]}, or choose a smaller file"
    if model.target_devices:
        other = "change --target-layer-split"
    else:
        other = "choose another --target-device"
    return f"lower {', '.join(levers)} or --gpu-layers, or {other}"


def _enable_peer_access(model: ModelConfig) -> None:
    """Set the switch of llama.cpp's GPU backends: of the whole process, before they load."""
    variable = peer_access_variable()
    if variable is None:
        raise PlacementError(
            f"{model.block_label}: --peer-access has no switch in this build of llama.cpp: "
            "leave it out"
        )
    os.environ[variable] = "1"
