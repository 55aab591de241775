"""The composition root: builds every part, and owns the order in which they live and die.

Nothing here decides anything about a request. It binds, loads, serves, drains and exits:

* bound before anything loads, so that a taken port costs no loading;
* engines live in the outermost nursery, connections inside it, so that an engine outlives every
  request that may still hold something of it;
* the process ends when the last connection has, and after that the last engine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterable, Callable, Sequence
from functools import partial
from typing import NoReturn

import attrs
import trio

from .api.access import AccessPolicy
from .api.app import DflashApp
from .api.cors import CorsPolicy
from .api.generating import FIRST_BYTE_PATIENCE, KEEP_ALIVE_INTERVAL
from .config import ModelConfig, ServerConfig
from .console import complain, say
from .engine.client import WORKER_STOP_BOUND, EngineClient
from .engine.host_memory import give_large_blocks_back
from .engine.llama_abi import gpu_devices
from .engine.model_runner import ModelLoadError
from .engine.worker import Load, Ready
from .generation.status import ServerStatus
from .launch_checks import StartupError, bind, read_certificates, read_template, resolve_launch
from .launch_plan import LaunchPlan
from .load_progress import LoadProgress
from .log_setup import set_up_logging
from .model_loading import load_llama
from .net.connection_server import ConnectionServer
from .net.listener import BoundListeners
from .plan_text import banner, load_detail, render_check, render_json
from .routing.drain import CUT_GRACE, DrainController
from .routing.router import Router, usable_cores
from .routing.served_model import ServedModel
from .service_manager import ServiceManager
from .text.bad_constraint import BadConstraint
from .text.chat_template import TemplateError
from .trace_settings import read_trace_settings
from .traces import Traces, start_traces

log = logging.getLogger("dflash_trio")

EXIT_FAILED, EXIT_USAGE, EXIT_FORCED = 1, 2, 130
SWITCH_INTERVAL = 0.0005
"""Seconds a thread may keep the interpreter while another wants it. Python's own 5 ms would let
the event loop hold up a finished decode for longer than the decode took."""
EXIT_MARGIN = 5.0
"""Seconds from the last engine's end to the process's, as a service manager is told."""


# ------------------------------------------------------------------------------ entry points


def run_server(config: ServerConfig, warnings: Sequence[str] = ()) -> int:
    """Serve until told to stop; the process's exit code. Blocks. ``warnings`` are logged first."""
    set_up_logging(config.log_format, config.log_level)
    for warning in warnings:
        log.warning("%s", warning)
    try:
        plan = resolve_launch(config)
    except StartupError as error:
        return _fail(error)
    loads: list[tuple[ModelConfig, Load]] = [
        (model.config, partial(load_llama, model.config, model.place, model.threads))
        for model in plan.models
    ]
    return serve(config, loads, plan)


def serve(
    config: ServerConfig, loads: list[tuple[ModelConfig, Load]], plan: LaunchPlan | None = None
) -> int:
    """Bind, load by ``loads`` (blocks in priority order), serve, drain; the exit code. Blocks.

    ``plan``: what is told of the launch; ``None``: nothing.
    """
    if plan is not None:
        settings = plan.traces
    else:
        settings = read_trace_settings(os.environ)
        for warning in settings.warnings:
            log.warning("%s", warning)
    # From the binding on a signal means a shutdown in good order, although nobody can begin one
    # before the event loop runs: it is kept until then.
    early: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: early.append(received))
    try:
        ssl_context = read_certificates(config.listener)
        listeners = bind(config)
    except StartupError as error:
        return _fail(error)
    if plan is not None:
        plan = attrs.evolve(plan, on_loopback=listeners.on_loopback)
    sys.setswitchinterval(SWITCH_INTERVAL)
    traces = start_traces(settings)
    give_large_blocks_back()
    server = Server(
        config,
        listeners,
        loads,
        ssl_context=ssl_context,
        early_signals=early,
        plan=plan,
        manager=ServiceManager.from_environment(os.environ),
        traces=traces,
        before_ready=set_garbage_aside,
    )
    try:
        code = trio.run(server.run)
    finally:
        listeners.close()
        # Nothing is left to end: a late signal must not change the exit code. (Ignored rather than
        # handled, since Python puts back the deadly default for handled ones when it finishes.)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if server.abandoned_engines:
        # Their threads may sit in native code for ever: a normal exit could wait for them.
        logging.shutdown()
        os._exit(code)
    return code


def set_garbage_aside() -> None:
    """Have the collector never look again at what is there now: modules, routes, models.

    These live as long as the process. A look through all of them holds the interpreter for fifty
    milliseconds and more, with every stream and every first token waiting, and now and then comes
    one.
    """
    gc.collect()
    gc.freeze()


def check_launch(config: ServerConfig) -> int:
    """Print what the launch comes to, without loading or binding anything; 0, or 2 with the reason
    on stderr."""
    set_up_logging(config.log_format, config.log_level)
    try:
        plan = resolve_launch(config)
        read_certificates(config.listener)
    except StartupError as error:
        return _fail(error)
    say(render_json(plan) if config.log_format == "json" else render_check(plan))
    return 0


def list_devices() -> int:
    """Print the devices that blocks may be placed on."""
    for device in gpu_devices():
        say(
            f"{device.name}\t{device.description}\t"
            f"{device.free_memory // 2**20} of {device.total_memory // 2**20} MiB free\n"
        )
    say(f"cpu:0\tCPU, {usable_cores()} usable cores (cpu:N only tells blocks apart)\n")
    return 0


def _fail(error: Exception) -> int:
    complain(f"dflash-server: error: {error}\n")
    return EXIT_USAGE


# ------------------------------------------------------------------------------- the server


class Server:
    """One launch, from bound listeners to the exit code.

    ``loads``: for each block in priority order, what its worker runs first. Owns the listeners.
    """

    def __init__(
        self,
        config: ServerConfig,
        listeners: BoundListeners,
        loads: list[tuple[ModelConfig, Load]],
        *,
        ssl_context: ssl.SSLContext | None = None,
        early_signals: Sequence[int] = (),
        plan: LaunchPlan | None = None,
        manager: ServiceManager | None = None,
        traces: Traces | None = None,
        before_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """``early_signals``: those that came before :meth:`run` listens; read when it does.
        ``plan``: what is told of the launch. ``traces`` are flushed at the end. ``before_ready``:
        called once everything is loaded and nobody is served yet."""
        self._began = time.monotonic()
        self._config = config
        self._plan = plan
        self._manager = manager or ServiceManager()
        self._traces = traces
        self._before_ready = before_ready
        self._early_signals = early_signals
        self._ssl_context = ssl_context
        self._listeners = listeners
        details = {model.config.name: load_detail(model) for model in plan.models} if plan else {}
        self._progress = {
            model.name: LoadProgress(
                model.name,
                bar=config.log_format == "console",
                detail=details.get(model.name, ""),
                on_growth=self._manager.loading,
            )
            for model, _ in loads
        }
        self._clients = [
            EngineClient(model.name, load, on_progress=self._progress[model.name])
            for model, load in loads
        ]
        self._models = [model for model, _ in loads]
        self._failure: str | None = None

    @property
    def abandoned_engines(self) -> list[str]:
        """Models whose threads did not end when told to."""
        return [client.name for client in self._clients if client.abandoned]

    async def run(self) -> int:
        """Serve until the last connection after a shutdown has ended; the exit code."""
        listener = self._config.listener
        self._router = Router(queue_limit=listener.routing_queue_limit)
        app = DflashApp(
            self._router,
            self.status,
            access=AccessPolicy(
                api_keys=listener.api_keys,
                # A web page can reach a loopback port, but no socket file.
                local_only=not listener.api_keys and self._listeners.on_loopback,
                cors=CorsPolicy(listener.cors_origins),
                own_name=listener.host,
            ),
            max_body_bytes=listener.max_body_bytes,
            stall_timeout=listener.client_stall_timeout,
            first_byte_patience=FIRST_BYTE_PATIENCE,
            keep_alive_interval=KEEP_ALIVE_INTERVAL,
            traces=self._traces,
        )
        connections = ConnectionServer(
            app,
            listeners=self._listeners,
            stall_timeout=listener.client_stall_timeout,
            max_connections=listener.max_connections,
            ssl_context=self._ssl_context,
        )
        drain = DrainController(
            self._router,
            connections,
            drain_timeout=listener.drain_timeout,
            exit_now=self._exit_now,
        )
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await self._live(connections, drain, signals)
        if self._failure is not None:
            log.error("%s", self._failure)
            return EXIT_FAILED
        for name in self.abandoned_engines:
            log.error("the engine of %s did not end in time and was abandoned", name)
        log.info("bye")
        # One that was still loading has failed nobody: a signal while loading is no failure.
        return EXIT_FAILED if self.abandoned_engines and self._router.models else 0

    async def _live(
        self, connections: ConnectionServer, drain: DrainController, signals: AsyncIterable[int]
    ) -> None:
        async with trio.open_nursery() as outer:
            outer.start_soon(partial(drain.watch, signals, received=len(self._early_signals)))
            outer.start_soon(self._tell_draining, drain)
            outer.start_soon(self._manager.feed_watchdog, self._useful)
            async with trio.open_nursery() as engines:
                async with trio.open_nursery() as front:
                    addresses = await front.start(connections.serve)
                    for address in addresses:
                        say(f"dflash-server listens on {address}\n")
                    self._introduce()
                    await self._load_until_drained(engines, drain)
                    if self._failure is not None:
                        await drain.begin()
                # No connection is left, so nobody reads a vocabulary or waits for a retirement.
                for client in self._clients:
                    client.stop()
                if self._traces is not None:
                    # While the engines end, which may take longer.
                    engines.start_soon(self._traces.flush, drain.hurried)
            outer.cancel_scope.cancel()

    def _introduce(self) -> None:
        """The banner: what this launch comes to, and what its operator should know of it."""
        if self._plan is not None:
            for line in banner(self._plan):
                log.info("%s", line)
            for line in self._plan.lines_of_warning():
                log.warning("%s", line)

    def _useful(self) -> bool:
        """Whether anybody is, or will be, served."""
        models = self._router.models
        return not models or any(model.healthy for model in models)

    async def _tell_draining(self, drain: DrainController) -> None:
        await drain.draining.wait()
        limit = self._config.listener.drain_timeout
        running = len(self._router.reservations)
        self._manager.stopping(
            self._failure or f"finishing {running} requests",
            None if limit is None else limit + CUT_GRACE + WORKER_STOP_BOUND + EXIT_MARGIN,
        )

    async def _load_until_drained(self, engines: trio.Nursery, drain: DrainController) -> None:
        """Load the models one after the other, unless a signal comes first."""
        async with trio.open_nursery() as loading:

            async def give_up() -> None:
                await drain.draining.wait()
                loading.cancel_scope.cancel()

            loading.start_soon(give_up)
            served: list[ServedModel] = []
            for model, client in zip(self._models, self._clients, strict=True):
                # Said before llama.cpp says anything, which may read the whole file first.
                self._progress[model.name](0.0)
                try:
                    ready: Ready = await engines.start(client.run)
                    served.append(await trio.to_thread.run_sync(self._serve, model, client, ready))
                    # A signal that came during the thread's work ends the loading here.
                    await trio.lowlevel.checkpoint()
                except (ModelLoadError, TemplateError, StartupError) as error:
                    label = f"{model.block_label}: "
                    self._failure = label + str(error).removeprefix(label)
                    self._progress[model.name].clear()
                    break
                self._announce(served[-1], ready)
            else:
                self._before_ready()
                self._router.open(served)
                names = " before ".join(model.name for model in served)
                log.info("ready after %.1f s: %s", time.monotonic() - self._began, names)
                self._manager.ready(f"serving {names}")
            loading.cancel_scope.cancel()

    @staticmethod
    def _serve(model: ModelConfig, client: EngineClient, ready: Ready) -> ServedModel:
        # Here, and not at the first grammar: it keeps the interpreter to itself for up to a second
        # or two, while nobody is served yet.
        with contextlib.suppress(BadConstraint):  # told to whoever asks for a grammar
            ready.vocabulary.guide_tokenizer()
        return ServedModel(
            model,
            client,
            info=ready.info,
            vocabulary=ready.vocabulary,
            ledger=ready.ledger,
            template_source=read_template(model),
        )

    def _announce(self, model: ServedModel, ready: Ready) -> None:
        self._progress[model.name].clear()
        told = set(self._plan.lines_of_warning()) if self._plan else set()
        for warning in ready.warnings:
            line = f"{model.config.block_label}: {warning}"
            if line not in told:
                log.warning("%s", line)
        ledger = model.ledger
        log.info(
            "%s is ready: %s",
            model.name,
            f"{model.info.description} on {model.info.device}, {model.info.threads} threads, "
            f"{ledger.slots} slots, {ledger.statistics().pool} KV cells, "
            f"context {ledger.max_ctx}, template: {model.template_origin}",
        )

    def status(self) -> ServerStatus:
        """A snapshot of everything, taken without waiting."""
        phases: dict[ServedModel, list[str]] = {}
        for reservation in self._router.reservations:
            phases.setdefault(reservation.model, []).append(reservation.phase)
        if self._router.draining:
            state = "draining"
        else:
            state = "ready" if self._router.models else "loading"
        return ServerStatus(
            state=state,
            models=tuple(
                model.status(priority, phases.get(model, ()))
                for priority, model in enumerate(self._router.models)
            ),
            router=self._router.statistics(),
            load_balancing=self._config.load_balancing,
            unused_models=self._config.unused,
        )

    def _exit_now(self) -> NoReturn:
        """The third signal: end the process, leaving nothing but the socket file tidied up."""
        with contextlib.suppress(OSError):
            self._listeners.close()
        logging.shutdown()
        os._exit(EXIT_FORCED)
