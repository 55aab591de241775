"""Drafts in a real server: refused before anything loads, loaded with their model or on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.test_startup import launch, refused
from tests.support.http_client import request
from tests.support.running import server_process
from tests.support.written_drafts import tiny_tokenizer, write_dflash, write_target

pytestmark = pytest.mark.real


def test_a_draft_that_reads_layers_is_refused_where_there_are_none_to_read(
    gemma: Path, tmp_path: Path
) -> None:
    draft = write_dflash(tmp_path / "draft.gguf", tiny_tokenizer(300))
    line = refused(launch(str(gemma), "--draft", str(draft)))
    assert line.endswith(
        f"{draft} reads its target's layers, and llama.cpp does not show those of gemma3 "
        f"({gemma}): give a whole model as --draft, or leave it out"
    )


def test_a_draft_with_another_vocabulary_is_refused_before_anything_loads(
    smollm2: Path, gemma: Path
) -> None:
    line = refused(launch(str(smollm2), "--draft", str(gemma)))
    assert f"the draft {gemma} has not the vocabulary of {smollm2}: its tokens are of the" in line


def test_a_whole_model_makes_no_trees(smollm2: Path) -> None:
    line = refused(launch(str(smollm2), "--draft", str(smollm2), "--ddtree"))
    assert f"--ddtree wants a draft that ranks tokens, and {smollm2} is a whole model" in line


@pytest.mark.parametrize("options", [(), ("--lazy-draft",)])
async def test_a_model_verifies_trees_of_its_draft_and_says_so(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    target = write_target(tmp_path / "target.gguf", tiny_tokenizer())
    draft = write_dflash(tmp_path / "draft.gguf", tiny_tokenizer())
    arguments = [
        *(str(target), "--draft", str(draft), "--port=0", "--max-ctx=256", *options),
        *("--ddtree", "--ddtree-budget", "9", "--max-concurrency", "2"),
    ]
    with server_process(arguments) as server:
        await server.until_ready()
        body = {"prompt": "word", "max_tokens": 60, "ignore_eos": True, "n": 2}
        answer = await request(server.port, "POST", "/v1/completions", body)
        assert answer.json()["usage"]["completion_tokens"] == 120
        (model,) = (await server.until_idle())["models"]
        told = model["draft"]
        assert (told["kind"], told["verification"], told["tree_budget"]) == ("dflash", "tree", 9)
        assert told["proposed"] > 0
        server.signal()
        assert await server.exit_code() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("options", [(), ("--lazy-draft",)])
async def test_a_model_loads_with_its_draft_and_answers(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    target = write_target(tmp_path / "target.gguf", tiny_tokenizer())
    draft = write_dflash(tmp_path / "draft.gguf", tiny_tokenizer())
    arguments = [str(target), "--draft", str(draft), "--port=0", "--max-ctx=256", *options]
    with server_process(arguments) as server:
        await server.until_ready()
        body = {"prompt": "word", "max_tokens": 20, "ignore_eos": True}
        answer = await request(server.port, "POST", "/v1/completions", body)
        assert answer.json()["usage"]["completion_tokens"] == 20
        (model,) = (await server.until_idle())["models"]
        assert model["draft"]["kind"] == "dflash"
        assert model["draft"]["verification"] == "chain"
        assert model["draft"]["tree_budget"] is None
        assert model["placement"]["draft_device"] == "cpu:0"
        server.signal()
        assert await server.exit_code() == 0
    assert "Traceback" not in server.log
    loads = f"target loads its draft (dflash) {draft}"
    assert loads in server.log
    assert (server.log.index(loads) > server.log.index("target is ready")) == bool(options)
