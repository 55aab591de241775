"""A draft that is loaded when somebody comes, and freed when nobody has been there for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..model_runner import BatchSlice, LoadingStopped, ModelLoadError
from .draft_tree import Ranking
from .provider import DraftProvider, RankingProvider, Wanted

log = logging.getLogger("dflash_trio.engine")

IDLE_SECONDS = 300.0


class LazyDraft:
    """A provider that has another one now and then.

    Loading takes its time from whoever comes first: :meth:`wake` is called before a request's
    prompt is computed, not between two of its tokens. While there is nothing loaded, nothing is
    guessed. A draft that cannot be loaded is given up, and its model goes on without.
    """

    def __init__(
        self,
        load: Callable[[], DraftProvider],
        *,
        kind: str,
        longest: int,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``load``: raises as a provider's making does; :class:`LoadingStopped` if the server is
        to end. ``kind`` and ``longest``: what it will have."""
        self.kind = kind
        self.longest = longest
        self._load = load
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._provider: DraftProvider | None = None
        self._given_up = False
        self._used_at = clock()

    @property
    def loaded(self) -> bool:
        return self._provider is not None

    @property
    def given_up(self) -> bool:
        """It could not be loaded, and that is not tried again."""
        return self._given_up

    def wake(self) -> bool:
        """Somebody is about to need it. True: it was loaded for that."""
        self._used_at = self._clock()
        if self._provider is not None or self._given_up:
            return False
        log.info("loading the draft, which was not needed until now")
        try:
            self._provider = self._load()
        except LoadingStopped:
            pass
        except ModelLoadError as error:
            self._given_up = True
            log.error("there will be no drafts: %s", error)
        except Exception:
            # Whatever is wrong with a draft, its model serves without it.
            self._given_up = True
            log.exception("there will be no drafts")
        return self._provider is not None

    def rest(self) -> float | None:
        """Nobody is here: free it if that has been so for long enough. The seconds until the next
        look; ``None``: no look is needed. 0 when it was freed just now, so that this is told before
        anybody waits for ever."""
        if self._provider is None:
            return None
        left = self._used_at + self._idle_seconds - self._clock()
        if left > 0:
            return left
        log.info("freeing the draft, which was not needed for %.0f s", self._idle_seconds)
        self._provider.close()
        self._provider = None
        return 0.0

    # ------------------------------------------------------------------- as a DraftProvider

    matched = ()

    @property
    def looks_at_steps(self) -> bool:
        return self._provider is not None and self._provider.looks_at_steps

    @property
    def steady(self) -> bool:
        return self._provider is not None and self._provider.steady

    @property
    def caught_up_seconds(self) -> float:
        return 0.0 if self._provider is None else self._provider.caught_up_seconds

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [[] for _ in wanted] if self._provider is None else self._provider.propose(wanted)

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        self._used_at = self._clock()
        if self._provider is not None:
            self._provider.observe(batch, kept)

    def rank(self, wanted: Sequence[Wanted]) -> list[Ranking | None]:
        if self._provider is None:
            return [None for _ in wanted]
        assert isinstance(self._provider, RankingProvider)
        return self._provider.rank(wanted)

    def observe_trees(self, batch: Sequence[BatchSlice], paths: Sequence[Sequence[int]]) -> None:
        self._used_at = self._clock()
        if self._provider is not None:
            assert isinstance(self._provider, RankingProvider)
            self._provider.observe_trees(batch, paths)

    def nap(self, *, asleep: bool) -> None:
        if self._provider is not None:
            self._provider.nap(asleep=asleep)

    def rewind(self, row: int, length: int) -> None:
        if self._provider is not None:
            self._provider.rewind(row, length)

    def copy(self, source: int, target: int, length: int) -> None:
        if self._provider is not None:
            self._provider.copy(source, target, length)

    def replaced(self, row: int) -> None:
        if self._provider is not None:
            self._provider.replaced(row)

    def rests(self, row: int) -> None:
        # It may not have been told of a step for long.
        self._used_at = self._clock()
        if self._provider is not None:
            self._provider.rests(row)

    def abort(self) -> None:
        # On the event loop, and only while the provider is at work: it is not taken away then.
        if self._provider is not None:
            self._provider.abort()

    def rearm(self) -> None:
        if self._provider is not None:
            self._provider.rearm()

    def close(self) -> None:
        if self._provider is not None:
            self._provider.close()
            self._provider = None
