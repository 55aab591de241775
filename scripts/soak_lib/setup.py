"""The server under test: its command line, and how large its rooms are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import quote

from attrs import field, frozen

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO_MODELS = (
    ROOT / ".demo" / "models" / "smollm2-135m-instruct-q4_1.gguf",
    ROOT / ".demo" / "models" / "gemma3-270m-q4_k_m.gguf",
)

FAT_NAME = "\N{WATER WAVE}" * 100
"""A model's name is in each chunk of a stream. This one makes chunks fat enough that a client
which does not read soon fills the kernel's buffers; and headers cannot hold it as it is."""


@frozen
class ModelSetup:
    """One block. ``slots`` sequences of ``max_ctx`` tokens each."""

    name: str
    slots: int
    max_ctx: int
    path: Path | None = None
    """``None``: scripted."""

    @property
    def header(self) -> str:
        """The name as the header ``x-dflash-model`` has it."""
        return self.name if self.name.isascii() else quote(self.name)


@frozen
class Setup:
    """A server: its models in priority order, and its listener."""

    models: tuple[ModelSetup, ...]
    queue_limit: int = 6
    stall_timeout: float = 3.0
    max_body_bytes: int = 1024 * 1024
    step_seconds: float = 0.002
    """Of a scripted model."""
    extra: tuple[str, ...] = field(default=())
    """Further options of a real server's first block."""

    @property
    def scripted(self) -> bool:
        return self.models[0].path is None

    @property
    def slots(self) -> int:
        return sum(model.slots for model in self.models)

    @property
    def tokens_per_word(self) -> int:
        """Of the prompts made here: a scripted model's tokens are bytes."""
        return 5 if self.scripted else 1

    @property
    def long_prompt_tokens(self) -> int:
        """A prefill of several steps, which every model has room for."""
        smallest = min(model.max_ctx for model in self.models)
        return smallest * 3 // 4 if self.scripted else smallest // 3

    @property
    def command(self) -> list[str]:
        return self._scripted_command() if self.scripted else self._real_command()

    def _scripted_command(self) -> list[str]:
        specification = {
            "models": [
                {
                    "name": model.name,
                    "slots": model.slots,
                    "max_ctx": model.max_ctx,
                    "step_seconds": self.step_seconds,
                }
                for model in self.models
            ],
            "listener": {
                "routing_queue_limit": self.queue_limit,
                "client_stall_timeout": self.stall_timeout,
                "max_body_bytes": self.max_body_bytes,
            },
        }
        return [sys.executable, "-m", "tests.support.scripted_server", json.dumps(specification)]

    def _real_command(self) -> list[str]:
        command = [sys.executable, "-m", "dflash_trio", "--port", "0"]
        command += ["--routing-queue-limit", str(self.queue_limit)]
        command += ["--client-stall-timeout", f"{self.stall_timeout:g}"]
        command += ["--max-body-bytes", str(self.max_body_bytes)]
        if len(self.models) > 1:
            command.append("--load-balancing")
        for index, model in enumerate(self.models):
            command += ["--model", str(model.path), "--model-name", model.name]
            command += ["--target-device", f"cpu:{index}", "--max-ctx", str(model.max_ctx)]
            command += ["--max-concurrency", str(model.slots), "--chunk", "128"]
            # What is kept of earlier prompts changes the portions that later ones are computed in.
            command += ["--prefix-cache-slots", "0"]
            if model.slots > 1:
                # Where neighbours change nothing, every answer can be compared with the last one.
                command += ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]
                command += ["--flash-attn", "on"]
            if index == 0:
                command += self.extra
        return command


def two_models(
    paths: tuple[Path, Path] | None, *, queue_limit: int = 6, stall_timeout: float = 3.0
) -> Setup:
    """A primary with two slots and a smaller second model with one. ``None``: scripted."""
    first, second = paths or (None, None)
    # A real prefill of some hundred tokens takes seconds where two CPU models share two cores.
    larger, smaller = (384, 256) if paths else (2048, 1024)
    return Setup(
        (
            ModelSetup("a" + FAT_NAME, 2, larger, first),
            ModelSetup("b" + FAT_NAME, 1, smaller, second),
        ),
        queue_limit=queue_limit,
        stall_timeout=stall_timeout,
    )


def one_slot(path: Path | None, *, queue_limit: int) -> Setup:
    """One model with one slot."""
    return Setup((ModelSetup("only", 1, 2048, path),), queue_limit=queue_limit, step_seconds=0.005)
