"""What the prefix cache needs of a place that outlives the process, and nothing more."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

Tokens = tuple[int, ...]

LEAST_SHARE = 4
"""Of what is stored is read only what a prompt uses at least one part in so many of: a long state
takes longer to read than a short beginning to compute."""


@frozen
class Stored:
    """A row's state that can be had back by its name."""

    name: str
    tokens: Tokens


@frozen
class Gone:
    """What was stored under a name is not there any more."""

    name: str


class PrefixStore(Protocol):
    """States of rows, by their tokens. Nothing here raises: what goes wrong is logged, and is as if
    it had never been stored. Called on the worker's thread; only ``load`` takes time."""

    @property
    def entries(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """Of all the entries."""
        ...

    def changes(self) -> list[Stored | Gone]:
        """What came and went since the last call, oldest first; at first all that is there."""
        ...

    def knows(self, tokens: Tokens, *, is_prompt: bool) -> bool:
        """Whether this very entry is stored, or about to be."""
        ...

    def put(
        self, tokens: Tokens, state: bytes, *, is_prompt: bool, deadline: float | None = None
    ) -> bool:
        """Store a state soon, if there is time. Never waits, unless a ``deadline`` (of
        ``time.monotonic``) says until when. False: it will not be stored.

        ``is_prompt``: a whole prompt, kept as such; not given up for one that begins with it.
        """
        ...

    def load(self, name: str) -> bytes | None:
        """The state, exactly as it was put. ``None``: it is gone."""
        ...

    def drop(self, name: str) -> None:
        """Give up an entry that turned out to be of no use."""
        ...

    def close(self, deadline: float) -> None:
        """Finish what is under way until ``deadline`` (of ``time.monotonic``); drop the rest."""
        ...
