"""How much memory a model takes on each device, and whether it is there. Pure.

The estimate for a device, in bytes:

* **weights**: the tensors that load there. llama.cpp counts the output as one layer more than the
  model has, puts the last ``--gpu-layers`` of these on the GPUs and shares them out by the split's
  weights; embeddings stay on the CPU, experts too with ``--cpu-moe``.
* **cache**: for each layer there, cells x (K values + V values), each at its type's size. Cells are
  padded to 256 in every stream. A layer with a sliding window has min(cells, window + micro-batch)
  of them, unless prompts go on from earlier ones: then the window remembers everything.
* **computing**: for each token of a micro-batch the values that a layer needs meanwhile, or the
  logits if they are more, the mask over the cells of a stream (and over a window's), and
  attention's scores where flash attention is off; on a GPU also one layer's cache in 16 bits where
  it is quantized, and 256 MiB for the libraries' own buffers. Several GPUs that hold all layers
  work in a pipeline, for which llama.cpp keeps the masks four times; where layers or experts are
  left to the CPU, the largest of their tensors visits the first GPU for large batches.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from ..config import CacheType
from .context_size import ContextSize, padded
from .host_memory import HostMemory
from .model_shape import LayerShape, ModelShape

MIB = 2**20
GPU_RESERVE = 256 * MIB
"""Of each GPU that a model uses: work space of the mathematical libraries, and what rounding up
allocations costs."""

# ggml's blocks: bytes and values.
_CACHE_BLOCKS: Mapping[CacheType, tuple[int, int]] = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q4_0": (18, 32),
    "q4_1": (20, 32),
    "iq4_nl": (18, 32),
    "q5_0": (22, 32),
    "q5_1": (24, 32),
}
_PIPELINE_COPIES = 4
"""llama.cpp keeps so many copies of the inputs where several GPUs work in a pipeline."""


@frozen
class Need:
    """Bytes on one device."""

    weights: int = 0
    cache: int = 0
    computing: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.computing

    def shown(self) -> str:
        return (
            f"{mib(self.total)} MiB (weights {mib(self.weights)}, "
            f"KV cache {mib(self.cache)}, computing {mib(self.computing)})"
        )


@frozen
class Demand:
    """One block: a model, and how it is to run."""

    shape: ModelShape
    context: ContextSize
    microbatch: int
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: bool = True
    keeps_prefixes: bool = False
    gpu_layers: int | None = None
    cpu_moe: bool = False
    pinned: bool = False
    """The weights on the CPU are a copy or locked: their memory cannot be taken back."""
    outputs: int | None = None
    """Tokens of a batch that have logits at most; ``None``: one for each slot."""
    extra_bytes: int = 0
    """Where the last layer is computed, for what others read of it."""
    host_bytes: int = 0
    split: tuple[float, ...] = (1.0,)
    """The GPUs' shares of the layers; empty for the CPU alone."""


@frozen
class Needs:
    """What a block takes everywhere."""

    gpus: tuple[Need, ...]
    """In the order of the split."""
    cpu: Need
    pinned: bool

    @property
    def cpu_kept(self) -> int:
        """Bytes on the CPU that nothing can take back: a mapped file's pages can be read again."""
        return self.cpu.total - (0 if self.pinned else self.cpu.weights)


def estimate(demand: Demand) -> Needs:
    """What a block takes on its devices, as the head of this module says."""
    shape = demand.shape
    homes = layer_homes(len(shape.layers), demand.gpu_layers, demand.split)
    weights = [0] * (len(demand.split) + 1)  # the CPU's come last, as index -1
    caches = [0] * len(weights)
    widest = [LayerShape()] * len(weights)
    weights[-1] += shape.input_bytes
    for layer, home in zip(shape.layers, homes, strict=False):
        experts = layer.experts if demand.cpu_moe else 0
        weights[home] += layer.weights - experts
        weights[-1] += experts
        caches[home] += _cache_bytes(layer, demand)
        if layer.k + layer.v > widest[home].k + widest[home].v:
            widest[home] = layer
    # On the CPU an output that is the embeddings' tensor is counted with them already.
    weights[homes[-1]] += shape.output_bytes - (shape.tied_bytes if homes[-1] < 0 else 0)
    computing = [
        _computing(demand, layer, on_gpu=i < len(demand.split)) for i, layer in enumerate(widest)
    ]
    if demand.split:
        # Large batches are computed on the first GPU even in layers of the CPU: their weights
        # visit it, one at a time.
        computing[0] += max(
            (
                layer.largest
                for layer, home in zip(shape.layers, homes, strict=False)
                if home < 0 or (demand.cpu_moe and layer.experts)
            ),
            default=0,
        )
    computing[homes[-1]] += demand.extra_bytes
    computing[-1] += demand.host_bytes
    parts = [Need(*each) for each in zip(weights, caches, computing, strict=True)]
    return Needs(tuple(parts[:-1]), parts[-1], demand.pinned)


def layer_homes(layers: int, gpu_layers: int | None, split: Sequence[float]) -> list[int]:
    """For each layer and, at the end, the output: the index of its GPU, or -1 for the CPU."""
    every = layers + 1
    on_gpus = min(every if gpu_layers is None else gpu_layers, every) if split else 0
    first = every - on_gpus
    # In single precision throughout, as llama.cpp does it: it decides where a boundary falls.
    bounds: list[float] = []
    for weight in split:
        bounds.append(_single(_single(weight) + (bounds[-1] if bounds else 0.0)))
    bounds = [_single(bound / bounds[-1]) for bound in bounds]
    homes = [-1] * first
    for number in range(on_gpus):
        place = _single(number / on_gpus)
        homes.append(sum(bound <= place for bound in bounds))
    return homes


def _single(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def _cache_bytes(layer: LayerShape, demand: Demand) -> int:
    shape, context = demand.shape, demand.context
    cells = context.stream_cells
    streams = context.slots if shape.always_streams else context.streams
    rows = _window_cells(demand) if layer.windowed else cells
    total = rows * (_row(layer.k, demand.cache_type_k) + _row(layer.v, demand.cache_type_v))
    for values, ratio in layer.compressed:
        total += padded(max(1, -(-cells // ratio))) * _row(values, demand.cache_type_k)
    return streams * total + context.slots * layer.state


def _window_cells(demand: Demand) -> int:
    """Cells of one stream in a layer that remembers its window only."""
    shape, context = demand.shape, demand.context
    if demand.keeps_prefixes:
        return context.stream_cells
    sequences = 1 if context.partitioned or shape.always_streams else context.slots
    return min(context.stream_cells, padded(shape.window * sequences + demand.microbatch))


def _row(values: int, cache_type: CacheType) -> int:
    size, block = _CACHE_BLOCKS[cache_type]
    return -(-values // block) * size


def _computing(demand: Demand, widest: LayerShape, *, on_gpu: bool) -> int:
    shape, cells = demand.shape, demand.context.stream_cells
    tokens = demand.microbatch
    mask = 2 * tokens * (cells + (_window_cells(demand) if shape.window else 0))
    whole = demand.gpu_layers is None or demand.gpu_layers > len(shape.layers)
    if on_gpu and len(demand.split) > 1 and whole and not demand.cpu_moe:
        mask *= _PIPELINE_COPIES
    # The logits come when the layers' values are not needed any more.
    outputs = demand.context.slots if demand.outputs is None else demand.outputs
    total = mask + 4 * max(tokens * shape.activations, outputs * shape.vocabulary)
    if not demand.flash_attention:
        total += 4 * tokens * cells * shape.heads
    if on_gpu:
        quantized = (
            (widest.k, demand.cache_type_k),
            (widest.v, demand.cache_type_v),
        )
        total += sum(
            2 * values * demand.context.cells
            for values, kind in quantized
            if _CACHE_BLOCKS[kind][1] > 1
        )
        total += GPU_RESERVE
    return total


# ----------------------------------------------------------------------------------- the plan


class DoesNotFit(Exception):
    """The memory is not there. ``str()`` says how much is needed and how much is free."""


@frozen
class Room:
    """One GPU's memory as the plan goes on. Bytes."""

    name: str
    free: int
    total: int
    taken: int = 0
    """By blocks that are planned already and load before."""

    @property
    def known(self) -> bool:
        """Some backends cannot say what is free."""
        return self.total > 0

    @property
    def left(self) -> int:
        return max(0, self.free - self.taken)


@frozen
class Plan:
    """What is free, less what the blocks planned so far take. Each step makes a new one."""

    rooms: tuple[Room, ...] = ()
    host: HostMemory | None = None
    cpu_taken: int = 0
    cpu_kept: int = 0
    warnings: tuple[str, ...] = field(default=())

    def has_room(self, name: str, need: Need) -> bool:
        """Whether a GPU is known to have that much left."""
        return any(room.name == name and room.left >= need.total for room in self.rooms)

    def taking(self, devices: Sequence[str], needs: Needs) -> Plan:
        """The plan with one more block in it; DoesNotFit if a device has no room for it."""
        rooms = list(self.rooms)
        for name, need in zip(devices, needs.gpus, strict=True):
            for i, room in enumerate(rooms):
                if room.name != name:
                    continue
                if room.known and need.total > room.left:
                    beside = f" beside {mib(room.taken)} MiB for other models" if room.taken else ""
                    raise DoesNotFit(
                        f"does not fit on {name}: it needs {need.shown()}, and "
                        f"{room.left // MIB} of {room.total // MIB} MiB are free{beside}"
                    )
                rooms[i] = evolve(room, taken=room.taken + need.total)
        plan = evolve(
            self,
            rooms=tuple(rooms),
            cpu_taken=self.cpu_taken + needs.cpu.total,
            cpu_kept=self.cpu_kept + needs.cpu_kept,
        )
        return plan._with_host_checked(needs)

    def _with_host_checked(self, needs: Needs) -> Plan:
        if self.host is None:
            return self
        kept_before = self.cpu_kept - needs.cpu_kept
        beside = f" beside {mib(kept_before)} MiB for other models" if kept_before else ""
        if self.cpu_kept > self.host.available + self.host.swap:
            left = max(0, self.host.available + self.host.swap - kept_before)
            raise DoesNotFit(
                f"does not fit into the memory of this host: it needs {needs.cpu.shown()} there, "
                f"{mib(needs.cpu_kept)} MiB of it for itself, and {left // MIB} MiB are free "
                f"with the swap space{beside}"
            )
        if self.cpu_taken > self.host.available:
            left = max(0, self.host.available - (self.cpu_taken - needs.cpu.total))
            warning = (
                f"may not fit into the memory of this host: it needs {needs.cpu.shown()} there, "
                f"and {left // MIB} MiB are free; where that is too little, its file is read "
                "again and again"
            )
            return evolve(self, warnings=(*self.warnings, warning))
        return self


def mib(size: int) -> int:
    """Whole MiB, rounded up."""
    return -(-size // MIB)
