"""Everything that is checked before a launch binds or loads, and the plan that comes of it.

A start and ``--check`` go through here alike, so what one refuses the other does, in the same line.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence

import attrs

from .config import ListenerConfig, ModelConfig, ServerConfig
from .engine.disk_cache import FolderError, check_folder
from .engine.draft_file import DraftFile, check_draft_file, check_takes_back
from .engine.memory_lock import CannotLock, check_lockable
from .engine.model_file import ModelFile, ModelFileError, check_model_file
from .engine.placement import Placed, PlacementError, place_models
from .launch_plan import LaunchPlan, plan_launch
from .net.connection_server import EncryptedKey, server_ssl_context
from .net.descriptors import descriptor_warning, raise_descriptor_limit
from .net.listener import BindError, BoundListeners, bind_listeners
from .routing.router import usable_cores
from .text.chat_template import ChatTemplate, TemplateError
from .trace_settings import read_trace_settings


class StartupError(Exception):
    """The launch cannot start as configured. One line for the operator; exit code 2."""


def resolve_launch(config: ServerConfig) -> LaunchPlan:
    """What will load, where and how. Reads headers and templates only. Raises StartupError."""
    files, places = _places(config)
    plan = plan_launch(config, files, places, cores=usable_cores())
    few = descriptor_warning(config.listener.max_connections)
    warnings = [*plan.warnings, *_check_locks(config, places), *([] if few is None else [few])]
    traces = read_trace_settings(os.environ)
    return attrs.evolve(plan, traces=traces, warnings=tuple(warnings))


def _places(config: ServerConfig) -> tuple[list[ModelFile], list[Placed]]:
    """Where every loaded block goes, once its files are found good. Raises StartupError."""
    files: list[ModelFile] = []
    drafts: list[DraftFile | None] = []
    for model in config.models:
        try:
            files.append(check_model_file(model.path))
            if model.draft is not None:
                check_takes_back(files[-1], model.draft)
            path = model.draft_file
            draft = None if path is None else check_draft_file(path, model.draft_max, files[-1])
            if model.ddtree and draft is not None and not draft.is_block_draft:
                raise ModelFileError(
                    f"--ddtree wants a draft that ranks tokens, and {draft.path} is a whole model, "
                    "which guesses one token after the other: give a DFlash draft, or leave "
                    "--ddtree out"
                )
            drafts.append(draft)
        except ModelFileError as error:
            raise StartupError(f"{model.block_label}: {error}") from error
        _check_template(model, files[-1])
        _check_disk_cache(model)
    try:
        return files, place_models(config.models, files, drafts)
    except PlacementError as error:
        raise StartupError(str(error)) from error


def _check_locks(config: ServerConfig, places: Sequence[Placed]) -> list[str]:
    """That what --mlock is to lock may be locked; warnings. Raises StartupError."""
    warnings: list[str] = []
    locked = 0
    for model, place in zip(config.models, places, strict=True):
        if not model.mlock:
            continue
        size = place.needs.cpu.weights
        try:
            warning = check_lockable(size, beside=locked)
        except CannotLock as error:
            raise StartupError(f"{model.block_label}: {error}") from error
        if warning is not None:
            warnings.append(f"{model.block_label}: {warning}")
        locked += size
    return warnings


def read_template(model: ModelConfig) -> str | None:
    """The operator's own template; ``None``: there is none. Raises StartupError."""
    if model.chat_template_file is None:
        return None
    try:
        with open(model.chat_template_file, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(
            f"{model.block_label}: --chat-template-file {model.chat_template_file} "
            f"cannot be read: {reason}"
        ) from error


def _check_template(model: ModelConfig, file: ModelFile) -> None:
    """Compile the operator's own template, or else the file's, before anything is loaded for it."""
    own = read_template(model)
    source = file.chat_template if own is None else own
    if source is None:
        return
    try:
        ChatTemplate(source, bos_token="", eos_token="", label=model.block_label)
    except TemplateError as error:
        where = f"see {model.chat_template_file}"
        if own is None:
            where = f"it is {file.path}'s own: give another one with --chat-template-file"
        raise StartupError(f"{error}: {where}") from error


def _check_disk_cache(model: ModelConfig) -> None:
    if model.disk_prefix_cache is None:
        return
    option = f"{model.block_label}: --disk-prefix-cache"
    if not (model.prefix_cache_slots or model.prefill_cache_slots):
        raise StartupError(
            f"{option} would stay empty with --prefix-cache-slots 0: give it at least 1, or leave "
            "the folder out"
        )
    try:
        check_folder(model.disk_prefix_cache)
    except FolderError as error:
        raise StartupError(f"{option} {error}") from error


def read_certificates(listener: ListenerConfig) -> ssl.SSLContext | None:
    """What TLS is served with; ``None``: it is not. Raises StartupError."""
    if listener.tls_cert is None or listener.tls_key is None:
        return None
    try:
        return server_ssl_context(listener.tls_cert, listener.tls_key)
    except EncryptedKey as error:
        raise StartupError(
            f"--tls-key {listener.tls_key} is encrypted: decrypt it first "
            f"(openssl pkey -in {listener.tls_key} -out FILE)"
        ) from error
    except OSError as error:  # ssl.SSLError is one
        raise StartupError(f"--tls-cert and --tls-key cannot be used: {error}") from error


def bind(config: ServerConfig) -> BoundListeners:
    """Listen where the launch says. The caller owns the sockets. Raises StartupError."""
    listener = config.listener
    raise_descriptor_limit(listener.max_connections)
    try:
        return bind_listeners(listener.host, listener.port, tls=listener.tls_cert is not None)
    except BindError as error:
        raise StartupError(str(error)) from error
