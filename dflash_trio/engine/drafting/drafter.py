"""Drafter: what the scheduler asks for guesses.

A provider makes them, a controller says how many are worth it, and here it is counted what became
of them. Runs on the worker's thread, between the model's steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from ...generation.status import DraftState, DraftStatistics
from ..model_runner import BatchSlice
from .draft_tree import NOTHING, DraftTree, grow
from .lazy import LazyDraft
from .naps import HIGH_STAKES, Naps
from .provider import DraftProvider, RankingProvider, Wanted
from .record import DraftRecord

if TYPE_CHECKING:
    from ..verification import Run


class Controller(Protocol):
    """Says how many guesses are worth it; see ``controller.DraftController``."""

    def new_acceptance(self) -> Any: ...

    def choose(self, sequences: Sequence[Any]) -> int: ...

    def keep(
        self, lengths: Sequence[int], matched: Sequence[int], sequences: Sequence[Any]
    ) -> list[int]: ...

    def watched(self, sequence: Any, matched: int, judged: int, right: int) -> None: ...

    def observe(
        self,
        lengths: Sequence[int],
        judged: Sequence[tuple[Any, int, Sequence[int]]],
        *,
        committed: int,
        asked: int,
        draft_seconds: float,
        step_seconds: float,
        caught_up_seconds: float = 0.0,
    ) -> None: ...

    def took(self, seconds: float) -> None:
        """The step that was observed last took so long, with all that comes before the next one."""
        ...

    def missed(self, sequences: int, seconds: float) -> None:
        """A step without guesses, of which nothing else is known."""
        ...


_LONGER = 2.0
"""Times what was seen of a step: more is not thought to be its own."""


@frozen
class _Over:
    """The latest step without prompts, once it is over."""

    sequences: int
    seconds: float
    """That it took at least, with its guesses."""
    drafting: float
    """For its guesses."""
    committed: int
    guessed: bool


Guesses = Sequence[int] | DraftTree
"""For one sequence: tokens one after the other, or a tree."""


class Drafter:
    """Of chains; for trees see :class:`TreeDrafter`.

    ``verify_limit``: tokens that a batch with guesses has at most, whatever the controller says:
    llama.cpp ends the process where more outputs are wanted than its context was made for.
    ``new_controller``: makes the one for a provider that was loaded again, which may be of another
    kind then. ``clock``: seconds. ``on_drafted`` is told how many seconds each guessing took.
    ``on_working`` is told the generations that the provider is about to guess for, the empty set
    where it is to look at a step, and ``None`` when it is done. The provider belongs to whoever
    made it, and is closed there."""

    def __init__(
        self,
        provider: DraftProvider,
        controller: Controller,
        *,
        verify_limit: int,
        new_controller: Callable[[], Controller] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_drafted: Callable[[float], object] = lambda _: None,
        on_working: Callable[[frozenset[int] | None], object] = lambda _: None,
    ) -> None:
        self.provider = provider
        self._new_controller = new_controller
        self._tree_budget: int | None = None
        self._controller = controller
        self._verify_limit = verify_limit
        self._naps = self._new_naps()
        self._asleep = False
        self._dozing = 0
        self._over: _Over | None = None
        self._clock = clock
        self._on_drafted = on_drafted
        self._on_working = on_working
        self._began = 0.0
        # Of the step under way: seconds of guessing, and guesses asked for of each sequence.
        self._drafting = 0.0
        self._asked = 0
        self._steps = self._runs = self._proposed = self._accepted = self._committed = 0
        self._draft_seconds = self._verify_seconds = 0.0

    def new_record(self, tokens: Sequence[int]) -> DraftRecord:
        """For a sequence that begins; ``tokens`` is all of it, as it grows."""
        if self._asleep:
            self._naps.begins()
            self._turn()
        return DraftRecord(tokens, self._controller.new_acceptance())

    def begin_anew(self) -> None:
        """The provider was loaded again: it is looked at, whatever was known of the one before."""
        if self._new_controller is not None:
            self._controller = self._new_controller()
        self._naps = self._new_naps()
        self._asleep = False
        self._dozing = 0
        self._over = None

    def _new_naps(self) -> Naps:
        return Naps(HIGH_STAKES) if self.provider.steady else Naps()

    @property
    def asleep(self) -> bool:
        """Nothing is guessed for now, and instead of :meth:`observe` steps are :meth:`missed`."""
        return self._asleep

    @property
    def dozing(self) -> int:
        """Steps for which it need not be asked nor told anything at all: in a long nap one in so
        many tells what plain steps take. Where a step takes a millisecond, what was saved by a nap
        would be spent on that otherwise."""
        return self._dozing

    # ----------------------------------------------------------------------------- one step

    def choose(self, records: Sequence[DraftRecord | None]) -> int:
        """How many tokens are to be guessed for each of the sequences that are about to decode,
        and nobody else is in the batch. Often 0."""
        self._drafting = 0.0
        self._turn()
        if self._asleep:
            self._asked = 0
            return 0
        self._asked = self._controller.choose([r.acceptance for r in records if r is not None])
        return self._asked

    def _turn(self) -> None:
        """Fall asleep or wake: before anything is guessed, and so never between a guess and what
        comes of it."""
        if self._naps.asleep is not self._asleep:
            self._asleep, self._dozing = self._naps.asleep, 0
            self.provider.nap(asleep=self._asleep)

    def propose(
        self,
        wanted: Sequence[Wanted | None],
        records: Sequence[DraftRecord | None],
        generations: frozenset[int] = frozenset(),
    ) -> list[Guesses]:
        """Guesses for each sequence of the batch; none where nothing is wanted or known.
        ``generations``: of all of these sequences."""
        asked = [item for item in wanted if item is not None]
        if not asked:
            # Nobody has room for a guess: nothing was asked, and so nothing is learned of what
            # asking costs.
            self._asked = 0
            return []
        begin = self._clock()
        self._on_working(generations)
        try:
            answers = iter(self._ask(asked))
        finally:
            self._on_working(None)
        self._drafting = self._clock() - begin
        self._on_drafted(self._drafting)
        guesses: list[Guesses] = [() if item is None else next(answers) for item in wanted]
        known = [record for record in records if record is not None]
        matched = self._matched(wanted, guesses, known)
        kept = self._controller.keep(
            [len(guess) for guess in guesses], matched, [record.acceptance for record in known]
        )
        room = self._verify_limit - len(wanted)
        fitting: list[Guesses] = []
        for guess, length in zip(guesses, kept, strict=True):
            length = max(0, min(length, room, len(guess)))
            room -= length
            fitting.append(guess.first(length) if isinstance(guess, DraftTree) else guess[:length])
        return fitting

    def _matched(
        self,
        wanted: Sequence[Wanted | None],
        guesses: Sequence[Guesses],
        records: Sequence[DraftRecord],
    ) -> list[int]:
        """Tokens of a match that each guess follows; these guesses are compared with what is said,
        whether they are verified or not."""
        if not self.provider.matched:
            return [0] * len(wanted)
        answered = iter(self.provider.matched)
        matched = [0 if item is None else next(answered) for item in wanted]
        for record, guess, length in zip(records, guesses, matched, strict=True):
            assert not isinstance(guess, DraftTree)
            record.guess, record.matched = guess, length
        return matched

    def want(self, row: int, tokens: Sequence[int], chosen: int, spare: int, cells: int) -> Wanted:
        """What is wanted for a sequence, where ``chosen`` tokens are to be guessed for each: of
        ``spare`` that it may still say, and so many cells that are its own."""
        return Wanted(row, tokens, min(chosen, spare))

    def _ask(self, wanted: Sequence[Wanted]) -> Sequence[Guesses]:
        answers = self.provider.propose(wanted)
        return [guess[: item.limit] for guess, item in zip(answers, wanted, strict=True)]

    def _tell(
        self, batch: Sequence[BatchSlice], kept: Sequence[int], taken: Sequence[Sequence[Run]]
    ) -> None:
        """Let the provider know what stays of each slice."""
        self.provider.observe(batch, kept)

    def step_begins(self) -> None:
        """The batch goes to the device."""
        if self._dozing:
            return
        before, self._began = self._began, self._clock()
        if self._over is not None:
            over, self._over = self._over, None
            # From one to the next there is this one's guessing, and none of its own.
            seconds = self._began - before - self._drafting + over.drafting
            # But where nobody was there for a while, that is none of its time.
            seconds = min(seconds, _LONGER * over.seconds)
            if not self._asleep:
                self._controller.took(seconds)
            # While prompts wait nobody chooses, and so it may not nap yet, or still does.
            if self._naps.asleep is self._asleep:
                self._naps.step(
                    over.sequences, seconds, committed=over.committed, guessed=over.guessed
                )
                if self._asleep:
                    self._dozing = self._naps.untold

    def step_is_lost(self) -> None:
        """The step was broken off: nothing comes of what was guessed for it."""
        self._asked, self._drafting = 0, 0.0

    def missed(self, batch: Sequence[BatchSlice]) -> None:
        """After a step that it slept through."""
        if self._dozing:
            self._dozing -= 1
        elif all(len(item.tokens) == item.outputs for item in batch):
            seconds = self._clock() - self._began
            self._over = _Over(len(batch), seconds, 0.0, committed=len(batch), guessed=False)
            self._controller.missed(len(batch), seconds * (1 + self._naps.untold))

    def observe(
        self, batch: Sequence[BatchSlice], kept: Sequence[int], taken: Sequence[Sequence[Run]]
    ) -> None:
        """After a step: what stays of each slice, and what came of its outputs. Before any row is
        changed."""
        ended = self._clock()
        self._on_working(frozenset())
        try:
            self._tell(batch, kept, taken)
        finally:
            self._on_working(None)
        looking = self._clock() - ended
        step_seconds = ended - self._began
        asked, draft_seconds = self._asked, self._drafting
        self._asked, self._drafting = 0, 0.0
        self._draft_seconds += draft_seconds + looking
        if any(len(item.tokens) != item.outputs for item in batch):
            return  # what a prompt's step takes tells nothing of guesses, and it had none
        judged = []
        for item, runs in zip(batch, taken, strict=True):
            if not runs:
                continue
            run, proposed = runs[0], item.outputs - 1
            record = run.sequence.drafts
            assert record is not None
            if record.guess:
                self._watch(run, record)
            if not proposed:
                continue
            record.proposed += proposed
            record.accepted += run.accepted
            self._runs += 1
            self._proposed += proposed
            self._accepted += run.accepted
            # A token that its grammar does not allow is kept, and is nobody's.
            self._committed += run.kept - (run.error is not None)
            judged.append((record.acceptance, run.judged, run.right))
        if judged:
            self._steps += 1
            self._verify_seconds += step_seconds
        committed = sum(kept)
        self._controller.observe(
            [item.outputs for item in batch],
            judged,
            committed=committed,
            asked=asked,
            draft_seconds=draft_seconds,
            step_seconds=step_seconds,
            # Of the latest question, which may have been in an earlier step.
            caught_up_seconds=min(self.provider.caught_up_seconds, draft_seconds),
        )
        if self.provider.looks_at_steps:
            seconds = draft_seconds + step_seconds + looking
            self._over = _Over(len(batch), seconds, draft_seconds, committed, bool(judged))

    def _watch(self, run: Run, record: DraftRecord) -> None:
        """Compare what was guessed for a sequence, whether verified or not, with what it said."""
        guess, record.guess = record.guess, ()
        if run.error is not None:
            return
        right = 0
        said = run.sequence.answer[-run.kept :]
        for token, ours in zip(said, guess, strict=False):
            if token != ours:
                break
            right += 1
        judged = min(right + 1, len(said), len(guess))
        self._controller.watched(record.acceptance, record.matched, judged, right)

    # --------------------------------------------------------------------------- inspection

    def statistics(self) -> DraftStatistics:
        return DraftStatistics(
            kind=self.provider.kind,
            tree_budget=self._tree_budget,
            steps=self._steps,
            runs=self._runs,
            proposed=self._proposed,
            accepted=self._accepted,
            committed=self._committed,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            state=self._state(),
        )

    def _state(self) -> DraftState:
        if isinstance(self.provider, LazyDraft) and not self.provider.loaded:
            return "given-up" if self.provider.given_up else "unloaded"
        return "napping" if self.asleep else "awake"


class TreeDrafter(Drafter):
    """Makes trees of what a provider ranks.

    ``controller`` counts in guesses of a tree; ``budget``: the most that one has. ``paths``: leaves
    that all trees of a step may have, beside one for each.
    """

    def __init__(
        self,
        provider: RankingProvider,
        controller: Controller,
        *,
        budget: int,
        paths: int,
        verify_limit: int,
        new_controller: Callable[[], Controller] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_drafted: Callable[[float], object] = lambda _: None,
        on_working: Callable[[frozenset[int] | None], object] = lambda _: None,
    ) -> None:
        super().__init__(
            provider,
            controller,
            verify_limit=verify_limit,
            new_controller=new_controller,
            clock=clock,
            on_drafted=on_drafted,
            on_working=on_working,
        )
        self._ranking = provider
        self._paths = paths
        self._tree_budget = budget

    def want(self, row: int, tokens: Sequence[int], chosen: int, spare: int, cells: int) -> Wanted:
        limit = min(chosen, spare, self.provider.longest)
        return Wanted(row, tokens, limit, min(chosen, cells))

    def _ask(self, wanted: Sequence[Wanted]) -> Sequence[Guesses]:
        # Even shares: who needs more leaves than others is not known beforehand.
        branches = self._paths // len(wanted)
        return [
            NOTHING
            if ranking is None
            else grow(ranking, nodes=item.nodes, depth=item.limit, branches=branches)
            for ranking, item in zip(self._ranking.rank(wanted), wanted, strict=True)
        ]

    def _tell(
        self, batch: Sequence[BatchSlice], kept: Sequence[int], taken: Sequence[Sequence[Run]]
    ) -> None:
        if all(item.parents is None for item in batch):
            self.provider.observe(batch, kept)
            return
        paths: list[Sequence[int]] = []
        for item, count, runs in zip(batch, kept, taken, strict=True):
            path = runs[0].path if item.parents is not None and runs else None
            paths.append(range(count) if path is None else path)
        self._ranking.observe_trees(batch, paths)
