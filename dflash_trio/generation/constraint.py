"""What the engine needs of a grammar: which tokens may come next. Compiled elsewhere."""

from __future__ import annotations

from typing import Protocol


class TokenMatcher(Protocol):
    """Where one answer is in its grammar. Owned by one sequence, used on one thread at a time."""

    @property
    def finished(self) -> bool:
        """The answer is complete and nothing more may follow."""
        ...

    def mask(self) -> bytes:
        """The tokens that may come next: one bit for each of the vocabulary, the lowest bit of the
        first byte for token 0, padded to whole 32-bit words. End-of-generation tokens are allowed
        exactly where the answer may end. Raises ConstraintError beyond its bounds of time and
        memory."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token that the mask allowed; the end-of-generation tokens may be left out.

        Raises ConstraintError for one that it did not allow."""
        ...


class TokenConstraint(Protocol):
    """A compiled grammar for one vocabulary. Immutable, usable from any thread."""

    def new_matcher(self) -> TokenMatcher: ...


class ConstraintError(Exception):
    """A grammar cannot be followed any further: a bound was hit. ``str()`` is one sentence."""
