"""What is told of a draft: the tokens that its guesses brought, and whether it is at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import jsonschema
import pytest

from dflash_trio.engine.drafting.drafter import Drafter
from dflash_trio.engine.drafting.lazy import LazyDraft
from dflash_trio.engine.drafting.provider import DraftProvider
from dflash_trio.engine.model_runner import ModelLoadError
from dflash_trio.generation.request import PreparedPrompt
from dflash_trio.generation.status import DraftState, DraftStatistics
from tests.api.test_introspection import schema
from tests.engine.drafting.drafted import Engine, GivesUp, right
from tests.engine.drafting.scripted_provider import Always, CheckingProvider
from tests.engine.engine_helpers import prompt
from tests.engine.test_worker import running as running_worker
from tests.support.http_client import PATIENCE, request
from tests.support.running import is_idle, running
from tests.support.scripted import answer, scripted_config, scripted_load

ENDS: dict[str, tuple[PreparedPrompt, str, int]] = {
    "at the end of the text": (prompt("q>", 60), "abcde", 1),
    "at a stop string": (prompt("q>", 60, stop=("lm",)), "abcdefghijklmnopq", 1),
    "at the limit, which nothing is guessed for": (prompt("q>", 12), "abcdefghijklmnopq", 0),
    "as its grammar gives up": (
        attrs.evolve(prompt("q>", 60), constraint=GivesUp()),
        "abcdefgh",
        1,
    ),
}
"""Requests, what the model says, and how many runs end with an accepted guess."""


def drafts_of(engine: Engine) -> DraftStatistics:
    drafts = engine.scheduler.statistics().drafts
    assert drafts is not None
    return drafts


@pytest.mark.parametrize("tree", [None, 6])
@pytest.mark.parametrize("how", ENDS)
def test_what_guesses_brought_is_what_came_of_them_however_an_answer_ends(
    how: str, tree: int | None
) -> None:
    asked, says, alone = ENDS[how]
    plain = Engine(script=answer(says))
    plain.run(attrs.evolve(asked, constraint=None))
    engine = Engine(right(plain.said), tree=tree, longest=6, script=answer(says))
    engine.run(asked)
    drafts = drafts_of(engine)
    slices = [item for batch in engine.batches for item in batch]
    unguessed = sum(item.outputs == 1 for item in slices)
    assert drafts.runs == sum(item.outputs > 1 for item in slices) > 0
    assert drafts.committed == engine.scheduler.statistics().completion_tokens - unguessed
    assert drafts.committed == drafts.accepted + drafts.runs - alone
    assert drafts.committed_per_run == pytest.approx(drafts.committed / drafts.runs)


def test_nothing_is_said_of_what_guesses_bring_before_there_were_any() -> None:
    assert DraftStatistics("scripted").committed_per_run is None


# ------------------------------------------------------------------------- whether it is at work


def test_a_draft_that_naps_is_told_from_one_that_is_awake() -> None:
    provider = CheckingProvider(lambda _tokens, limit: [7] * limit)
    drafter = Drafter(provider, Always(), verify_limit=63)
    assert drafter.statistics().state == "awake"
    drafter._naps.asleep = True
    drafter.choose([drafter.new_record([1])])
    assert drafter.asleep
    assert drafter.statistics().state == "napping"
    drafter._naps.asleep = False
    drafter.choose([drafter.new_record([1])])
    assert drafter.statistics().state == "awake"


def failing() -> DraftProvider:
    raise ModelLoadError("the draft d.gguf is gone")


def sevens() -> DraftProvider:
    return CheckingProvider(lambda _tokens, limit: [7] * limit)


@pytest.mark.parametrize(
    ("load", "then"), [(sevens, ["awake", "unloaded", "awake"]), (failing, ["given-up"] * 3)]
)
def test_a_lazy_draft_is_loaded_or_is_not_or_was_given_up(
    load: Callable[[], DraftProvider], then: list[DraftState]
) -> None:
    draft = LazyDraft(load, kind="dflash", longest=8, idle_seconds=0.0)
    drafter = Drafter(draft, Always(), verify_limit=63)
    assert drafter.statistics().state == "unloaded"
    said = []
    for change in (draft.wake, draft.rest, draft.wake):
        change()
        said.append(drafter.statistics().state)
    assert said == then


def test_a_nap_is_over_when_its_draft_is_freed() -> None:
    draft = LazyDraft(sevens, kind="dflash", longest=8, idle_seconds=0.0)
    drafter = Drafter(draft, Always(), verify_limit=63)
    draft.wake()
    drafter._naps.asleep = True
    drafter.choose([drafter.new_record([1])])
    draft.rest()
    assert drafter.statistics().state == "unloaded"


def of_lazy(load: Callable[[], DraftProvider], idle_seconds: float) -> Callable[[], DraftProvider]:
    return lambda: LazyDraft(load, kind="scripted", longest=8, idle_seconds=idle_seconds)


def test_that_a_draft_was_freed_is_told_although_nobody_comes() -> None:
    def state() -> DraftState:
        drafts = thread.worker.statistics.drafts
        assert drafts is not None
        return drafts.state

    with running_worker(scripted_load(drafts=of_lazy(sevens, 0.0))) as thread:
        thread.until_ready()
        assert state() == "unloaded"
        thread.submit(1, prompt("abc", 5))
        thread.until_retired(1)
        patience = time.monotonic() + PATIENCE
        while state() != "unloaded":
            assert time.monotonic() < patience
            time.sleep(0.01)


@pytest.mark.parametrize(("load", "state"), [(sevens, "awake"), (failing, "given-up")])
@pytest.mark.parametrize(("name", "path"), [("status", "/status/json"), ("props", "/props")])
async def test_the_status_pages_say_whether_a_draft_is_at_work(
    name: str, path: str, load: Callable[[], DraftProvider], state: DraftState
) -> None:
    validator = jsonschema.Draft202012Validator(schema(name))
    model = scripted_load(script=answer("abc"), drafts=of_lazy(load, 300.0))
    seen: list[Any] = []
    async with running((scripted_config("drafted"), model)) as server:
        for _ in range(2):
            page = (await request(server.port, "GET", path)).json()
            validator.validate(page)
            seen.append(page["models"][0]["draft"]["state"])
            assert (await server.chat("x")).status == 200
            await server.until(is_idle)
    assert seen == ["unloaded", state]
