"""The house: an import points down, never up, and only its own files know llama.cpp."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_trio

PACKAGE = Path(dflash_trio.__file__).parent
ROOT = PACKAGE.parent

# Each floor with those it may import besides itself. `net` imports nothing of ours.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "generation": {"config"},
    "text": {"config", "generation"},
    "engine": {"config", "generation", "text"},
    "routing": {"config", "generation", "text", "engine"},
    "net": set(),
    "testing": set(),
    "api": {"config", "generation", "text", "engine", "routing", "net", "version"},
}
TOP = {
    "cli",
    "server",
    "__main__",
    "__init__",
    "console",
    "launch_checks",
    "launch_plan",
    "plan_text",
    "service_manager",
    "trace_settings",
    "traces",
    "log_setup",
    "load_progress",
    "model_loading",
}
"""What stands on everything."""

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def floor_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[str]:
    """Absolute names of every module that a file imports, wherever in it."""
    tree = ast.parse((PACKAGE / file).read_text())
    package = ["dflash_trio", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if module == "dflash_trio":
                yield from (
                    "dflash_trio.version"
                    if alias.name == "__version__"
                    else f"{module}.{alias.name}"
                    for alias in node.names
                )
            else:
                yield module


@pytest.mark.parametrize("file", FILES)
def test_an_import_points_down(file: str) -> None:
    floor = floor_of(file)
    assert floor in ALLOWED or floor in TOP, f"{file} stands on no known floor"
    if floor in TOP:
        return
    for module in imports(file):
        if module.split(".")[0] == "dflash_trio":
            target = module.split(".")[1]
            assert target == floor or target in ALLOWED[floor], f"{file} imports {module}"


@pytest.mark.parametrize("file", FILES)
def test_only_the_engines_llama_files_know_llama_cpp(file: str) -> None:
    if not file.startswith("engine/llama_"):
        assert not any(module.startswith("llama_cpp") for module in imports(file))


@pytest.mark.parametrize("file", FILES)
def test_only_one_file_knows_opentelemetry(file: str) -> None:
    if file != "traces.py":
        assert not any(module.startswith("opentelemetry") for module in imports(file))


@pytest.mark.parametrize("file", [f for f in FILES if floor_of(f) in ("generation", "text")])
def test_the_ground_floors_are_pure(file: str) -> None:
    assert not {"trio", "threading", "asyncio"} & {m.split(".")[0] for m in imports(file)}


@pytest.mark.parametrize("file", [f for f in FILES if floor_of(f) == "engine"])
def test_the_engine_floor_meets_trio_in_its_client_only(file: str) -> None:
    if file != "engine/client.py":
        assert "trio" not in {module.split(".")[0] for module in imports(file)}


def test_every_file_is_one_idea_long() -> None:
    long = {file: n for file in FILES if (n := len((PACKAGE / file).read_text().split("\n"))) > 450}
    assert not long
