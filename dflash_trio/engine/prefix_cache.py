"""PrefixCache: the rows of a KV cache, and what is kept of earlier prompts for later ones.

A row is a sequence of the runner's cache. A running sequence has one; when it ends, its row stays
as it is, and a prompt that begins alike goes on in it instead of computing its beginning. A row
that is wanted for something else is saved to the host's memory first, and loaded again into
whatever row is free when a prompt comes that begins like it. So what is kept does not lie between
the cells that running sequences read in each step, and there can be more of it than rows.

What is kept never stands in anybody's way: it is not counted as busy, and the one unused for
longest goes as soon as a row, cells or memory are needed.

With a ``PrefixStore`` all that is worth it is stored there as well, and had back from there when
memory has nothing as good: after a restart, or when it was given up in between.

Where rows share one pool of cells (``CacheRows.shares_cells``), a prompt may also begin with what
another row holds, running or idle, by a note beside each cell.

Runs on the worker's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count

from attrs import frozen

from .model_runner import CacheRows, EngineError
from .prefix_store import LEAST_SHARE, PrefixStore, Stored, Tokens
from .prefix_tree import Match, PrefixTree

MOST_SAVED_BYTES = 1 << 30
"""Of the host's memory, for all that is saved. A token takes some ten kilobytes in a small model
and some hundreds in a large one."""
WORTH_SAVING = 64
"""Tokens. Fewer are computed about as fast as they are copied out and in, wherever that is."""
_CHANCES = 4.0
"""One of so many saved rows is asked for again, at a guess: what saving spares must be worth that
many times what it costs."""
_LEAST_OWN = 2
"""A saved row has a half, or so, that is in no other."""


@frozen
class Saved:
    """A row in the host's memory."""

    tokens: Tokens
    state: bytes
    is_prompt: bool
    """Kept as a whole prompt, not as what a sequence left."""


class PrefixCache:
    """``slots``: rows; ``prefixes`` and ``prompts``: how many ended sequences (in rows or saved)
    and whole prompts are kept at most."""

    def __init__(
        self,
        runner: CacheRows,
        *,
        slots: int,
        prefixes: int,
        prompts: int,
        store: PrefixStore | None = None,
    ) -> None:
        self.reused = 0
        """Tokens that sequences had in their rows when they began, in all."""
        self._runner = runner
        self._store = store
        self._slots = slots
        self._prefixes = prefixes
        self._prompts = prompts
        self._empty = set(range(slots))
        self._running: set[int] = set()
        # Ended sequences in their rows, and saved ones by keys beyond the rows; both in the order
        # of their last use.
        self._idle: OrderedDict[int, Tokens] = OrderedDict()
        self._saved: OrderedDict[int, Saved] = OrderedDict()
        self._saved_bytes = 0
        self._keys: Iterator[int] = count(slots)
        # Of all that a prompt may begin with, by row or key: idle rows, saved ones, and running
        # rows where these can be shared.
        self._tree = PrefixTree()
        # What is stored, by keys of the same kind. A tree of its own: rows and memory come first.
        self._stored: dict[int, Stored] = {}
        self._stored_keys: dict[str, int] = {}
        self._stored_tree = PrefixTree()
        # Of stored rows that could not go on from so many tokens: nor from fewer, then.
        self._refused: dict[int, int] = {}

    def __len__(self) -> int:
        """Ended sequences and prompts that are kept."""
        return len(self._idle) + len(self._saved)

    @property
    def cells(self) -> int:
        """Cells in rows that are kept."""
        return sum(map(len, self._idle.values()))

    @property
    def saved_bytes(self) -> int:
        return self._saved_bytes

    # ------------------------------------------------------------------------ running rows

    def begin(self, prompt: Sequence[int], *, reuse: bool = True) -> tuple[int, int]:
        """A row for a sequence, and how many of its first tokens are in it already: never all of
        them, since the last one's output is wanted."""
        row, length = self._begin(prompt, reuse=reuse)
        self.reused += length
        return row, length

    def _begin(self, prompt: Sequence[int], *, reuse: bool) -> tuple[int, int]:
        wanted = prompt[: len(prompt) - 1]
        match = self._tree.longest(wanted) if reuse else None
        if reuse and self._store is not None:
            begun = self._begin_with_stored(self._store, wanted, self._in_reach(match))
            if begun is not None:
                return begun
        makes_way = reuse and self._makes_way(match)
        if makes_way:
            self._save_idle(but=match.key if match is not None else None)
            # What was saved may have taken the place of what was to be loaded.
            if match is not None and match.key not in self._idle:
                match = self._tree.longest(wanted)
        if match is None:
            return self.take_row(), 0
        source, length = match.key, match.length
        if source in self._saved:
            return self._begin_with_saved(source, length)
        if not self._runner.can_rewind(source, length):
            return self.take_row(), 0
        lost = len(self._idle.get(source, ())) - length
        shares = self._empty and self._runner.shares_cells and lost and not makes_way
        if source in self._running or shares:
            if source in self._idle:
                self._idle.move_to_end(source)
            row = self.take_row()
            self._runner.copy(source, row, length)
            return row, length
        # With an empty row at hand it is a matter of price: what the row has beyond is to be saved,
        # or computed once more if somebody asks for it.
        worth = self._is_worth_saving(lost, of=length + lost)
        price = self._runner.saving_costs if worth else lost / _CHANCES
        if self._empty and length < price and source != self._nearest():
            return self.take_row(), 0
        tokens = self._forget_idle(source)
        if worth:
            self._save(source, tokens)
        self._runner.rewind(source, length)
        self._running.add(source)
        return source, length

    def _makes_way(self, match: Match | None) -> bool:
        """Whether idle rows should leave the cells to a prompt that has next to nothing in common
        with them, while nobody else computes.

        A step looks at every cell up to the last one in use (4 % longer for a thousand of them, in
        a small model on a CPU). Not where saving them is dear, as it is with a folder.
        """
        if self._running or not self._runner.shares_cells or self._store is not None:
            return False
        if match is not None and match.length >= WORTH_SAVING:
            return False
        return _CHANCES * self._runner.saving_costs <= WORTH_SAVING

    def _begin_with_saved(self, key: int, length: int) -> tuple[int, int]:
        saved = self._saved[key]
        self._saved.move_to_end(key)
        row = self.take_row()
        if not self._load(row, saved.state):
            return row, 0
        if not self._runner.can_rewind(row, length):
            self._runner.rewind(row, 0)
            return row, 0
        if length == len(saved.tokens) and not saved.is_prompt and key in self._saved:
            self._forget_saved(key)  # all of it is in the row, and will be kept with that
        self._runner.rewind(row, length)
        return row, length

    def _in_reach(self, match: Match | None) -> int:
        """How many tokens a match would spare, as far as can be told."""
        if match is None:
            return 0
        exact = match.key in self._saved or self._runner.can_rewind(match.key, match.length)
        return match.length if exact else 0

    def _begin_with_stored(
        self, store: PrefixStore, wanted: Sequence[int], known: int
    ) -> tuple[int, int] | None:
        """As :meth:`begin`, with what is stored; ``None`` where that is not worth it beside the
        ``known`` tokens that are in reach anyway."""
        self._learn(store)
        while (match := self._stored_tree.longest(wanted)) is not None:
            key, length = match.key, match.length
            stored = self._stored[key]
            if length - known < WORTH_SAVING or length * LEAST_SHARE < len(stored.tokens):
                return None
            if length <= self._refused.get(key, 0):
                return None
            state = store.load(stored.name)
            if state is None:
                self._forget_stored(stored.name)
                continue
            row = self.take_row()
            fits = self._load(row, state)
            if fits and self._runner.sequence_length(row) != len(stored.tokens):
                self._runner.rewind(row, 0)
                fits = False
            if fits and self._runner.can_rewind(row, length):
                self._runner.rewind(row, length)
                return row, length
            if fits:
                self._refused[key] = length
                self._runner.rewind(row, 0)
            elif self._running == {row}:
                # All cells were its own. Nothing that was stored here could have needed more.
                store.drop(stored.name)
            return row, 0
        return None

    def _load(self, row: int, state: bytes) -> bool:
        """Load a state into an empty row. False: not even without all that is kept are there cells
        enough, and the row is still empty."""
        while True:
            try:
                self._runner.load(row, state)
            except EngineError:
                self._runner.rewind(row, 0)
                if not self.evict():
                    return False
            else:
                return True

    def take_row(self) -> int:
        """An empty row for a sequence, beside running ones if there is such a one: rows that form
        a run are computed at once."""
        row = self._nearest()
        if row is None:
            if not self._empty and not self.evict():
                raise EngineError("more sequences than rows")
            row = min(self._empty, key=lambda r: (not self._is_beside_running(r), r))
        elif row in self._idle:
            self._empty_idle(row)
        self._empty.remove(row)
        self._running.add(row)
        return row

    def _nearest(self) -> int | None:
        """Where runs are wanted, the row that is to be taken next: an empty one, or an idle one, in
        the order of their last use. ``None``: it matters little which."""
        if not self._runner.wants_runs or not self._running:
            return None
        return min((*sorted(self._empty), *self._idle), key=self._growth, default=None)

    def _growth(self, row: int) -> int:
        """By how much the span of running rows would grow with this one; 0 within it."""
        return max(0, min(self._running) - row, row - max(self._running))

    def _is_beside_running(self, row: int) -> bool:
        return row - 1 in self._running or row + 1 in self._running

    def computed(self, row: int, prompt: Sequence[int]) -> None:
        """All of a running row's prompt, and no more, is in it: others may begin with it."""
        if self._prompts and len(prompt) >= WORTH_SAVING:
            whole = tuple(prompt)
            if kept := [k for k, s in self._saved.items() if s.is_prompt and s.tokens == whole]:
                self._saved.move_to_end(kept[0])
            else:
                self._save(row, whole, is_prompt=True)
        if self._runner.shares_cells and self._prefixes:
            self._tree.insert(row, prompt)

    def end(self, row: int, tokens: Sequence[int], *, keep: bool) -> None:
        """A running row is not used any more. ``tokens``: what it should hold, computed to the
        end; more, as an aborted step may leave there, is dropped."""
        self._running.discard(row)
        self._runner.forget_paths(row)
        if row in self._tree:
            self._tree.remove(row)
        wanted = keep and tokens and self._prefixes
        # Not every cache can go back from what an aborted step has left there.
        if not wanted or not self._runner.can_rewind(row, len(tokens)):
            self._clear(row)
            return
        self._runner.rewind(row, len(tokens))
        if self._runner.sequence_length(row) != len(tokens):
            # Less than it should: nothing that anybody could go on with.
            self._clear(row)
            return
        self._idle[row] = tuple(tokens)
        self._tree.insert(row, tokens)
        self._keep_within_bounds()

    def lose(self, row: int) -> None:
        """A running row of a lost device: nothing can be done with it, and nothing needs to be."""
        self._running.discard(row)
        if row in self._tree:
            self._tree.remove(row)
        self._empty.add(row)

    # ------------------------------------------------------------------------- kept things

    def evict(self) -> bool:
        """Empty an idle row: the one that was unused for longest of those beside running ones, or
        of all. Its tokens are still kept, but for short ones. False: there is none."""
        if not self._idle:
            return False
        oldest = next(iter(self._idle))
        self._empty_idle(next(filter(self._is_beside_running, self._idle), oldest))
        return True

    def _empty_idle(self, row: int) -> None:
        worth = self._is_worth_saving(self._own(row), of=len(self._idle[row]))
        tokens = self._forget_idle(row)
        if worth:
            self._save(row, tokens)
        self._clear(row)

    def _save_idle(self, *, but: int | None) -> None:
        """Empty the idle rows that are worth saving, all ``but`` one."""
        for row, tokens in list(self._idle.items()):
            if row != but and self._is_worth_saving(self._own(row), of=len(tokens)):
                self._save(row, self._forget_idle(row))
                self._clear(row)

    def _own(self, row: int) -> int:
        """How many of an idle row's last tokens would go with it; with a folder, where all is to be
        stored, all of them."""
        tokens = self._idle[row]
        if self._store is not None:
            return len(tokens)
        self._tree.remove(row)
        others = self._tree.longest(tokens)
        self._tree.insert(row, tokens)
        return len(tokens) - (others.length if others is not None else 0)

    def _is_worth_saving(self, own: int, *, of: int) -> bool:
        """Whether the last ``own`` tokens of a row, which somebody may ask for again or not and
        which are nowhere else, are better copied out and in, with all the others ``of`` the row,
        than computed."""
        if self._store is not None:
            return own >= WORTH_SAVING
        least = max(WORTH_SAVING, _CHANCES * self._runner.saving_costs)
        # A copy that mostly repeats what is at hand is no use of memory.
        return own >= least and own * _LEAST_OWN >= of

    def store_idle(self, deadline: float) -> None:
        """Store what is worth it in idle rows, the latest first, until ``deadline`` (of
        ``time.monotonic``)."""
        if self._store is None:
            return
        for row, tokens in reversed(self._idle.items()):
            if not self._is_worth_storing(tokens):
                continue
            state = self._runner.save(row)
            if not self._store.put(tokens, state, is_prompt=False, deadline=deadline):
                return

    def clear(self) -> None:
        """Empty every idle row."""
        while self.evict():
            pass

    def _save(self, row: int, tokens: Tokens, *, is_prompt: bool = False) -> None:
        state = self._runner.save(row)
        if self._store is not None:
            self._store.put(tokens, state, is_prompt=is_prompt)
        key = next(self._keys)
        self._saved[key] = Saved(tokens, state, is_prompt)
        self._saved_bytes += len(state)
        self._tree.insert(key, tokens)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        prompts = [key for key, saved in self._saved.items() if saved.is_prompt]
        prefixes = [key for key, saved in self._saved.items() if not saved.is_prompt]
        # Rows count too: what is kept is bounded, wherever it is.
        room = max(0, self._prefixes - len(self._idle))
        for key in prompts[: len(prompts) - self._prompts] if self._prompts < len(prompts) else ():
            self._forget_saved(key)
        for key in prefixes[: max(0, len(prefixes) - room)]:
            self._forget_saved(key)
        while self._saved and self._saved_bytes > MOST_SAVED_BYTES:
            self._forget_saved(next(iter(self._saved)))
        while len(self._idle) > self._prefixes:
            row = next(iter(self._idle))
            tokens = self._forget_idle(row)
            if self._is_worth_storing(tokens):
                assert self._store is not None
                self._store.put(tokens, self._runner.save(row), is_prompt=False)
            self._clear(row)

    def _is_worth_storing(self, tokens: Tokens) -> bool:
        """Whether an ended sequence should be stored, and is not."""
        if self._store is None or len(tokens) < WORTH_SAVING:
            return False
        return not self._store.knows(tokens, is_prompt=False)

    def _learn(self, store: PrefixStore) -> None:
        """Follow what was stored and what is gone."""
        for change in store.changes():
            self._forget_stored(change.name)
            if isinstance(change, Stored):
                key = next(self._keys)
                self._stored[key] = change
                self._stored_keys[change.name] = key
                self._stored_tree.insert(key, change.tokens)

    def _forget_stored(self, name: str) -> None:
        key = self._stored_keys.pop(name, None)
        if key is not None:
            self._stored_tree.remove(key)
            self._refused.pop(key, None)
            del self._stored[key]

    def _forget_idle(self, row: int) -> Tokens:
        self._tree.remove(row)
        return self._idle.pop(row)

    def _forget_saved(self, key: int) -> None:
        self._tree.remove(key)
        self._saved_bytes -= len(self._saved.pop(key).state)

    def _clear(self, row: int) -> None:
        self._runner.rewind(row, 0)
        self._empty.add(row)

    # -------------------------------------------------------------------------- inspection

    def check_idle(self) -> None:
        """With nothing running, rows are empty, or kept and hold what they should.

        Raises EngineError."""
        if self._running:
            raise EngineError(f"sequence rows leaked while idle: {sorted(self._running)}")
        wrong = {
            row: length
            for row in range(self._slots)
            if (length := self._runner.sequence_length(row)) != len(self._idle.get(row, ()))
        }
        if wrong:
            raise EngineError(f"KV cells leaked while idle: {wrong}")
        if self._runner.paths_held:
            raise EngineError(f"{self._runner.paths_held} paths of trees leaked while idle")
        if len(self._empty) + len(self._idle) != self._slots:
            raise EngineError("a sequence row leaked while idle")
