"""Every change to the cache's rows is told to the draft, whoever makes it."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest

from dflash_trio.engine.drafting.row_mirror import RowMirror
from dflash_trio.engine.model_runner import BatchSlice, EngineError
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.sequence import Sequence, TokenView
from tests.engine.drafting.drafted import Engine, at_random, right
from tests.engine.drafting.scripted_provider import CheckingProvider
from tests.engine.engine_helpers import prompt, reserve
from tests.support.http_client import PATIENCE


def conversation(turns: int, *, length: int = 12) -> list[Any]:
    """Prompts each of which begins with the one before and its answer."""
    engine = Engine()
    text: tuple[int, ...] = tuple(b"once upon a time there was a very long beginning that is kept>")
    requests = []
    for turn in range(turns):
        requests.append(prompt(text, length))
        engine.run(requests[-1])
        text = (*engine.said[-1], *f"turn {turn}>".encode())
    return requests


@pytest.mark.parametrize("shares_cells", [True, False])
@pytest.mark.parametrize("prefixes", [1, 3])
def test_kept_prompts_that_are_gone_on_from_keep_what_the_draft_knows(
    prefixes: int, shares_cells: bool
) -> None:
    requests = conversation(4)
    others = [prompt(f"another {name}" * 9, 20) for name in "abcdef"]
    plain = Engine(prefixes=prefixes, shares_cells=shares_cells, slots=2)
    everything = [*requests[:2], *others[:3], *requests[2:], *others[3:], *requests]
    expected = plain.run(*everything)
    engine = Engine(
        at_random(right(plain.said), 3), prefixes=prefixes, shares_cells=shares_cells, slots=2
    )
    told = engine.run(*everything)
    assert {key: answer.text for key, answer in told.items()} == {
        key: answer.text for key, answer in expected.items()
    }
    assert any(answer.finished.usage.cached_tokens for answer in told.values())


def test_a_draft_is_told_of_copies_for_several_answers() -> None:
    request = attrs.evolve(prompt("several", 20), n=3)
    plain = Engine()
    expected = plain.run(request)
    engine = Engine(right(plain.said))
    assert engine.run(request) == expected
    assert engine.provider is not None
    # Each of the three was asked for, and each knew its prompt without having seen it prefilled.
    assert {item.row for asked in engine.provider.asked for item in asked} == {0, 1, 2}


def test_a_row_that_could_not_be_loaded_is_unknown() -> None:
    runner = ScriptedRunner(slots=2, cells=10)
    provider = CheckingProvider(lambda tokens, limit: [])
    mirror = RowMirror(runner, provider)
    runner.decode([BatchSlice(0, 0, tuple(b"abcdef"), 1)])
    provider.rows[1] = [1]
    with pytest.raises(EngineError):
        mirror.load(1, runner.save(0))
    assert provider.rows[1] is None


def test_a_view_of_a_sequence_reads_like_all_of_its_tokens_as_it_grows() -> None:
    engine = Engine()
    prepared = prompt("abcd", 9)
    sequence = Sequence(1, prepared, reserve(engine.ledger, prepared))
    view = TokenView(sequence)
    assert list(view) == list(b"abcd")
    sequence.answer += [1, 2, 3]
    whole = [*b"abcd", 1, 2, 3]
    assert len(view) == 7
    assert list(view) == whole
    assert [view[at] for at in range(-7, 7)] == [whole[at] for at in range(-7, 7)]
    for begin in (None, -9, -3, 0, 2, 4, 5, 9):
        for end in (None, -9, -3, 0, 2, 4, 5, 9):
            for step in (None, 1, 2, -1):
                assert list(view[begin:end:step]) == whole[begin:end:step]
    for beyond in (7, -8):
        with pytest.raises(IndexError):
            view[beyond]


def test_a_draft_is_closed_before_the_model_on_the_worker_s_thread() -> None:
    from dflash_trio.engine.admission import KVLedger
    from dflash_trio.engine.worker import EngineWorker, LoadedModel

    closed: list[tuple[str, int]] = []

    class Draft(CheckingProvider):
        def close(self) -> None:
            closed.append(("draft", threading.get_ident()))

    class Runner(ScriptedRunner):
        def close(self) -> None:
            closed.append(("model", threading.get_ident()))
            super().close()

    def load(_progress: object, _stopped: object) -> LoadedModel:
        ledger = KVLedger(slots=1, pool=100, max_ctx=100, decode_headroom=8)
        draft = Draft(lambda tokens, limit: [])
        return LoadedModel(Runner(cells=100), ledger, 32, drafts=draft, verify_limit=9)

    worker = EngineWorker("drafted", load, lambda _: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.stop()
    thread.join(PATIENCE)
    assert closed == [("draft", thread.ident), ("model", thread.ident)]
