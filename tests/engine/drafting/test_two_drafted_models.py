"""Two models in one process, each with a draft, each answering several at once: what both say is
what one of them says alone and without a draft, in the bit-equal configuration.

Whole engines, as a server has them: two threads, two contexts of llama.cpp and two drafts beside
each other. Only the controllers are told to guess whatever it costs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import trio

import dflash_trio
from dflash_trio.cli import parse_command_line
from dflash_trio.engine import worker
from dflash_trio.engine.client import EngineClient, Generation
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.placement import place_models
from dflash_trio.generation.events import Finished, Retired, TextDelta
from dflash_trio.model_loading import load_llama
from tests.engine.drafting.scripted_provider import Always
from tests.engine.engine_helpers import prompt
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA
from tests.support.http_client import PATIENCE

pytestmark = pytest.mark.real

TRAINED = Path(dflash_trio.__file__).parent / "drafts" / "smollm2-135m-instruct-dflash.gguf"
PAIRS = (SEA, f"{BREAD}. {BREAD}. {BREAD[:30]}", f"{NIGHT}\n{NIGHT}\n{NIGHT[:20]}")
EXACT = (
    *("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on"),
    *("--prefix-cache-slots", "0", "--max-concurrency", "3", "--max-ctx", "256"),
)


def engine(name: str, model: Path, device: str, *draft: str) -> EngineClient:
    words = ["--model", str(model), "--model-name", name, "--target-device", device, *EXACT, *draft]
    config = parse_command_line(words, {}).config.models[0]
    (place,) = place_models([config], [check_model_file(config.path)])

    return EngineClient(
        name,
        lambda progress, stopped: load_llama(config, place, 1, progress, stopped),
    )


def always(longest: int, **_: object) -> Always:
    return Always(longest)


def submit(client: EngineClient, text: str) -> Generation:
    assert client.ready is not None
    prepared = prompt(client.ready.vocabulary.tokenize(text), 24, ignore_eos=True)
    hold = client.ready.ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens)
    assert hold is not None
    generation = client.submit(prepared, hold)
    generation.on_retired = functools.partial(client.ready.ledger.release, hold)
    return generation


async def text_of(generation: Generation) -> str:
    text = ""
    async for event in generation.events:
        if isinstance(event, Retired):
            return text
        assert isinstance(event, TextDelta | Finished), event
        text += event.text if isinstance(event, TextDelta) else ""
    raise AssertionError("it was never retired")


async def answers(clients: list[EngineClient]) -> list[list[str]]:
    """Of each engine, to all of the prompts at once."""
    texts = [[""] * len(PAIRS) for _ in clients]

    async def answer(place: int, number: int) -> None:
        texts[place][number] = await text_of(submit(clients[place], PAIRS[number]))

    async with trio.open_nursery() as nursery:
        for number in range(len(PAIRS)):
            for place in range(len(clients)):
                nursery.start_soon(answer, place, number)
    return texts


async def said_by(*clients: EngineClient) -> list[list[str]]:
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for client in clients:
                await nursery.start(client.run)
            texts = await answers(list(clients))
            for client in clients:
                drafts = client.statistics.drafts
                assert drafts is None or drafts.proposed > 30
                client.stop()
    return texts


async def test_two_models_with_drafts_say_what_one_says_without(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = await said_by(engine("plain", smollm2, "cpu:0"))
    assert len(set(plain)) == len(PAIRS)
    assert all(plain)
    monkeypatch.setattr(worker, "DraftController", always)
    monkeypatch.setattr(worker, "LookupController", always)
    trained = engine("trained", smollm2, "cpu:0", "--draft", str(TRAINED), "--draft-max", "4")
    itself = engine("itself", smollm2, "cpu:1", "--draft", str(smollm2), "--draft-max", "4")
    assert await said_by(trained, itself) == [plain, plain]
    lookup = engine("lookup", smollm2, "cpu:0", "--draft", "prompt-lookup", "--draft-max", "4")
    trained = engine("trained", smollm2, "cpu:1", "--draft", str(TRAINED), "--draft-max", "4")
    assert await said_by(lookup, trained) == [plain, plain]
