"""Checks on a model file before anything is loaded, each with an error that says what to do."""

from __future__ import annotations

import os
import re
import stat

from attrs import field, frozen

from .llama_abi import GgufSummary, read_gguf_header
from .model_shape import ModelShape, model_shape

# Files that are GGUFs but no models to generate with.
_NOT_TARGETS = {
    "clip": "a vision projector (mmproj)",
    "dflash": "a DFlash draft",
    "dflash2": "a DFlash draft",
    "eagle3": "an EAGLE draft",
    "imatrix": "an importance matrix",
}
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")


class ModelFileError(Exception):
    """A file that cannot be served. One line, naming the file and what to do."""


@frozen
class ModelFile:
    """A model that passed the checks. ``parts``: every file of it, the named one first."""

    path: str
    architecture: str
    parts: tuple[str, ...]
    size_bytes: int
    shape: ModelShape = field(hash=False)
    chat_template: str | None = field(default=None, hash=False)
    """Its own; ``None``: it brings none."""


def check_model_file(path: str) -> ModelFile:
    """Check that ``path`` is a whole, readable GGUF of a generating model, all parts of it.

    Reads headers only. Raises :class:`ModelFileError`.
    """
    summary = check_whole_file(path)
    architecture = summary.architecture
    if architecture is None:
        raise ModelFileError(f"{path} names no general.architecture: not a model file")
    if architecture in _NOT_TARGETS:
        raise ModelFileError(
            f"{path} is {_NOT_TARGETS[architecture]}, not a model: "
            "give the file of the language model itself"
        )
    parts = [path]
    tensors = list(summary.tensors)
    if summary.split_count > 1:
        match = _SPLIT_NAME.search(path)
        if match is None or int(match[2]) != summary.split_count:
            raise ModelFileError(
                f"{path} is part of a model split in {summary.split_count}, but is not named "
                f"NAME-00001-of-{summary.split_count:05}.gguf: restore the parts' names"
            )
        if int(match[1]) != 1:
            raise ModelFileError(f"{path} is part {int(match[1])} of a split model: give part 1")
        stem = path[: match.start()]
        for number in range(2, summary.split_count + 1):
            part = f"{stem}-{number:05}-of-{summary.split_count:05}.gguf"
            tensors += check_whole_file(part).tensors
            parts.append(part)
    shape = model_shape(architecture, summary.facts, tensors)
    size = sum(map(os.path.getsize, parts))
    return ModelFile(path, architecture, tuple(parts), size, shape, summary.chat_template)


def check_whole_file(path: str) -> GgufSummary:
    """Check that ``path`` is a readable GGUF that is not cut short, whatever it holds; its header.

    Raises :class:`ModelFileError`.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{path} cannot be read ({reason})") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ModelFileError(f"{path} is {kind}: give a .gguf file")
    # Only now open it: opening a FIFO would have blocked for ever.
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror})") from None
    if magic != b"GGUF":
        shown = "is empty" if not status.st_size else "is not a GGUF file (wrong first bytes)"
        raise ModelFileError(f"{path} {shown}: give a model in GGUF format")
    summary = read_gguf_header(path)
    if summary is None:
        raise ModelFileError(f"{path} is cut short or damaged in its header: fetch it again")
    if status.st_size < summary.needed_bytes:
        raise ModelFileError(
            f"{path} is cut short: {status.st_size} bytes of {summary.needed_bytes}: fetch it again"
        )
    return summary
