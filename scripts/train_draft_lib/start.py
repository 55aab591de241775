"""What training begins with instead of random weights: those of a draft exported before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import export

OPTIONS = {
    "target_layers": "--target-layers",
    "layers": "--layers",
    "feed_forward": "--feed-forward",
    "block": "--block",
    "mask_token": "--mask-token",
    "rope_base": "--rope-base",
}
"""Of the command, for what of a shape is not the target's own."""


class UnfitStart(Exception):
    """The file is no draft that this run can begin with; the text says why and what to do."""


def weights(
    path: Path, shape: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The state in ``path``, a draft of the same ``shape``; ``sizes``: of each of its parameters.

    The features' scale is still in ``fc``: that of this run is known only when it has features.
    """
    try:
        found, state = export.read(path)
    except OSError as error:
        raise UnfitStart(f"{error.strerror}: {_another()}") from error
    except Exception as error:  # gguf checks little: a broken file fails wherever it is read
        raise UnfitStart(f"it is no whole draft of this script's: {_another()}") from error
    differing = [name for name in shape if not _equal(shape[name], found[name])]
    if differing:
        theirs = " and ".join(f"{_words(name)} {_text(found[name])}" for name in differing)
        ours = " and ".join(_text(shape[name]) for name in differing)
        raise UnfitStart(f"it has {theirs}, and this run {ours}: {_remedy(differing, found)}")
    if {name: values.shape for name, values in state.items()} != sizes:
        raise UnfitStart(f"its tensors have other sizes than it says: {_another()}")
    return state


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float):
        return bool(np.float32(ours) == np.float32(theirs))  # as the file holds it
    return bool(ours == theirs)


def _words(name: str) -> str:
    return OPTIONS.get(name, name).removeprefix("--").replace("_", "-")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:.9g}"


def _remedy(differing: list[str], found: Mapping[str, Any]) -> str:
    if any(name not in OPTIONS for name in differing):
        return "it was made for another target: name a draft of this one, or leave the option out"
    options = " ".join(f"{OPTIONS[name]} {_text(found[name])}" for name in differing)
    return f"add {options}, or leave the option out"


def _another() -> str:
    return "name another file, or leave the option out to begin with random weights"
