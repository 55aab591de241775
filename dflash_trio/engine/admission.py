"""KVLedger: the one truth on a model's capacity, in slots and KV cells.

The ledger promises, the cache obeys: a request is admitted against what is *promised* to others,
not against what they happen to use now, so that nobody admitted is starved by a neighbour's
growth within the headroom.

The lock is held for bookkeeping only. The routing side therefore decides at once, without waiting
for an engine step, and the worker thread extends its sequences' promises between steps.
"""

from __future__ import annotations

import threading
from enum import Enum

from attrs import define, field

from ..generation.status import LedgerStatistics


class Fit(Enum):
    """How a request relates to a model's size, whatever is going on there now."""

    FULL = "full"
    """Fits with the whole decode headroom."""
    TIGHT = "tight"
    """Fits with less headroom than usual: considered only when no model fits in full."""
    NONE = "none"
    """Never fits."""


@define(eq=False)
class Hold:
    """Slots and cells promised to one request. Made and released only by its ledger."""

    slots: int
    cells: int
    """Promised now; grows as the worker extends it."""
    released: bool = field(default=False, init=False)
    paused: bool = field(default=False, init=False)
    """It has its slots but no cells, until it is resumed."""


class KVLedger:
    """Slots and cells of one model.

    ``slots``: sequences at a time; ``pool``: KV cells in all; ``max_ctx``: cells one sequence may
    hold; ``decode_headroom``: cells promised beyond a prompt at admission.
    """

    def __init__(self, *, slots: int, pool: int, max_ctx: int, decode_headroom: int) -> None:
        self._lock = threading.Lock()
        self._slots = slots
        self._pool = pool
        self._max_ctx = max_ctx
        self._decode_headroom = decode_headroom
        # The only mutable state. Invariants: 0 <= _slots_reserved <= _slots and
        # 0 <= _committed <= _pool; all are 0 when no hold lives.
        self._slots_reserved = 0
        self._committed = 0
        self._paused = 0

    @property
    def room(self) -> int:
        """The longest prompt plus answer a single sequence can have here, in tokens."""
        return min(self._max_ctx, self._pool)

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def pool(self) -> int:
        return self._pool

    @property
    def has_all_cells(self) -> bool:
        """Every slot has its whole context: nobody can take a cell that another one might want."""
        return self._pool >= self._slots * self._max_ctx

    @property
    def committed(self) -> int:
        """Cells promised to holds that live now."""
        return self._committed

    @property
    def max_ctx(self) -> int:
        return self._max_ctx

    @property
    def decode_headroom(self) -> int:
        return self._decode_headroom

    def fit(self, prompt: int, max_tokens: int, n: int = 1) -> Fit:
        """Whether ``n`` answers of up to ``max_tokens`` to a prompt can ever be held."""
        if n > self._slots or prompt + 1 > self._max_ctx or prompt + n > self._pool:
            return Fit.NONE
        if self._headroom(prompt, max_tokens, n) < min(max_tokens, self._decode_headroom):
            return Fit.TIGHT
        return Fit.FULL

    def could_reserve(self, prompt: int, max_tokens: int, n: int = 1) -> bool:
        """Whether :meth:`try_reserve` would succeed now. Advice only: it may be stale at once."""
        with self._lock:
            return self._admits(prompt, max_tokens, n)

    def try_reserve(self, prompt: int, max_tokens: int, n: int = 1) -> Hold | None:
        """All of it, or ``None`` and no change."""
        with self._lock:
            if not self._admits(prompt, max_tokens, n):
                return None
            cells = self._charge(prompt, max_tokens, n)
            self._slots_reserved += n
            self._committed += cells
            return Hold(slots=n, cells=cells)

    def extend(self, hold: Hold, cells: int) -> int:
        """Promise up to ``cells`` more to a living hold; how many it got, 0 when the pool is out.

        Called by the worker as its sequences grow past their promise.
        """
        with self._lock:
            if hold.released or hold.paused:
                raise ValueError("a hold that is released or paused cannot grow")
            granted = max(0, min(cells, self._pool - self._committed))
            hold.cells += granted
            self._committed += granted
            return granted

    def pause(self, hold: Hold) -> None:
        """Take all its cells back from a living hold; it keeps its slots. While one is paused,
        nobody is admitted: what frees is for those who are to go on."""
        with self._lock:
            if hold.released or hold.paused:
                raise ValueError("only a hold that lives and has its cells can be paused")
            hold.paused = True
            self._paused += 1
            self._committed -= hold.cells
            hold.cells = 0

    def try_resume(self, hold: Hold, cells: int, *, spare: int) -> bool:
        """Promise ``cells`` to a paused hold again. False, and no change, if they are not free, or
        if less than ``spare`` would be free then."""
        with self._lock:
            if hold.released or not hold.paused:
                raise ValueError("only a hold that is paused can be resumed")
            if self._committed + cells + spare > self._pool:
                return False
            hold.paused = False
            self._paused -= 1
            hold.cells = cells
            self._committed += cells
            return True

    def release(self, hold: Hold) -> None:
        """Give everything back. Once: a second release is a bug and raises ValueError."""
        with self._lock:
            if hold.released:
                raise ValueError("a hold was released twice")
            hold.released = True
            self._paused -= hold.paused
            self._slots_reserved -= hold.slots
            self._committed -= hold.cells

    def statistics(self) -> LedgerStatistics:
        with self._lock:
            return LedgerStatistics(
                slots=self._slots,
                slots_reserved=self._slots_reserved,
                pool=self._pool,
                committed=self._committed,
                paused=self._paused,
            )

    def _headroom(self, prompt: int, max_tokens: int, n: int) -> int:
        return min(
            max_tokens,
            self._decode_headroom,
            self._max_ctx - prompt,
            (self._pool - prompt) // n,
        )

    def _charge(self, prompt: int, max_tokens: int, n: int) -> int:
        return prompt + n * self._headroom(prompt, max_tokens, n)

    def _admits(self, prompt: int, max_tokens: int, n: int) -> bool:
        if self.fit(prompt, max_tokens, n) is Fit.NONE:
            return False
        return (
            not self._paused
            and self._slots_reserved + n <= self._slots
            and self._committed + self._charge(prompt, max_tokens, n) <= self._pool
        )
