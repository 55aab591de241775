"""How one output's channels are told apart: its thinking, its answer, its calls of tools."""

from __future__ import annotations

from typing import Protocol


class ChannelSplitter(Protocol):
    """Reads one answer as it comes, however its text is cut into pieces. For one thread."""

    @property
    def thinking(self) -> bool:
        """The text is inside a block of thinking."""
        ...

    def push(self, text: str, token: int) -> list[tuple[str, str]]:
        """(channel, new text of it), none empty; channels as in ``generation.events``.

        ``token``: the one that the text came of; -1: none, bytes that were held back.
        """
        ...

    def finish(self) -> list[tuple[str, str]]:
        """The answer has ended: what was held back."""
        ...
