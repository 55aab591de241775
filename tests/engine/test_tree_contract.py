"""What every runner promises of trees: one suite for the scripted fake and for llama.cpp.

On llama.cpp also with a model that has a sliding window, and weights whose products depend on the
batch. So logits are compared within ``MARGIN``; those of different branches differ by more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome, EngineError
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.engine.token_tree import check_path, depths_of, paths_of
from tests.engine.test_runner_contract import BREAD, NIGHT, SEA, Runner, load_llama, tokens_of

DONE, NO_CELLS, ABORTED = DecodeOutcome
PATHS = 6
MARGIN = 0.15
"""Of logits' difference (root of the mean square), in their own deviation."""

#        0
#      1   2        and 6 follows 4
#     3 4   5
PARENTS = (-1, 0, 0, 1, 1, 2, 4)


@pytest.fixture(
    scope="module",
    params=[
        "scripted",
        pytest.param("smollm2", marks=pytest.mark.real),
        pytest.param("gemma", marks=pytest.mark.real),
    ],
)
def made(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner: Runner
    if request.param == "scripted":
        runner = ScriptedRunner(slots=3, cells=768, tree_paths=PATHS)
    else:
        path = request.getfixturevalue(request.param)
        runner = load_llama(path, draft_outputs=24, tree_paths=PATHS, has_draft=True)
    yield runner
    runner.close()


@pytest.fixture
def runner(made: Runner) -> Iterator[Runner]:
    yield made
    for row in range(3):
        made.rewind(row, 0)
    assert made.paths_held == 0


def prefill(runner: Runner, row: int, text: str) -> list[int]:
    tokens = tokens_of(runner, text)
    assert runner.decode([BatchSlice(row, 0, tokens, 1)]) is DONE
    return tokens


def tree(row: int, position: int, tokens: Sequence[int], parents: Sequence[int]) -> BatchSlice:
    return BatchSlice(row, position, tokens, len(tokens), parents)


def some_tokens(runner: Runner, count: int = len(PARENTS)) -> list[int]:
    return tokens_of(runner, " one two three four five six seven eight nine ten")[:count]


def leading_to(place: int) -> list[int]:
    path = [place]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    difference = np.array(ours) - np.array(theirs)
    return bool(np.sqrt(np.mean(difference**2)) < MARGIN * np.std(theirs))


def replayed(runner: Runner, row: int, tokens: Sequence[int]) -> list[float]:
    """The logits after all of these, from an empty row, which is empty again."""
    assert runner.decode([BatchSlice(row, 0, tokens, 1)]) is DONE
    logits = list(runner.logits(0))
    runner.rewind(row, 0)
    return logits


def test_each_token_of_a_tree_sees_its_own_branch_alone(runner: Runner) -> None:
    prompt = prefill(runner, 1, SEA)
    words = some_tokens(runner)
    prefill(runner, 2, NIGHT)
    batch = [
        BatchSlice(2, runner.sequence_length(2), words[:1], 1),
        tree(1, len(prompt), words, PARENTS),
    ]
    assert runner.decode(batch) is DONE
    found = [list(runner.logits(1 + place)) for place in range(len(PARENTS))]
    runner.keep_path(1, [0])
    for place, ours in enumerate(found):
        said = [words[each] for each in leading_to(place)]
        assert same(ours, replayed(runner, 0, [*prompt, *said]))
    # Which tells something only if branches differ by more than that.
    assert not same(found[3], found[5])
    assert not same(found[3], found[4])


@pytest.fixture(params=["scripted", pytest.param("smollm2", marks=pytest.mark.real)])
def pathless(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner: Runner
    if request.param == "scripted":
        runner = ScriptedRunner(slots=3, cells=768)
    else:
        path = request.getfixturevalue(request.param)
        runner = load_llama(path, draft_outputs=24, has_draft=True)
    yield runner
    runner.close()


def test_without_ids_for_paths_a_tree_may_be_a_chain(pathless: Runner) -> None:
    prompt = prefill(pathless, 1, SEA)
    words = some_tokens(pathless, 4)
    assert pathless.tree_paths == 0
    assert pathless.decode([tree(1, len(prompt), words, (-1, 0, 1, 2))]) is DONE
    ours = list(pathless.logits(2))
    pathless.keep_path(1, [0, 1])
    assert pathless.sequence_length(1) == len(prompt) + 2
    assert same(ours, replayed(pathless, 0, [*prompt, *words[:3]]))
    pathless.rewind(1, 0)
    with pytest.raises(EngineError, match="more than 0 paths"):
        pathless.decode([tree(1, 0, words[:3], (-1, 0, 0))])


@pytest.mark.parametrize("place", range(len(PARENTS)))
def test_a_sequence_goes_on_from_the_path_that_was_kept(runner: Runner, place: int) -> None:
    prompt = prefill(runner, 0, BREAD)
    words = some_tokens(runner)
    assert runner.decode([tree(0, len(prompt), words, PARENTS)]) is DONE
    path = leading_to(place)
    runner.keep_path(0, path)
    said = [*prompt, *(words[each] for each in path)]
    assert runner.sequence_length(0) == len(said)
    assert runner.decode([BatchSlice(0, len(said), words[:1], 1)]) is DONE
    ours = list(runner.logits(0))
    assert same(ours, replayed(runner, 1, [*said, words[0]]))
    runner.rewind(0, 0)
    assert runner.paths_held == 0


def test_trees_follow_one_another_beside_steps_without(runner: Runner) -> None:
    """Ids that stay on a row's prefix must follow what was kept, whatever path that was."""
    said = prefill(runner, 0, SEA)
    words = some_tokens(runner, 9)
    for step, place in enumerate((6, 5, 0, 3, 6, 1)):
        root = words[step]
        shape = PARENTS if step % 2 else PARENTS[:6]
        place = min(place, len(shape) - 1)
        tokens = [root, *words[: len(shape) - 1]]
        assert runner.decode([tree(0, len(said), tokens, shape)]) is DONE
        path = leading_to(place)
        ours = list(runner.logits(place))
        runner.keep_path(0, path)
        said = [*said, *(tokens[each] for each in path)]
        assert same(ours, replayed(runner, 1, said))
        if step == 2:
            assert runner.decode([BatchSlice(0, len(said), words[:2], 2)]) is DONE
            runner.rewind(0, len(said) + 1)
            said.append(words[0])
    runner.rewind(0, len(said) - 4)
    assert runner.decode([tree(0, len(said) - 4, words[:7], PARENTS)]) is DONE
    ours = list(runner.logits(6))
    runner.keep_path(0, [0])
    branch = [words[each] for each in leading_to(6)]
    assert same(ours, replayed(runner, 1, [*said[:-4], *branch]))


def test_what_is_not_kept_of_a_tree_takes_no_cells(runner: Runner) -> None:
    prompt = prefill(runner, 0, SEA)
    words = some_tokens(runner)
    cells = 3 * 256
    room = cells - len(prompt) - 1
    for place in (6, 5, 0):
        assert runner.decode([tree(0, len(prompt), words, PARENTS)]) is DONE
        runner.keep_path(0, leading_to(place))
        runner.rewind(0, len(prompt))
    # All other cells are free: of the paths, and of the tokens that were cut off.
    filler = [words[at % 7] for at in range(room)]
    for begin in range(0, room, 100):
        part = filler[begin : begin + 100]
        assert runner.decode([BatchSlice(1, begin, part, 0)]) is DONE
    assert runner.decode([BatchSlice(0, len(prompt), words[:2], 1)]) is NO_CELLS
    assert runner.decode([BatchSlice(0, len(prompt), words[:1], 1)]) is DONE


def test_a_tree_without_cells_changes_nothing(runner: Runner) -> None:
    prompt = prefill(runner, 0, SEA)
    words = some_tokens(runner)
    room = 3 * 256 - len(prompt) - 3
    for begin in range(0, room, 100):
        part = [words[at % 7] for at in range(begin, min(begin + 100, room))]
        assert runner.decode([BatchSlice(1, begin, part, 0)]) is DONE
    assert runner.decode([tree(0, len(prompt), words, PARENTS)]) is NO_CELLS
    assert runner.sequence_length(0) == len(prompt)
    assert runner.decode([tree(0, len(prompt), words[:3], (-1, 0, 0))]) is DONE
    runner.keep_path(0, [0, 2])
    assert runner.sequence_length(0) == len(prompt) + 2


def test_a_tree_that_nobody_settles_goes_with_its_row(runner: Runner) -> None:
    prompt = prefill(runner, 0, SEA)
    assert runner.decode([tree(0, len(prompt), some_tokens(runner), PARENTS)]) is DONE
    with pytest.raises(EngineError):
        runner.decode([BatchSlice(0, len(prompt) + 1, (5,), 1)])
    runner.rewind(0, len(prompt))
    assert runner.sequence_length(0) == len(prompt)
    runner.rewind(0, 0)
    assert runner.sequence_length(0) == runner.paths_held == 0


def test_rows_take_turns_with_the_ids_of_paths(runner: Runner) -> None:
    """There are fewer than all rows together would hold."""
    words = some_tokens(runner)
    said = [prefill(runner, row, text) for row, text in enumerate((SEA, BREAD, NIGHT))]
    bush = (-1, *[0] * PATHS, 0)
    tokens = [words[0], *some_tokens(runner, PATHS + 1)]
    for row in (0, 1, 2, 0):
        assert runner.decode([tree(row, len(said[row]), tokens, bush)]) is DONE
        ours = list(runner.logits(PATHS))
        runner.keep_path(row, [0, PATHS])
        said[row] += [tokens[0], tokens[PATHS]]
        other = (row + 1) % 3
        saved = said[other]
        runner.rewind(other, 0)
        assert same(ours, replayed(runner, other, said[row]))
        assert runner.decode([BatchSlice(other, 0, saved, 1)]) is DONE
    batch = [tree(row, len(said[row]), tokens[:4], (-1, 0, 0, 0)) for row in range(3)]
    assert runner.decode(batch) is DONE
    for row in range(3):
        runner.keep_path(row, [0, 3 - row])
        runner.forget_paths(row)
    assert runner.paths_held == 0


def test_more_leaves_than_there_are_ids_are_refused(runner: Runner) -> None:
    prompt = prefill(runner, 0, SEA)
    bush = (-1, *[0] * (PATHS + 2))
    tokens = some_tokens(runner, 2)[:1] * len(bush)
    with pytest.raises(EngineError, match="more than 6 paths"):
        runner.decode([tree(0, len(prompt), tokens, bush)])


@pytest.mark.parametrize("path", [(), (1,), (0, 3), (0, 1, 2), (0, 7), (0, 1, 1)])
def test_what_is_no_path_is_refused(runner: Runner, path: tuple[int, ...]) -> None:
    prompt = prefill(runner, 0, SEA)
    assert runner.decode([tree(0, len(prompt), some_tokens(runner), PARENTS)]) is DONE
    with pytest.raises(EngineError, match="path"):
        runner.keep_path(0, path)


def test_a_row_without_a_tree_has_no_path_to_keep(runner: Runner) -> None:
    prefill(runner, 0, SEA)
    with pytest.raises(EngineError, match="no tree"):
        runner.keep_path(0, [0])


@pytest.mark.parametrize("parents", [(0, 0), (-1, -1), (-1, 1), (-1, 2), (-1,)])
def test_parents_that_make_no_tree_are_refused(runner: Runner, parents: tuple[int, ...]) -> None:
    prompt = prefill(runner, 0, SEA)
    words = some_tokens(runner, 2)
    with pytest.raises(EngineError, match="tree"):
        runner.decode([BatchSlice(0, len(prompt), words, 2, parents)])


def test_a_tree_is_as_deep_as_its_parents_say_and_has_as_many_paths_as_leaves() -> None:
    assert depths_of(PARENTS) == [0, 1, 1, 2, 2, 2, 3]
    assert paths_of(PARENTS) == [[0, 1, 2], [0, 2], [1], [0], [2], [1], [2]]
    assert paths_of((-1, 0, 1, 2)) == [[0]] * 4
    check_path(PARENTS, [0, 1, 4, 6])


def test_an_aborted_tree_leaves_nothing_that_a_rewind_does_not_take(runner: Runner) -> None:
    prompt = prefill(runner, 0, SEA)
    words = some_tokens(runner)
    runner.abort()
    assert runner.decode([tree(0, len(prompt), words, PARENTS)]) is ABORTED
    runner.rearm()
    runner.rewind(0, len(prompt))
    assert runner.sequence_length(0) == len(prompt)
    assert runner.decode([tree(0, len(prompt), words, PARENTS)]) is DONE
    ours = list(runner.logits(6))
    runner.keep_path(0, [0])
    branch = [words[each] for each in leading_to(6)]
    assert same(ours, replayed(runner, 1, [*prompt, *branch]))
