"""Fixtures that every folder of tests may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.models import GEMMA, SMOLLM2, find_models
from tests.support.stalls import stalls_are_found_soon

__all__ = ["gemma", "models", "smollm2", "stalls_are_found_soon"]

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = find_models(tmp_path_factory.mktemp("models"))
    if isinstance(found, str):
        pytest.skip(f"no real models: {found}")
    return found


@pytest.fixture(scope="session")
def smollm2(models: dict[str, Path]) -> Path:
    return models[SMOLLM2]


@pytest.fixture(scope="session")
def gemma(models: dict[str, Path]) -> Path:
    return models[GEMMA]
