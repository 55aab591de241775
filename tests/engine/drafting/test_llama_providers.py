"""What drafts on llama.cpp promise: guesses depend on their sequence alone, whatever became of its
row and whoever is beside it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import dflash_trio.engine.llama_block_outputs as llama_block_outputs
import dflash_trio.engine.llama_dflash as llama_dflash
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.context_size import context_size, draft_context
from dflash_trio.engine.draft_file import check_draft_file
from dflash_trio.engine.drafting.provider import DraftProvider, Wanted
from dflash_trio.engine.llama_dflash import DFlashProvider
from dflash_trio.engine.llama_draft_abi import LayerInputs
from dflash_trio.engine.llama_draft_context import DraftSpec
from dflash_trio.engine.llama_draft_model import DraftModelProvider
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome
from tests.engine.test_runner_contract import load_llama
from tests.support.written_drafts import (
    HEAD,
    HEADS,
    HEADS_KV,
    MASK_TOKEN,
    tiny_tokenizer,
    write_dflash,
    write_target,
)

pytestmark = pytest.mark.real

SLOTS, MAX_CTX, CHUNK = 3, 256, 64
CPU = (DevicePlacement("cpu", 0),)
TOKENIZER = tiny_tokenizer()
STEADY = " in batches of one size, as on a GPU"
IN_ONE_PASS = " in one pass, as on a GPU"
KINDS = [
    "dflash",
    "dflash" + STEADY,
    "dflash" + IN_ONE_PASS,
    "dflash2",
    "dspark",
    "dspark-behind",
    "draft-model",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of nonsense."""
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", TOKENIZER)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "dflash": write_dflash(folder / "dflash.gguf", TOKENIZER),
        "dflash2": write_dflash(folder / "dflash2.gguf", TOKENIZER, selector=4),
        "dspark": write_dflash(folder / "dspark.gguf", TOKENIZER, markov=True),
        "dspark-behind": write_dflash(
            folder / "dspark-behind.gguf", TOKENIZER, markov=True, from_anchor=False
        ),
        "draft-model": write_target(folder / "model.gguf", TOKENIZER, layers=2, seed=3),
        "neutral-dflash2": write_dflash(
            folder / "neutral-dflash2.gguf", TOKENIZER, selector=4, neutral=True
        ),
        "neutral-dspark": write_dflash(
            folder / "neutral-dspark.gguf", TOKENIZER, markov=True, neutral=True
        ),
        "neutral-dspark-behind": write_dflash(
            folder / "neutral-dspark-behind.gguf",
            TOKENIZER,
            markov=True,
            from_anchor=False,
            neutral=True,
        ),
    }


@pytest.fixture(params=[None, 400], ids=["partitioned", "shared"], scope="module")
def runner(request: pytest.FixtureRequest, target: Path) -> Iterator[LlamaRunner]:
    runner = load_llama(target, slots=SLOTS, max_ctx=MAX_CTX, pool=request.param, chunk=CHUNK)
    yield runner
    runner.close()


class Rows:
    """A target and its draft, with sequences whose tokens the test decides on."""

    def __init__(self, runner: LlamaRunner, provider: DraftProvider) -> None:
        self.runner = runner
        self.provider = provider
        self.tokens: dict[int, list[int]] = {row: [] for row in range(SLOTS)}

    def feed(self, **more: Sequence[int]) -> None:
        """Let the target compute more of some rows, by their names ``r0``, ``r1``, ..., at once."""
        batch = [
            BatchSlice(row, len(self.tokens[row]), tuple(tokens), 0)
            for row, tokens in sorted(
                ((int(name[1:]), tokens) for name, tokens in more.items()), reverse=True
            )
        ]
        assert self.runner.decode(batch) is DecodeOutcome.DONE
        self.provider.observe(batch, [len(item.tokens) for item in batch])
        for item in batch:
            self.tokens[item.seq_id] += item.tokens

    def rewind(self, row: int, length: int) -> None:
        self.runner.rewind(row, length)
        self.provider.rewind(row, length)
        del self.tokens[row][length:]

    def copy(self, source: int, row: int, length: int) -> None:
        self.runner.copy(source, row, length)
        self.provider.copy(source, row, length)
        self.tokens[row] = self.tokens[source][:length]

    def guess(self, last: int, *rows: int, limit: int = 5) -> list[list[int]]:
        """What follows in some rows after the token ``last``."""
        return self.provider.propose(
            [Wanted(row, [*self.tokens[row], last], limit) for row in rows]
        )

    def clear(self) -> None:
        for row in range(SLOTS):
            self.rewind(row, 0)


MakeRows = Callable[..., Rows]


@pytest.fixture
def make(runner: LlamaRunner, target: Path, drafts: dict[str, Path]) -> Iterator[MakeRows]:
    """Makes drafts for the runner, one after the other, by their kinds."""
    made: list[Rows] = []

    def close() -> None:
        if made:
            rows = made.pop()
            rows.clear()
            rows.provider.close()

    def make(kind: str, *, longest: int | None = None) -> Rows:
        close()
        steady, in_one_pass = kind.endswith(STEADY), kind.endswith(IN_ONE_PASS)
        kind = kind.removesuffix(STEADY).removesuffix(IN_ONE_PASS)
        pool = 400 if runner.shares_cells else None
        file = check_draft_file(str(drafts[kind]), longest, check_model_file(str(target)))
        size = context_size(trained=2048, slots=SLOTS, max_ctx=MAX_CTX, pool=pool)
        context = draft_context(size, file.spare, on_cpu=True)
        spec = DraftSpec(file, CPU, context, chunk=CHUNK, threads=1)
        provider: DraftProvider
        if file.is_block_draft:
            provider = DFlashProvider(
                runner.context,
                spec,
                batch_rows=runner.batch_rows,
                steady_shapes=steady,
                in_one_pass=in_one_pass,
            )
        else:
            provider = DraftModelProvider(spec, vocabulary_size=runner.vocabulary.size)
        assert provider.kind == file.kind
        assert provider.longest == file.longest
        made.append(Rows(runner, provider))
        return made[0]

    yield make
    close()


def some_tokens(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


LONG, SHORT, OTHER = some_tokens(150, 1), some_tokens(9, 2), some_tokens(40, 3)


def feed_long(rows: Rows, row: int, tokens: Sequence[int]) -> None:
    for at in range(0, len(tokens), CHUNK):
        rows.feed(**{f"r{row}": tokens[at : at + CHUNK]})


@pytest.fixture(params=KINDS)
def rows(request: pytest.FixtureRequest, make: MakeRows) -> Rows:
    return make(request.param)


def alone(rows: Rows, tokens: Sequence[int], last: int = 77, limit: int = 5) -> list[int]:
    """What a fresh row 0 guesses after these tokens, which it gets as a prompt."""
    rows.clear()
    feed_long(rows, 0, tokens)
    guess: list[int] = []
    for _ in range(4):  # a draft model works a long prompt off in several goes
        guess = guess or rows.guess(last, 0, limit=limit)[0]
    rows.clear()
    return guess


# --------------------------------------------------------------------------------- all kinds


def test_as_many_tokens_are_guessed_as_are_wanted(rows: Rows) -> None:
    rows.feed(r0=SHORT)
    longest = rows.provider.longest
    for limit in (1, 2, longest):
        assert len(rows.guess(77, 0, limit=limit)[0]) == limit
    # A draft model is asked for no more than it has room for.
    assert len(rows.guess(77, 0, limit=longest + 9)[0]) == longest


def test_a_sequence_is_guessed_alike_alone_and_beside_others(rows: Rows) -> None:
    expected = [alone(rows, SHORT), alone(rows, LONG), alone(rows, OTHER)]
    assert len({tuple(guess) for guess in expected}) == 3
    feed_long(rows, 1, LONG)
    rows.feed(r0=SHORT, r2=OTHER[:30])
    rows.feed(r2=OTHER[30:])
    for _ in range(3):
        rows.guess(77, 1)
    assert rows.guess(77, 0, 1, 2) == expected
    assert rows.guess(77, 2, 0) == [expected[2], expected[0]]


def test_each_of_several_gets_no_more_than_it_wants(rows: Rows) -> None:
    rows.feed(r0=SHORT, r1=OTHER)
    wanted = [Wanted(1, [*OTHER, 77], 1), Wanted(0, [*SHORT, 77], 4)]
    assert [len(guess) for guess in rows.provider.propose(wanted)] == [1, 4]


def test_guesses_are_the_same_whether_asked_for_all_along_or_only_once(rows: Rows) -> None:
    expected = alone(rows, OTHER)
    rows.feed(r0=OTHER[:20])
    for at in range(20, 40):
        rows.guess(OTHER[at], 0, limit=3)
        rows.feed(r0=OTHER[at : at + 1])
    assert rows.guess(77, 0)[0] == expected


def test_rejected_tokens_leave_nothing_behind(rows: Rows) -> None:
    expected = alone(rows, OTHER)
    rows.feed(r0=OTHER[:10])
    at = 10
    while at < 40:
        # A verified run of which the first two tokens are right.
        rows.guess(OTHER[at], 0, limit=4)
        right = OTHER[at : at + 2]
        batch = [BatchSlice(0, at, (*right, 11, 12, 13), 0)]
        assert rows.runner.decode(batch) is DecodeOutcome.DONE
        rows.provider.observe(batch, [len(right)])
        rows.tokens[0] += [*right, 11, 12, 13]
        at += len(right)
        rows.rewind(0, at)
    assert rows.guess(77, 0)[0] == expected


@pytest.mark.parametrize("asked", [True, False])
def test_a_rewound_row_goes_on_from_where_it_was_cut(rows: Rows, asked: bool) -> None:
    expected = alone(rows, OTHER)
    rows.feed(r0=[*OTHER[:25], *SHORT])
    if asked:
        rows.guess(5, 0)
    rows.rewind(0, 25)
    rows.feed(r0=OTHER[25:])
    assert rows.guess(77, 0)[0] == expected


@pytest.mark.parametrize("asked", [True, False])
def test_a_copied_row_goes_on_like_its_source(rows: Rows, asked: bool) -> None:
    expected = alone(rows, OTHER)
    rows.feed(r0=[*OTHER[:25], *SHORT])
    if asked:
        rows.guess(5, 0)
        rows.feed(r0=SHORT)
    rows.copy(0, 2, 25)
    rows.feed(r2=OTHER[25:])
    assert rows.guess(77, 2)[0] == expected
    rows.rewind(0, 25)
    rows.feed(r0=OTHER[25:])
    assert rows.guess(77, 0, 2) == [expected, expected]


def test_what_a_row_held_before_means_nothing_to_the_next(rows: Rows) -> None:
    expected = alone(rows, SHORT)
    feed_long(rows, 0, LONG)
    rows.guess(77, 0)
    rows.rewind(0, 0)
    rows.feed(r0=SHORT)
    assert rows.guess(77, 0)[0] == expected


def test_a_row_loaded_from_elsewhere_is_guessed_for_by_what_is_known_of_it(rows: Rows) -> None:
    rows.feed(r0=OTHER)
    rows.guess(77, 0)
    rows.feed(r1=SHORT)
    state = rows.runner.save(1)
    rows.rewind(0, 0)
    rows.runner.load(0, state)
    rows.provider.replaced(0)
    rows.tokens[0] = list(SHORT)
    guess = rows.guess(77, 0)[0]
    if rows.provider.kind == "draft-model":  # it has the tokens, which is all that it wants
        assert guess == alone(rows, SHORT)
        return
    assert guess == []
    rows.feed(r0=OTHER[:3])
    assert len(rows.guess(77, 0)[0]) == 5


def test_steps_that_a_draft_was_not_shown_are_not_taken_for_known(rows: Rows) -> None:
    """As while it naps: it guesses by what it has seen since, or has worked off itself."""
    rows.feed(r0=SHORT)
    rows.guess(77, 0)
    unseen = BatchSlice(0, len(rows.tokens[0]), tuple(OTHER), 0)
    assert rows.runner.decode([unseen]) is DecodeOutcome.DONE
    rows.tokens[0] += OTHER
    rows.guess(77, 0)
    rows.feed(r0=LONG[:20])
    guess = rows.guess(77, 0)[0]
    assert len(guess) == 5
    rows.rewind(0, len(SHORT) + 10)  # into what it was not shown
    rows.guess(77, 0)
    rows.clear()
    assert alone(rows, LONG) == alone(rows, LONG)


def test_there_are_guesses_up_to_the_contexts_end(rows: Rows) -> None:
    tokens = some_tokens(MAX_CTX - 1, 4)
    if rows.runner.shares_cells:
        rows.clear()
    feed_long(rows, 0, tokens)
    rows.feed(r1=SHORT)
    found: list[list[int]] = [[], []]
    for _ in range(6):
        wanted = [Wanted(0, [*tokens, 77], 1), Wanted(1, [*SHORT, 77], 5)]
        found = rows.provider.propose(wanted)
    assert [len(guess) for guess in found] == [1, 5]


def test_a_draft_that_is_told_to_stop_has_no_guesses_and_recovers(rows: Rows) -> None:
    """Also in a prompt that it has not seen, and where it stopped nothing is left."""
    expected = alone(rows, LONG)
    feed_long(rows, 0, LONG)
    rows.provider.abort()
    assert rows.guess(77, 0) == [[]]
    rows.provider.rearm()
    for row in (0, 1):
        rows.rewind(row, 0)
    assert alone(rows, LONG) == expected
    feed_long(rows, 0, LONG)
    guesses: list[list[int]] = []
    for _ in range(4):
        guesses = rows.guess(77, 0)
    assert guesses == [expected]


def test_a_batch_of_a_draft_is_cut_short_at_once_on_the_cpu(make: MakeRows) -> None:
    """From another thread, right while llama.cpp computes."""
    rows = make("draft-model")
    expected = alone(rows, LONG)
    feed_long(rows, 0, LONG)
    context = rows.provider._context  # type: ignore[attr-defined]
    looked = context._abort_flag

    class Late:
        """Says no when it is asked before a batch, and yes within it."""

        def __getitem__(self, _place: int) -> bytes:
            looked[0] = b"\1"
            return b"\0"

    context._abort_flag = Late()
    assert rows.guess(77, 0) == [[]]
    context._abort_flag = looked
    rows.provider.rearm()
    assert rows.provider._rows[0].tokens == []  # type: ignore[attr-defined]
    guesses: list[list[int]] = []
    for _ in range(4):
        guesses = guesses if any(guesses) else rows.guess(77, 0)
    assert guesses == [expected]


def test_closing_twice_is_closing_once_and_the_model_goes_on(rows: Rows) -> None:
    rows.feed(r0=SHORT)
    rows.guess(77, 0)
    rows.provider.close()
    rows.provider.close()
    batch = [BatchSlice(1, 0, tuple(SHORT), 1)]
    assert rows.runner.decode(batch) is DecodeOutcome.DONE
    assert rows.runner.likeliest(0) >= 0
    rows.runner.rewind(0, 0)
    rows.runner.rewind(1, 0)
    rows.tokens = {}
    rows.clear = lambda: None  # type: ignore[method-assign]


# ------------------------------------------------------------------------- what each computes


def test_layer_inputs_are_those_of_each_token_of_the_batch(
    runner: LlamaRunner, target: Path
) -> None:
    """Of the first layer they are the tokens' embeddings, which the file says."""
    inputs = LayerInputs(runner.context, (0, 2))
    batch = [BatchSlice(2, 0, (900, 901), 1), BatchSlice(0, 0, (700, 701, 702), 0)]
    assert runner.decode(batch) is DecodeOutcome.DONE
    inputs.read()
    found = np.empty((3, inputs.row_values), dtype=np.float32)
    inputs.copy_rows(slice(0, len(found)), found)
    later = np.empty((2, inputs.row_values), dtype=np.float32)
    inputs.copy_rows([3, 4], later)
    inputs.close()
    runner.rewind(0, 0)
    runner.rewind(2, 0)
    embeddings = tensors_of(target)["token_embd.weight"]
    wide = embeddings.shape[1]
    assert np.array_equal(found[:, :wide], embeddings[[700, 701, 702]])
    assert np.array_equal(later[:, :wide], embeddings[[900, 901]])
    assert not np.allclose(found[:, wide:], found[:, :wide])


def test_a_dflash_guesses_what_its_formula_says(
    make: MakeRows, target: Path, drafts: dict[str, Path]
) -> None:
    """An account of its own: features injected at their positions, then one block of masks."""
    rows = make("dflash")
    for tokens in (SHORT, OTHER):
        features = layer_inputs(rows.runner, tokens, layers=(1, 3))
        expected = formula(tensors_of(drafts["dflash"]), tensors_of(target), features, 77, 5)
        assert alone(rows, tokens) == expected


@pytest.mark.parametrize("kind", ["neutral-dspark", "neutral-dspark-behind"])
def test_a_dspark_is_corrected_by_the_token_guessed_before(make: MakeRows, kind: str) -> None:
    rows = make(kind)
    rows.feed(r0=SHORT, r1=OTHER)
    guesses = rows.provider.propose([Wanted(0, [*SHORT, 700], 4), Wanted(1, [*OTHER, 30], 4)])
    assert guesses == [[701, 702, 703, 704], [31, 32, 33, 34]]


def test_a_dflash2_whose_selector_says_nothing_is_a_plain_one(make: MakeRows) -> None:
    plain = make("dflash")
    expected = [alone(plain, SHORT, limit=7), alone(plain, OTHER, limit=7)]
    rows = make("neutral-dflash2")
    assert [alone(rows, SHORT, limit=7), alone(rows, OTHER, limit=7)] == expected


def test_a_dflash2_walks_to_the_best_successor_of_each_token(make: MakeRows) -> None:
    """The walk by hand, through the rows that the selector made."""
    rows = make("dflash2")
    assert isinstance(rows.provider, DFlashProvider)
    rows.feed(r0=SHORT)
    lattice = llama_block_outputs.read_lattice
    seen: list[Any] = []

    def read(*arguments: Any) -> Any:
        seen.append(lattice(*arguments).copy())
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_block_outputs, "read_lattice", read)
        guess = rows.guess(77, 0, limit=7)[0]
    before, expected = 0, []
    for position in range(1, 8):
        row = seen[0][position]
        candidates, scores = row[:4], row[4:20].reshape(4, 4)
        before = max(range(4), key=lambda choice: scores[before, choice])
        expected.append(int(candidates[before]))
    assert guess == expected


def test_a_model_that_drafts_for_itself_is_right(runner: LlamaRunner, target: Path) -> None:
    said = [77]
    runner.decode([BatchSlice(1, 0, (*SHORT, 77), 1)])
    for at in range(6):
        said.append(runner.likeliest(0))
        runner.decode([BatchSlice(1, len(SHORT) + 1 + at, said[-1:], 1)])
    runner.rewind(1, 0)
    file = check_draft_file(str(target), 6, check_model_file(str(target)))
    size = context_size(trained=2048, slots=SLOTS, max_ctx=MAX_CTX, pool=None)
    spec = DraftSpec(
        file, CPU, draft_context(size, file.spare, on_cpu=True), chunk=CHUNK, threads=1
    )
    provider = DraftModelProvider(spec, vocabulary_size=runner.vocabulary.size)
    assert provider.propose([Wanted(0, [*SHORT, 77], 6)]) == [said[1:]]
    provider.close()


def test_a_long_prompt_is_worked_off_in_parts_while_others_are_guessed_for(make: MakeRows) -> None:
    rows = make("draft-model")
    feed_long(rows, 0, LONG)
    rows.feed(r1=SHORT)
    lengths = [[len(guess) for guess in rows.guess(77, 0, 1)] for _ in range(3)]
    assert lengths == [[0, 5], [0, 5], [5, 5]]
    assert rows.guess(77, 0)[0] == alone(rows, LONG)


def test_a_prompt_that_is_worked_off_is_told_apart_from_guessing(make: MakeRows) -> None:
    rows = make("draft-model")
    feed_long(rows, 0, LONG)
    for _ in range(2):
        assert rows.guess(77, 0) == [[]]
        assert rows.provider.caught_up_seconds > 0
    assert len(rows.guess(77, 0)[0]) == 5
    rows.feed(r0=[77])
    for row in (0, 1):  # as from step to step, and a prompt that is hardly more
        rows.feed(r1=SHORT[:2])
        assert len(rows.guess(78, row)[0]) == 5
        assert rows.provider.caught_up_seconds == 0


# ---------------------------------------------------------------------- what waits on the host


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that may wait: of some 40 tokens."""
    most = 40 * 2 * 64 * 4
    monkeypatch.setattr(llama_dflash, "MOST_PENDING_BYTES", most)
    return most


def waiting_bytes(rows: Rows) -> int:
    assert isinstance(rows.provider, DFlashProvider)
    return rows.provider.waiting_bytes


def test_what_waits_goes_into_the_draft_when_it_becomes_too_much(
    make: MakeRows, little_memory: int
) -> None:
    rows = make("dflash")
    expected = alone(rows, LONG)
    feed_long(rows, 0, LONG)
    assert waiting_bytes(rows) <= little_memory
    assert rows.guess(77, 0)[0] == expected


def test_copies_of_what_waits_stay_within_the_bound(make: MakeRows, little_memory: int) -> None:
    """As of one prompt with several answers."""
    rows = make("dflash")
    expected = alone(rows, OTHER[:25])
    rows.feed(r0=OTHER[:25])
    for row in (1, 2):
        rows.copy(0, row, 25)
        assert waiting_bytes(rows) <= little_memory
    assert rows.guess(77, 0, 1, 2) == [expected] * 3


def test_what_waits_is_forgotten_when_nobody_asks_any_more(
    make: MakeRows, little_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_dflash, "DRAFTS_AWAY", 3)
    rows = make("dflash")
    rows.feed(r0=SHORT, r1=SHORT)
    assert rows.guess(77, 0)[0] == alone(make("dflash"), SHORT)
    rows = make("dflash")
    rows.feed(r0=SHORT)
    rows.guess(77, 0)
    for token in LONG:
        rows.feed(r0=[token])
        assert waiting_bytes(rows) <= little_memory
    # The latest tokens are still known.
    assert len(rows.guess(77, 0)[0]) == 5


# ------------------------------------------------------------------------------- the formula


@functools.cache
def tensors_of(path: Path) -> dict[str, Any]:
    return {
        tensor.name: np.array(tensor.data, dtype=np.float32)
        for tensor in gguf.GGUFReader(path).tensors
    }


def layer_inputs(runner: LlamaRunner, tokens: Sequence[int], layers: Sequence[int]) -> Any:
    inputs = LayerInputs(runner.context, layers)
    assert runner.decode([BatchSlice(0, 0, tuple(tokens), 0)]) is DecodeOutcome.DONE
    inputs.read()
    found = np.empty((len(tokens), inputs.row_values), dtype=np.float32)
    inputs.copy_rows(slice(0, len(found)), found)
    runner.rewind(0, 0)
    return found


def normed(values: Any) -> Any:
    return values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + 1e-5)


def rotated(values: Any, positions: Any) -> Any:
    """Rotary positions: the halves of each head, of [tokens, heads, HEAD], turned against each
    other."""
    half = HEAD // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = values[..., :half], values[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def formula(draft: Any, target: Any, features: Any, last: int, limit: int) -> list[int]:
    """Weights of norms are one in these files, so they are left out."""
    known = len(features)
    fused = normed(features @ draft["fc.weight"].T)
    block = np.array([last] + [MASK_TOKEN] * limit)
    x = target["token_embd.weight"][block]
    positions = np.arange(known + len(block))

    def heads(values: Any, count: int) -> Any:
        return values.reshape(len(values), count, HEAD)

    layer = 0
    while f"blk.{layer}.attn_q.weight" in draft:
        weight = {
            name: draft[f"blk.{layer}.{name}.weight"]
            for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        inside = normed(x)
        every = np.concatenate([fused, inside])
        q = rotated(normed(heads(inside @ weight["attn_q"].T, HEADS)), positions[known:])
        k = rotated(normed(heads(every @ weight["attn_k"].T, HEADS_KV)), positions)
        v = heads(every @ weight["attn_v"].T, HEADS_KV)
        k, v = (np.repeat(each, HEADS // HEADS_KV, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(block), HEADS * HEAD)
        x = x + mixed @ weight["attn_output"].T
        inside = normed(x)
        gate = inside @ draft[f"blk.{layer}.ffn_gate.weight"].T
        up = inside @ draft[f"blk.{layer}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ draft[f"blk.{layer}.ffn_down.weight"].T
        layer += 1
    logits = normed(x[1:]) @ target["token_embd.weight"].T
    found: list[int] = logits.argmax(axis=1).tolist()
    return found
