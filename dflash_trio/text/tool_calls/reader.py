"""What all parsers of tool calls stand on: text that comes in pieces, read character by character.

A parser is written as one generator that looks at the next character and takes it, as if all of the
text were there; where the text that has come is used up it rests until more is pushed. So what it
reads cannot depend on how the text was cut, and each character is looked at once.

White space next to a call is dropped, all other text is kept as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from .pieces import CallArguments, CallBegun, CallEnded, Piece, Text

_R = TypeVar("_R")
Reading = Generator[None, None, _R]
"""A part of a parser: rests at each yield until there is more text, and returns what it found."""

SPACES = frozenset(" \t\r\n")


class PieceReader(ABC):
    """A ToolCallParser without its format; a format says where its calls may begin.

    ``starts`` holds the first characters of whatever may be a call. At one of them ``read_call`` is
    asked; what it took before it called ``begin`` is given out as text if it says False.
    """

    starts: frozenset[str]

    def __init__(self) -> None:
        self._chunk = ""
        self._position = 0
        self._complete = False
        self._held: list[str] | None = None
        self._spaces: list[str] = []
        self._pieces: list[Piece] = []
        self._kind: type[Text] | type[CallArguments] = Text
        self._parts: list[str] = []
        self._after_call = False
        self._in_call = False
        self._line_start = True
        self._running: Reading[None] = self._read_all()

    # ------------------------------------------------------------------------ outside

    def push(self, text: str) -> list[Piece]:
        if not text or self._complete:
            return []
        self._chunk, self._position = text, 0
        next(self._running, None)
        return self._given_out()

    def finish(self) -> list[Piece]:
        if not self._complete:
            self._complete = True
            next(self._running, None)
        return self._given_out()

    def _given_out(self) -> list[Piece]:
        self._flush()
        given, self._pieces = self._pieces, []
        return given

    # ------------------------------------------------------------------------ for formats

    @abstractmethod
    def read_call(self) -> Reading[bool]:
        """Reads a call, or several. False: it was none, nothing was begun."""

    @property
    def at_line_start(self) -> bool:
        """Nothing but white space stands before the character that ``read_call`` begins at, in its
        line or after the last call."""
        return self._line_start or "\n" in self._spaces

    def peek(self) -> Reading[str]:
        """The next character, which stays; empty at the end of the answer."""
        while self._position >= len(self._chunk):
            if self._complete:
                return ""
            yield
        return self._chunk[self._position]

    def take(self) -> str:
        """Goes on by the character that ``peek`` has shown."""
        character = self._chunk[self._position]
        self._position += 1
        if self._held is not None:
            self._held.append(character)
        return character

    def skip_spaces(self) -> Reading[str]:
        """Takes white space. Returns the character after it, which stays."""
        while (character := (yield from self.peek())) in SPACES:
            self.take()
        return character

    def match(self, *literals: str) -> Reading[str | None]:
        """Takes characters as long as they can be one of the literals, none of which may be the
        beginning of another. Returns the one that was there; None: the next character fits none.
        """
        left, taken = literals, 0
        while left:
            character = yield from self.peek()
            left = tuple(literal for literal in left if literal[taken : taken + 1] == character)
            if not left or not character:
                return None
            self.take()
            taken += 1
            if len(left) == 1 and len(left[0]) == taken:
                return left[0]
        return None

    def match_or_text(self, *literals: str) -> Reading[tuple[str | None, str]]:
        """The same. Returns as well what was taken."""
        outer, self._held = self._held, []
        found = yield from self.match(*literals)
        taken, self._held = self._held, outer
        if outer is not None:
            outer += taken
        return found, "".join(taken)

    def put_back(self, text: str) -> None:
        """What was taken last is to come again."""
        if self._held is not None:
            del self._held[-len(text) :]
        if len(text) <= self._position:
            self._position -= len(text)
        else:
            self._chunk = text + self._chunk[self._position :]
            self._position = 0

    def optional(self, read: Reading[bool]) -> Reading[bool]:
        """What may follow in or behind a call. If it does not, the call is over, and what was read
        of it is there again, to be read as something else."""
        self._held = []
        if (yield from read):
            self._drop_held()
            return True
        self.end()
        held, self._held = self._held or [], None
        if self._complete and self._position >= len(self._chunk):
            # The answer was cut in the middle of it: half of a marker is not a text to the user.
            return False
        if held:
            self.put_back("".join(held))
        return False

    def begin(self, name: str) -> None:
        """It is a call, of this name: what was held back is no text."""
        self.end()
        self._drop_held()
        self._flush()
        self._pieces.append(CallBegun(name))
        self._in_call = True

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that has begun."""
        self._add(CallArguments, text)

    def end(self) -> None:
        """The call is over. Without one, nothing."""
        if self._in_call:
            self._in_call = False
            self._flush()
            self._pieces.append(CallEnded())
            self._after_call = self._line_start = True

    # ------------------------------------------------------------------------ inside

    def _read_all(self) -> Reading[None]:
        while character := (yield from self.peek()):
            if character in SPACES:
                self._spaces.append(self.take())
            elif character in self.starts:
                self._held = []
                if (yield from self.read_call()):
                    self.end()
                    self._drop_held()
                elif self._held:
                    self._reject()
                else:
                    self._held = None
                    self._text(self.take())
            else:
                self._text(self.take())
        if self._spaces and not self._after_call:
            self._add(Text, "".join(self._spaces))

    def _text(self, character: str) -> None:
        if character in SPACES:
            self._spaces.append(character)
            return
        if self._spaces:
            if not self._after_call:
                self._add(Text, "".join(self._spaces))
            self._spaces.clear()
        self._after_call = self._line_start = False
        self._add(Text, character)

    def _reject(self) -> None:
        """What was held back is text."""
        held, self._held = self._held or [], None
        for character in held:
            self._text(character)

    def _drop_held(self) -> None:
        self._held = None
        self._spaces.clear()

    def _add(self, kind: type[Text] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if text := "".join(self._parts):
            self._pieces.append(self._kind(text))
        self._parts.clear()


Emit = Callable[[str], None]
"""Where text goes that is read: to a call's arguments, into a list, or nowhere."""
