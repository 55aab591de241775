"""Trees of guesses in a llama.cpp cache: each path from the root to a leaf is a sequence id.

Theory of operation. A token attends to the cells that its first sequence id is on. So in a cache
that all rows share, each path of a tree gets an id: on the prefix, which moves no data, and on the
path's own tokens. The first path has the row's own id, the others have ids beyond the rows, of
which there is one pool for all rows. After the step the path that stays is given to the row, and
all other cells of the tree are free again.

Putting an id on a prefix of thousands of cells takes as long as a step of a small model (measured:
2.8 ms for eight ids on 2000 cells, there and back). So a row's ids stay on its prefix from step to
step, and follow it by what is new; they go when the row is cut back or somebody else needs them.
No cell is used by that.

llama.cpp computes a step with the graph of the one before where both are of one shape, and the
number of sequences in the batch is part of that: otherwise it builds a graph anew, which takes
some tenths of a millisecond. So a batch has as many ids as one of its size ever had. Those that no
path needs are on a root: nothing of what it sees depends on them, and nothing is to be undone.

llama.cpp wants of ids that meet in a token that they hold the same positions before the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from .llama_memory import seq_cp, seq_pos_max, seq_rm
from .model_runner import BatchSlice, EngineError
from .token_tree import check_path, paths_of

MOST_SHAPES = 1024
"""Of batches, that are remembered at a time."""


@define
class _Path:
    """An id on a row's prefix."""

    seq_id: int
    length: int = 0
    """Positions of the row that it is on."""


@frozen
class _Tree:
    """What the last batch had for a row, until it is said what stays."""

    position: int
    """Of the root."""
    parents: Sequence[int]
    through: list[list[int]]
    """Of each token: the paths through it."""
    paths: list[_Path]
    """Path 1, 2, ... The last of them may have nothing but the root."""


@define
class _Row:
    paths: list[_Path] = field(factory=list)
    tree: _Tree | None = None


class TreePaths:
    """The ids of one context: ``slots`` rows, and ``count`` ids for paths behind them."""

    def __init__(self, memory: Any, slots: int, count: int) -> None:
        """``memory``: llama.cpp's, of the context."""
        self.count = count
        self._ids = range(slots, slots + count)
        self._free = list(reversed(self._ids))
        self._rows: dict[int, _Row] = {}
        # By the number of slices and of tokens: the most ids beside the rows' own in a batch.
        self._most: dict[tuple[int, int], int] = {}
        self._memory = memory

    @property
    def held(self) -> int:
        """Ids that are on cells. 0 where nobody decodes."""
        stray = [seq_id for seq_id in self._free if seq_pos_max(self._memory, seq_id) >= 0]
        return len(self._ids) - len(self._free) + len(stray)

    # ------------------------------------------------------------------------------ one step

    def prepare(self, batch: Sequence[BatchSlice]) -> dict[int, list[list[int]]]:
        """Put ids on the prefixes of a batch's trees. By the slices' indexes: for each token, the
        sequence ids that it has. Raises EngineError where there are not as many."""
        trees: list[tuple[int, BatchSlice, list[list[int]]]] = []
        for index, item in enumerate(batch):
            if item.seq_id in self._rows and self._rows[item.seq_id].tree is not None:
                raise EngineError(f"sequence {item.seq_id} has a tree of which nothing was kept")
            if item.parents is not None:
                trees.append((index, item, _through(item, item.parents)))
        wanted = {item.seq_id: len(through[0]) - 1 for _, item, through in trees}
        self._make_room(wanted)
        if trees:
            self._make_steady(batch, wanted, trees[0])
        ids = {}
        for index, item, through in trees:
            row = self._rows.setdefault(item.seq_id, _Row())
            paths = row.paths[: wanted[item.seq_id]]
            for path in paths:
                if path.length < item.position:
                    self._copy(item.seq_id, path.seq_id, path.length, item.position)
                    path.length = item.position
            numbers = [item.seq_id, *(path.seq_id for path in paths)]
            ids[index] = [[numbers[number] for number in each] for each in through]
            row.tree = _Tree(item.position, item.parents or (), through, paths)
        return ids

    def _make_room(self, wanted: Mapping[int, int]) -> None:
        """See to it that each row has as many ids as are wanted."""
        lacking = {
            row: count - len(self._rows[row].paths if row in self._rows else ())
            for row, count in wanted.items()
        }
        short = sum(max(0, count) for count in lacking.values()) - len(self._free)
        for number, row in self._rows.items():
            surplus = min(short, len(row.paths) - wanted.get(number, 0))
            if surplus > 0:
                self._release(row, surplus)
                short -= surplus
        if short > 0:
            raise EngineError(f"trees of more than {self.count} paths beside their rows' own")
        for number, count in lacking.items():
            row = self._rows.setdefault(number, _Row())
            for _ in range(count):
                row.paths.append(_Path(self._free.pop()))

    def _make_steady(
        self,
        batch: Sequence[BatchSlice],
        wanted: dict[int, int],
        tree: tuple[int, BatchSlice, list[list[int]]],
    ) -> None:
        """Let more paths go through the root of one tree, as far as nobody else has them."""
        _, item, through = tree
        shape = len(batch), sum(len(each.tokens) for each in batch)
        needed = sum(wanted.values())
        if len(self._most) >= MOST_SHAPES:
            self._most.clear()
        most = self._most[shape] = max(needed, self._most.get(shape, 0))
        row, own = self._rows[item.seq_id], wanted[item.seq_id]
        more = min(most - needed, len(row.paths) - own + len(self._free))
        while len(row.paths) < own + more:
            row.paths.append(_Path(self._free.pop()))
        through[0] += range(own + 1, own + 1 + more)
        wanted[item.seq_id] = own + more

    def failed(self, *, partly: bool) -> None:
        """The batch was not computed. ``partly``: some of its cells may be in use."""
        for row in self._rows.values():
            tree, row.tree = row.tree, None
            if tree is not None and partly:
                for path in tree.paths:
                    self._remove(path.seq_id, tree.position)

    def keep(self, seq_id: int, path: Sequence[int]) -> None:
        """See CacheRows.keep_path."""
        row = self._rows.get(seq_id)
        tree = row.tree if row is not None else None
        if row is None or tree is None:
            raise EngineError(f"sequence {seq_id} has no tree")
        try:
            check_path(tree.parents, path)
        except ValueError as error:
            raise EngineError(str(error)) from None
        row.tree = None
        end = tree.position + len(path)
        whole, common = _lengths(tree, range(len(tree.parents))), _lengths(tree, path)
        own = common[0]
        if own < whole[0]:
            self._remove(seq_id, tree.position + own)
        if own < len(path):
            number = tree.through[path[-1]][0]
            self._copy(tree.paths[number - 1].seq_id, seq_id, tree.position + own, end)
        for number, each in enumerate(tree.paths, 1):
            each.length = tree.position + common[number]
            if common[number] < whole[number]:
                self._remove(each.seq_id, each.length)

    # ----------------------------------------------------------------------------- between steps

    def rewind(self, seq_id: int, length: int) -> None:
        """A row is about to be cut back. What it had of a tree is none of its tokens."""
        row = self._rows.get(seq_id)
        if row is None:
            return
        tree, row.tree = row.tree, None
        if tree is not None and length > tree.position:
            raise EngineError(f"sequence {seq_id} has a tree of which nothing was kept")
        if not length:
            self.release(seq_id)
            return
        for path in row.paths:
            if tree is not None or path.length > length:
                path.length = min(path.length, length)
                self._remove(path.seq_id, path.length)

    def release(self, seq_id: int) -> None:
        """Take a row's ids off its cells."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._release(row, len(row.paths))

    def _release(self, row: _Row, count: int) -> None:
        for _ in range(count):
            path = row.paths.pop()
            self._remove(path.seq_id, 0)
            self._free.append(path.seq_id)

    def _copy(self, source: int, target: int, begin: int, end: int) -> None:
        seq_cp(self._memory, source, target, begin, end)

    def _remove(self, seq_id: int, begin: int) -> None:
        if not seq_rm(self._memory, seq_id, begin, -1):
            raise EngineError(f"the KV cache refused to rewind sequence {seq_id} to {begin}")


def _through(item: BatchSlice, parents: Sequence[int]) -> list[list[int]]:
    if not len(parents) == len(item.tokens) == item.outputs:
        raise EngineError("a tree with other parents or outputs than tokens")
    try:
        return paths_of(parents)
    except ValueError as error:
        raise EngineError(str(error)) from None


def _lengths(tree: _Tree, places: Sequence[int]) -> list[int]:
    """Of each path: how many of the tokens at ``places`` are on it."""
    counts = [0] * (len(tree.paths) + 1)
    for place in places:
        for number in tree.through[place]:
            counts[number] += 1
    return counts
