"""What a launch comes to, before anything loads: every default resolved, every block placed. Pure.

``--check`` prints it whole, a start the short of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from .api.access import LOCALHOST
from .cli.model_card import TURN_ENDS
from .cli.option_table import OPTIONS
from .config import PROMPT_LOOKUP, ModelConfig, ServerConfig
from .engine.context_size import (
    LARGEST_CPU_VERIFY,
    LARGEST_GPU_VERIFY,
    ContextSize,
    size_warnings,
    tree_paths,
    verify_tokens,
)
from .engine.drafting.prompt_lookup import LONGEST as PROMPT_LOOKUP_LONGEST
from .engine.memory_plan import Need, Needs
from .engine.model_file import ModelFile
from .engine.placement import Placed, demand_of
from .net.listener import loopback_in_numbers
from .routing.model_defaults import resolve_defaults
from .trace_settings import TraceSettings

HOST = "host"
"""Memory of the host, for a model that is on GPUs."""

_OPTION_OF = {option.field: option.name for option in OPTIONS if option.field}


@frozen
class ModelPlan:
    """One block that loads."""

    config: ModelConfig
    file: ModelFile
    place: Placed
    context: ContextSize
    threads: int
    from_card: Mapping[str, object] = field(hash=False)
    """What holds because the card says it, by the names of the options; cut to the room."""
    warnings: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(map(str, self.place.devices))

    @property
    def partitioned(self) -> bool:
        """Each slot has cells of its own; otherwise all share one pool."""
        return self.context.partitioned or self.file.shape.always_streams

    @property
    def memory(self) -> tuple[tuple[str, Need], ...]:
        """The estimate for each device, the host's memory last."""
        return _on_devices(self.devices, self.place.needs)

    @property
    def draft_memory(self) -> tuple[tuple[str, Need], ...]:
        """The same for its draft; empty without one that is a file."""
        draft = self.place.draft
        return () if draft is None else _on_devices((str(draft.device),), draft.needs)


@frozen
class LaunchPlan:
    """A whole launch."""

    config: ServerConfig
    models: tuple[ModelPlan, ...]
    """In priority order."""
    warnings: tuple[str, ...] = ()
    """Of the launch as a whole; each model has its own."""
    traces: TraceSettings = field(factory=TraceSettings)
    on_loopback: bool | None = None
    """Whether what was bound is loopback only; ``None``: nothing is bound yet."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes on each device, all models and drafts together; every ``cpu:N`` is the host's."""
        total: dict[str, int] = {}
        for model in self.models:
            for device, need in (*model.memory, *model.draft_memory):
                place = HOST if device.startswith("cpu:") else device
                total[place] = total.get(place, 0) + need.total
        return total

    @property
    def address(self) -> str:
        """Where it is going to listen, for people."""
        listener = self.config.listener
        if listener.host.startswith("unix:"):
            return listener.host
        scheme = "http" if listener.tls_cert is None else "https"
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        return f"{scheme}://{host}:{listener.port or 'any free port'}"

    def lines_of_warning(self) -> Iterator[str]:
        """All of them, each naming its block."""
        for model in self.models:
            yield from (f"{model.config.block_label}: {line}" for line in model.warnings)
        yield from self.warnings
        yield from self._access_warnings()
        yield from self.traces.warnings

    def _access_warnings(self) -> Iterator[str]:
        listener = self.config.listener
        # A socket's file is reached by its owner only.
        if listener.api_keys or listener.host.startswith("unix:"):
            return
        local = self.on_loopback
        if local is None:
            local = loopback_in_numbers(listener.host)
        if local is None and listener.host.lower().rstrip(".") == LOCALHOST:
            local = True
        if local is None:
            # The resolver may be far away and slow: a start asks it anyway, and then tells.
            yield (
                f"there is no API key: unless --host {listener.host} stands for this machine's "
                "loopback only, whoever can reach it may use it"
            )
        elif not local:
            yield (
                f"there is no API key, and --host {listener.host} can be reached from other "
                "machines: whoever can reach it may use it"
            )


def _on_devices(devices: Sequence[str], needs: Needs) -> tuple[tuple[str, Need], ...]:
    if devices[0].startswith("cpu:"):
        return ((devices[0], needs.cpu),)
    return (*zip(devices, needs.gpus, strict=True), (HOST, needs.cpu))


def plan_launch(
    config: ServerConfig, files: Sequence[ModelFile], places: Sequence[Placed], *, cores: int
) -> LaunchPlan:
    """The plan of blocks that are checked and placed. ``cores``: those this process may use."""
    on_cpu = sum(place.on_cpu for place in places)
    share = max(1, cores // max(1, on_cpu))
    models = tuple(
        _plan_model(model, file, place, share, cores)
        for model, file, place in zip(config.models, files, places, strict=True)
    )
    return LaunchPlan(config, models, tuple(_launch_warnings(config, models, cores)))


def _plan_model(
    config: ModelConfig, file: ModelFile, place: Placed, share: int, cores: int
) -> ModelPlan:
    context = demand_of(config, file, gpus=0 if place.on_cpu else len(place.devices)).context
    threads = config.threads or share
    warnings = [
        *place.warnings,
        *size_warnings(
            config.path,
            context,
            trained=file.shape.trained_ctx,
            max_ctx=config.max_ctx,
            pool=config.kv_pool_tokens,
        ),
        *draft_warnings(config, place),
    ]
    if place.on_cpu and threads > cores:
        warnings.append(
            f"--threads {threads} is more than the {cores} usable cores: at every step all threads "
            "wait for those that have none"
        )
    return ModelPlan(
        config, file, place, context, threads, _from_card(config, context), tuple(warnings)
    )


def most_guesses(model: ModelConfig, place: Placed) -> int:
    """Tokens that are guessed in one go; 0 without a draft."""
    if place.draft is not None:
        return model.tree_budget or place.draft.file.longest
    if model.draft == PROMPT_LOOKUP:
        return model.draft_max or PROMPT_LOOKUP_LONGEST
    return 0


def draft_warnings(model: ModelConfig, place: Placed) -> Iterator[str]:
    """Which guesses are never made, although the options ask for them. One line each."""
    longest, slots = most_guesses(model, place), model.max_concurrency
    if not longest:
        return
    most = LARGEST_CPU_VERIFY if place.on_cpu else LARGEST_GPU_VERIFY
    since = f"a step that verifies has at most {most} tokens on a {'C' if place.on_cpu else 'G'}PU"
    if model.draft_max is not None and model.draft_max >= most:
        yield (
            f"--draft-max {model.draft_max}: at most {most - 1} tokens are guessed at a time here, "
            f"since {since}: lower it"
        )
    longest = min(longest, most - 1)
    if model.decode_headroom <= longest:
        yield (
            f"--decode-headroom {model.decode_headroom} leaves no room for the {longest} tokens "
            "that --draft may guess at a time: fewer are guessed"
        )
    if model.tree_budget is not None and model.tree_budget >= most:
        yield (
            f"--ddtree-budget {model.tree_budget}: a tree has at most {most - 1} tokens here, "
            f"since {since}: lower it"
        )
    if model.tree_budget is not None and not tree_paths(
        slots, verify_tokens(slots, longest, on_cpu=place.on_cpu)
    ):
        yield (
            f"--ddtree with --max-concurrency {slots}: {since}, which leaves no branches; guesses "
            "are chains"
        )
    # A draft from a file guesses for everybody or, where that is not one for each, mostly for
    # nobody. What is looked up is shared out one by one.
    from_file = place.draft is not None
    served = most // 2 if from_file else most - 1
    if slots > served:
        what = "hardly anything" if from_file else "nothing"
        yield (
            f"--max-concurrency {slots}: while more than {served} sequences decode, {what} is "
            f"guessed, since {since}: lower it to {served}, or leave --draft out"
        )


def _from_card(config: ModelConfig, context: ContextSize) -> dict[str, object]:
    if config.card is None:
        return {}
    room = min(context.max_ctx, context.pool)
    defaults = resolve_defaults(config, room=room, max_ctx=context.max_ctx)
    values: dict[str, object] = {
        f"sampling.{name}": default.value for name, default in defaults.of_sampling().items()
    }
    values |= {name: default.value for name, default in defaults.of_limits().items()}
    values |= {f"reasoning_efforts.{effort}": n for effort, n in defaults.efforts.items()}
    shown = {
        _OPTION_OF[name]: values[name]
        for name, source in defaults.sources.items()
        if source == "card"
    }
    if config.card.turn_ends:
        shown[TURN_ENDS] = list(config.card.turn_ends)
    return shown


def _launch_warnings(
    config: ServerConfig, models: Sequence[ModelPlan], cores: int
) -> Iterator[str]:
    on_cpu = [model for model in models if model.place.on_cpu]
    threads = sum(model.threads for model in on_cpu)
    if len(on_cpu) > 1 and threads > cores:
        names = " and ".join(model.config.name for model in on_cpu)
        yield (
            f"{names} are on the same {cores} cores with {threads} threads together: while more "
            "than one of them generates, each is much slower; give them fewer --threads"
        )
