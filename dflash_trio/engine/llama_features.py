"""What a target's layers had for tokens whose draft does not know them yet, on the host.

Rows of the draft's context get these only when something is to be drafted for them: a draft that
nobody asks costs a copy of some kilobytes a token.
"""

from __future__ import annotations

from typing import Any

# Before numpy, for the reason given in llama_runner.
import llama_cpp.llama_cpp  # noqa: F401
import numpy as np


class PendingRows:
    """Consecutive tokens of one sequence with their features, the last ones that it has.

    They lie in one buffer, with room for a quarter more after it grew. It becomes smaller with
    them: it never has twice what is in it, and without any tokens there is none.

    ``values``: float32 values of a token.
    """

    def __init__(self, values: int) -> None:
        self._values = values
        self._buffer = np.empty((0, values), dtype=np.float32)
        self._first = 0
        self.begin = 0
        """Position of the first of them; says nothing while there are none."""
        self.count = 0

    @property
    def end(self) -> int:
        return self.begin + self.count

    @property
    def size_bytes(self) -> int:
        """Of the buffer, whatever is in it."""
        return int(self._buffer.nbytes)

    @property
    def features(self) -> Any:
        """float32[count, values]"""
        return self._buffer[self._first : self._first + self.count]

    def extend(self, position: int, count: int) -> Any:
        """float32[count, values] to be filled, for the tokens at ``position`` and after it. What
        does not go on from the earlier ones takes their place."""
        if not self.count or position != self.end:
            self.begin, self.count = position, 0
            self._shrink()
        last = self._first + self.count + count
        if last > len(self._buffer):
            needed = self.count + count
            self._move(needed + needed // 4)
        begin = self._first + self.count
        self.count += count
        return self._buffer[begin : begin + count]

    def drop_first(self, count: int) -> None:
        self._first += count
        self.begin += count
        self.count -= count
        self._shrink()

    def cut(self, length: int) -> None:
        """Keep only what stands before position ``length``."""
        self.count = max(0, min(self.count, length - self.begin))
        self._shrink()

    def _shrink(self) -> None:
        # Only then, so that what is copied is no more than what was dropped.
        if len(self._buffer) >= 2 * self.count:
            self._move(self.count)

    def _move(self, capacity: int) -> None:
        """Into a buffer for so many tokens."""
        buffer = np.empty((capacity, self._values), dtype=np.float32)
        buffer[: self.count] = self.features
        self._buffer, self._first = buffer, 0
