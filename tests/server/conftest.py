"""Servers on the two real models that whole modules of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.support.models import GEMMA, SMOLLM2
from tests.support.real_models import two_real_models
from tests.support.running import ServerProcess


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def first_model(request: pytest.FixtureRequest) -> str:
    """The file of the model that is asked first, and so answers."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared_server(
    models: dict[str, Path], first_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("shared_server")
    with two_real_models(models, first_model, folder) as process:
        yield process


@pytest.fixture
def real_server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The module's server, idle before and after each test."""
    yield shared_server
    trio.run(shared_server.until_idle)
