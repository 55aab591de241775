"""What proposes tokens for the model to verify.

A provider never decides anything: whatever it proposes, the text is the one that the model's own
sampler chooses. A bad provider costs time, and only that. So it may forget at any moment what it
knows of a sequence, and has to go on when rows are rewound, copied or loaded behind its back: each
such change is told to it.

Runs on the worker's thread only, between the model's steps; but for ``abort``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from ..model_runner import BatchSlice
from .draft_tree import Ranking


@frozen
class Wanted:
    """A sequence that is about to decode its last token."""

    row: int
    """Its row in the model's cache, below the number of slots."""
    tokens: Sequence[int]
    """All of it, prompt and answer. The last one is not in the cache yet: it stands at position
    ``len(tokens) - 1``."""
    limit: int
    """Tokens that may be proposed at most, one after the other: 1 or more."""
    nodes: int = 0
    """Tokens that a tree may have at most; 0: none is wanted."""


class DraftProvider(Protocol):
    """One model's draft, for all of its sequences."""

    @property
    def kind(self) -> str:
        """How people call it: ``dflash``, ``draft-model``, ``prompt-lookup``."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that it can propose in one go."""
        ...

    @property
    def looks_at_steps(self) -> bool:
        """Each step takes longer with it, whether anything is guessed or not. It may be left out
        for some: then nothing need be known of what they brought."""
        ...

    @property
    def steady(self) -> bool:
        """It guesses quickly on a device that replays what it has recorded: guesses are worth
        something there if each step has equally many."""
        ...

    @property
    def caught_up_seconds(self) -> float:
        """Of the latest :meth:`propose`: what it spent on tokens that it knew nothing of, as those
        of a prompt, and not on guesses. It will not spend that again."""
        ...

    @property
    def matched(self) -> Sequence[int]:
        """Of the latest :meth:`propose`: how long a match each guess follows, in tokens, where that
        says how sure it is. Empty where it does not."""
        ...

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """For each, tokens that may follow its last one: at most ``limit``, none if it has no
        guess. Raises EngineError when its device is lost."""
        ...

    def observe(self, batch: Sequence[BatchSlice], kept: Sequence[int]) -> None:
        """After a step of the model: of ``batch[i]``, the first ``kept[i]`` tokens stay in the
        cache. Called before rejected tokens are rewound and before the next step, while what
        the step computed can still be read."""
        ...

    def nap(self, *, asleep: bool) -> None:
        """Neither :meth:`observe` nor :meth:`propose` is called from now on; or both are again."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """A row holds only its first ``length`` tokens any more. 0: it is somebody else's next."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Row ``target``, which was empty, holds the first ``length`` tokens of ``source``."""
        ...

    def replaced(self, row: int) -> None:
        """A row holds tokens that came from elsewhere, as from a stored state."""
        ...

    def rests(self, row: int) -> None:
        """A row is nobody's for now. What it holds may stay there for a later sequence."""
        ...

    def abort(self) -> None:
        """Give up the :meth:`propose` under way, as soon as that is possible: between what goes to
        the device, and on CPUs at once. It has no guesses then. From any thread."""
        ...

    def rearm(self) -> None:
        """Forget an earlier :meth:`abort`."""
        ...

    def close(self) -> None:
        """Free everything on the device, before the model is freed. Idempotent."""
        ...


@runtime_checkable
class RankingProvider(DraftProvider, Protocol):
    """A draft that can tell what else may come, so that trees can be made of its guesses."""

    def rank(self, wanted: Sequence[Wanted]) -> list[Ranking | None]:
        """For each, what may follow its last token, at most ``limit`` places far. ``None``: it has
        no guess."""
        ...

    def observe_trees(self, batch: Sequence[BatchSlice], paths: Sequence[Sequence[int]]) -> None:
        """As :meth:`observe`, after a step with trees: of ``batch[i]``, the tokens at the places
        ``paths[i]`` stay, one after the other."""
        ...
