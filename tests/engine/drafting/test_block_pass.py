"""A DFlash draft that guesses in one pass says what it says in llama.cpp's batches, and leaves to
llama.cpp what it cannot compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import dflash_trio.engine.llama_block_graph as llama_block_graph
import dflash_trio.engine.llama_block_pass as llama_block_pass
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.context_size import context_size, draft_context
from dflash_trio.engine.draft_file import check_draft_file
from dflash_trio.engine.drafting.provider import Wanted
from dflash_trio.engine.llama_block_pass import BlockPass
from dflash_trio.engine.llama_dflash import DFlashProvider
from dflash_trio.engine.llama_draft_context import DraftSpec
from dflash_trio.engine.llama_ggml import Device, EngineError, Workspace, read_row, tensors_of
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from tests.engine.test_runner_contract import load_llama
from tests.support.written_drafts import tiny_tokenizer, write_dflash, write_target

pytestmark = pytest.mark.real

SLOTS, MAX_CTX, CHUNK = 10, 1024, 256
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", TOKENIZER)


@pytest.fixture(scope="module")
def runner(target: Path) -> Iterator[LlamaRunner]:
    runner = load_llama(target, slots=SLOTS, max_ctx=MAX_CTX, chunk=CHUNK, threads=2)
    yield runner
    runner.close()


class Both:
    """A target, and the same draft twice: in llama.cpp's batches, and in one pass."""

    def __init__(self, runner: LlamaRunner, target: Path, draft: Path) -> None:
        self.runner = runner
        file = check_draft_file(str(draft), None, check_model_file(str(target)))
        size = context_size(trained=2048, slots=SLOTS, max_ctx=MAX_CTX, pool=None)
        self.spec = DraftSpec(
            file,
            (DevicePlacement("cpu", 0),),
            draft_context(size, file.spare, on_cpu=True),
            chunk=CHUNK,
            threads=2,
        )
        self.batches = self.provider(in_one_pass=False)
        self.one_pass = self.provider(in_one_pass=True)
        self.tokens: dict[int, list[int]] = {row: [] for row in range(SLOTS)}

    def provider(self, *, in_one_pass: bool) -> DFlashProvider:
        return DFlashProvider(
            self.runner.context,
            self.spec,
            batch_rows=self.runner.batch_rows,
            in_one_pass=in_one_pass,
        )

    def feed(self, row: int, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), CHUNK):
            some = tuple(tokens[at : at + CHUNK])
            batch = [BatchSlice(row, len(self.tokens[row]), some, 0)]
            assert self.runner.decode(batch) is DecodeOutcome.DONE
            for each in (self.batches, self.one_pass):
                each.observe(batch, [len(some)])
            self.tokens[row] += some

    def rewind(self, row: int, length: int) -> None:
        self.runner.rewind(row, length)
        for each in (self.batches, self.one_pass):
            each.rewind(row, length)
        del self.tokens[row][length:]

    def wanted(self, *rows: int, last: int = 77) -> list[Wanted]:
        limit = self.spec.file.longest
        return [Wanted(row, [*self.tokens[row], last], limit, 16) for row in rows]

    def guess_alike(self, *rows: int, last: int = 77) -> list[list[int]]:
        wanted = self.wanted(*rows, last=last)
        guesses = self.one_pass.propose(wanted)
        assert guesses == self.batches.propose(wanted)
        return guesses

    def close(self) -> None:
        for row in range(SLOTS):
            self.runner.rewind(row, 0)
        self.batches.close()
        self.one_pass.close()


Make = Callable[..., Both]


@pytest.fixture
def make(runner: LlamaRunner, target: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[Both] = []

    def make(**changes: Any) -> Both:
        draft = write_dflash(tmp_path / f"draft{len(made)}.gguf", TOKENIZER, **changes)
        made.append(Both(runner, target, draft))
        return made[-1]

    yield make
    for both in made:
        both.close()


def some_tokens(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


def graphs(both: Both) -> list[tuple[int, int, int]]:
    """Those that were computed: their first row, how many rows, and how many cells of each."""
    assert isinstance(both.one_pass._pass, BlockPass)
    return [(key.first, key.rows, key.cells) for key in both.one_pass._pass._graphs]


def test_whoever_is_guessed_for_at_once_the_guesses_are_llama_cpps(make: Make) -> None:
    both = make()
    assert both.one_pass.steady
    assert not both.batches.steady
    for row, count in enumerate((3, 9, 40, 250, 255, 256, 257, 5, 130, 700)):
        both.feed(row, some_tokens(count, row))
    dice = random.Random(3)
    for step in range(40):
        rows = dice.sample(range(SLOTS), dice.choice((1, 1, 2, 3, 5, SLOTS)))
        both.guess_alike(*rows, last=100 + step)
        row = dice.randrange(SLOTS)
        both.feed(row, some_tokens(dice.choice((1, 2, 8, 9)), step))
        if step % 5 == 0:
            both.rewind(row, len(both.tokens[row]) - 2)
    assert len({tuple(guess) for guess in both.guess_alike(*range(SLOTS))}) > 5
    # Rows alone, and all of a group whoever is there: no others are ever recorded.
    assert {(first, rows) for first, rows, cells in graphs(both) if cells} <= {
        *((row, 1) for row in range(SLOTS)),
        (0, 8),
    }


def test_a_row_goes_on_from_a_copy(make: Make) -> None:
    both = make()
    both.feed(1, some_tokens(60, 1))
    both.guess_alike(1)
    both.runner.copy(1, 9, 50)
    for each in (both.batches, both.one_pass):
        each.copy(1, 9, 50)
    both.tokens[9] = both.tokens[1][:50]
    both.feed(9, some_tokens(3, 2))
    # It is the copy that it goes on from: with the last tokens alone it would say something else.
    (copied,) = both.guess_alike(9)
    both.rewind(9, 0)
    both.feed(9, some_tokens(3, 2))
    assert both.guess_alike(9) != [copied]


def test_the_likeliest_tokens_are_ranked_as_in_llama_cpps_logits(make: Make) -> None:
    # 1,024 tokens: each group has one, so that none is lost.
    both = make()
    for row in range(4):
        both.feed(row, some_tokens(30 + row, row))
    wanted = both.wanted(0, 1, 2, 3)
    for mine, theirs in zip(both.one_pass.rank(wanted), both.batches.rank(wanted), strict=True):
        assert mine is not None
        assert theirs is not None
        for ours, others in zip(mine.tokens, theirs.tokens, strict=True):
            # The last ones are as likely as the next.
            assert list(ours)[:4] == list(others)[:4]
        for (our_chances,), (their_chances,) in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert our_chances == pytest.approx(their_chances, abs=0.1)


def test_a_vocabulary_that_cannot_be_grouped_is_sorted_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_block_graph, "FEWEST_GROUPS", 100_000)
    both = make()
    both.feed(2, some_tokens(50, 1))
    wanted = both.wanted(2)
    (mine,), (theirs,) = both.one_pass.rank(wanted), both.batches.rank(wanted)
    assert mine is not None
    assert theirs is not None
    assert [list(t)[:3] for t in mine.tokens] == [list(t)[:3] for t in theirs.tokens]


@pytest.mark.parametrize(
    "changes",
    [
        {"selector": 4},
        {"markov": True},
        {"facts": {"attention.scale": 0.1}},
        {"facts": {"embedding_scale": 2.0}},
        {"facts": {"rope.scaling.factor": 2.0}},
    ],
    ids=str,
)
def test_what_the_pass_does_not_know_is_left_to_llama_cpp(
    make: Make, changes: dict[str, Any]
) -> None:
    both = make(**changes)
    assert not both.one_pass.steady
    both.feed(0, some_tokens(20, 1))
    both.guess_alike(0)


def test_a_pool_with_fewer_cells_than_all_slots_might_fill_is_left_to_llama_cpp(
    make: Make,
) -> None:
    both = make()
    both.spec = attrs.evolve(
        both.spec, context=attrs.evolve(both.spec.context, pool=SLOTS * MAX_CTX // 2)
    )
    provider = both.provider(in_one_pass=True)
    assert not provider.steady
    provider.close()


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_where_there_is_no_room_for_the_pass_the_draft_is_left_to_llama_cpp(
    make: Make, nth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = make()
    allocate, asked, closed = Device.allocate, 0, []

    def full(self: Device, size: int) -> Any:
        nonlocal asked
        asked += 1
        if asked == nth:
            raise EngineError(f"no {size} bytes are free on the device")
        return allocate(self, size)

    close = Device.close

    def watched(self: Device) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Device, "allocate", full)
    monkeypatch.setattr(Device, "close", watched)
    provider = both.provider(in_one_pass=True)
    assert not provider.steady
    assert closed
    assert all(device.backend is None for device in closed)
    assert "draft0.gguf is left to llama.cpp: no " in caplog.text
    batch = [BatchSlice(0, 0, tuple(some_tokens(20, 1)), 0)]
    assert both.runner.decode(batch) is DecodeOutcome.DONE
    provider.observe(batch, [20])
    assert len(provider.propose([Wanted(0, [*batch[0].tokens, 77], 5)])[0]) == 5
    provider.close()


def test_a_row_whose_features_are_all_injected_goes_on_from_its_copy(make: Make) -> None:
    both = make()
    both.feed(1, some_tokens(60, 1))
    both.guess_alike(1)
    both.runner.copy(1, 5, 60)
    for each in (both.batches, both.one_pass):
        each.copy(1, 5, 60)
    both.tokens[5] = list(both.tokens[1])
    for token in some_tokens(6, 2):
        both.guess_alike(5, last=token)
        both.feed(5, [token])
    rows = both.one_pass._rows[5], both.batches._rows[5]
    assert {(row.begin, row.known) for row in rows} == {(0, 66)}


def test_a_walk_of_rewinds_and_copies_is_guessed_for_alike(make: Make) -> None:
    both, dice = make(), random.Random(7)
    for step in range(150):
        row = dice.randrange(4)
        match dice.choice(("feed", "feed", "guess", "guess", "rewind", "copy")):
            case "feed" if len(both.tokens[row]) < 600:
                both.feed(row, some_tokens(dice.choice((1, 1, 3, 8, 9, 30)), step))
            case "guess":
                rows = [r for r in range(4) if both.tokens[r]]
                if rows:
                    both.guess_alike(*rows, last=100 + step)
            case "rewind":
                both.rewind(row, dice.randrange(len(both.tokens[row]) + 1))
            case "copy" if both.tokens[row]:
                other = 4 + row
                length = dice.randint(1, len(both.tokens[row]))
                both.rewind(other, 0)
                both.runner.copy(row, other, length)
                for each in (both.batches, both.one_pass):
                    each.copy(row, other, length)
                both.tokens[other] = both.tokens[row][:length]
                both.guess_alike(other)


def test_a_draft_whose_weights_are_no_numbers_costs_time_and_nothing_else(make: Make) -> None:
    both = make()
    both.feed(0, some_tokens(20, 1))
    one = both.one_pass._pass
    assert isinstance(one, BlockPass)
    both.one_pass._rows[0].pending.features[:] = np.nan
    (guess,) = both.one_pass.propose(both.wanted(0))
    assert all(0 <= token < both.runner.vocabulary.size for token in guess)
    (ranking,) = both.one_pass.rank(both.wanted(0))
    assert ranking is not None
    assert all(0 <= t < both.runner.vocabulary.size for place in ranking.tokens for t in place)


def test_more_graphs_than_are_kept_take_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_block_pass, "MOST_GRAPHS", 3)
    both = make()
    for row in range(SLOTS):
        both.feed(row, some_tokens(20 + row, row))
    for _ in range(2):
        for row in range(SLOTS):
            both.guess_alike(row)
    assert len(graphs(both)) == 3


def test_no_graph_is_made_anew_for_a_larger_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    grew: list[bool] = []
    place = Workspace.place

    def placed(self: Workspace, graph: Any) -> bool:
        grew.append(place(self, graph))
        return grew[-1]

    both = make()
    monkeypatch.setattr(Workspace, "place", placed)
    for row in range(SLOTS):
        both.feed(row, some_tokens(100 * row + 1, row))
    both.guess_alike(0)
    both.guess_alike(*range(SLOTS))
    both.one_pass.rank(both.wanted(*range(SLOTS)))
    assert len(grew) >= 4
    assert not any(grew)


def test_a_pass_that_is_warm_guesses_the_same(make: Make) -> None:
    both = make()
    both.feed(0, some_tokens(20, 1))
    expected = both.guess_alike(0)
    assert isinstance(both.one_pass._pass, BlockPass)
    fresh = both.provider(in_one_pass=True)
    assert isinstance(fresh._pass, BlockPass)
    fresh._pass.warm_up(ranks=False)
    assert {(key.first, key.rows) for key in fresh._pass._graphs} >= {
        *((row, 1) for row in range(SLOTS)),
        (0, 8),
        (8, 2),
    }
    both.rewind(0, 0)
    # All of them read the same layers: the one that is closed first is not to be the last one.
    before, both.one_pass = both.one_pass, fresh
    both.feed(0, some_tokens(20, 1))
    assert both.guess_alike(0) == expected
    before.close()


def test_embeddings_are_those_of_the_file_whatever_their_type(smollm2: Path) -> None:
    import gguf

    runner = load_llama(smollm2, slots=1, max_ctx=256)
    try:
        model = llama_block_pass.llama.llama_get_model(runner.context)
        address = dict(tensors_of(model))["token_embd.weight"]
        stored = next(
            tensor
            for tensor in gguf.GGUFReader(smollm2).tensors
            if tensor.name == "token_embd.weight"
        )
        for token in (0, 1, 4711, 49151):
            expected = gguf.dequantize(stored.data[token : token + 1], stored.tensor_type)[0]
            np.testing.assert_allclose(read_row(address, token), expected, rtol=1e-6)
    finally:
        runner.close()
