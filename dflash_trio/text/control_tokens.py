"""Keeps what clients write from becoming control tokens.

A chat template mixes its own control-token literals (``<|im_end|>``) with text of clients, who may
write the same literals. After rendering nobody could tell them apart, and a client could close its
turn and forge another. So client text is marked *before* rendering: certain characters are
replaced by stand-ins, private-use code points that occur nowhere else in the request or the
template. What then reads like a control token in the rendered prompt is the template's own word;
everything else is plain text, in which the stand-ins turn back into what they stand for.

One character for one character, rather than an extra character beside it, keeps lengths, slices,
trimming and single-character literals right. Which characters are replaced:

1. The first character of every literal in client text. This alone keeps whole literals apart.
2. The first character of every literal, wherever client text has it (every ``<``, if the literals
   begin so): then no literal can *begin* in client text at all, however a template cuts, joins or
   filters it (``"<|im_<x>end|>"`` with ``<x>`` removed; a name ending in ``<|im_`` followed by
   a content of ``end|>``). Two exceptions keep templates working. Strings the template itself
   speaks are kept, as it may look for them (``"</think>" in content``); only rule 1 and rule 3
   hold in them. And letters, digits and blanks are kept, for what a template does to words.
3. The first character of an unfinished literal at the end of a client string, which the text
   behind it could finish.
4. A literal that the template begins and the client goes on with (``"<" + name + ">"``): only if
   some text in the template ends like an unfinished literal. Then the last character of the rest
   of such a literal at the start of a client string is replaced, and the first one of a string
   that is nothing but a part of it. Words the template itself speaks stay as they are.

Not covered: a template that changes letters (``upper``) or builds literals character by character
from numbers; one that begins a literal in several steps out of pieces which are each no beginning.
Where a stand-in for a quote would keep JSON from escaping it, a literal would have to begin or end
with that quote, which none is known to do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

import attrs

STAND_INS = (0xE000, 0xF8FF)
"""The code points that may stand for others, first and last: Unicode's private use area."""

_private_use = re.compile(f"[{chr(STAND_INS[0])}-{chr(STAND_INS[1])}]")


@attrs.frozen
class Segment:
    """A stretch of a rendered prompt."""

    text: str
    control: bool
    """Whether the text is the literal of one control token, by the template's own word. If not,
    it is plain text, even where it looks like a literal."""


class ControlTokens:
    """The control-token literals of one vocabulary. Immutable; build it once per model."""

    def __init__(self, literals: Iterable[str]) -> None:
        """Know these literals, in any order; empty ones are left out."""
        self.literals = frozenset(filter(None, literals))
        self.longest = max(map(len, self.literals), default=0)
        self.first_characters = frozenset(literal[0] for literal in self.literals)
        self.alphabet = frozenset().union(*self.literals)
        self.beginnings = frozenset(
            literal[:length] for literal in self.literals for length in range(1, len(literal))
        )
        # A trie: a plain alternation of thousands of literals is tried one by one at every "<".
        self._pattern = re.compile(f"({_trie(self.literals)})") if self.literals else None

    def starts_at(self, text: str, at: int) -> bool:
        """Whether a literal stands at this index."""
        return self._pattern is not None and self._pattern.match(text, at) is not None

    def occurs_in(self, text: str) -> bool:
        """Whether a literal stands anywhere in the text."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Part a text at the literals, left to right, the longest at each place.

        Yields each non-empty part, and whether it is a literal.
        """
        parts = [rendered] if self._pattern is None else self._pattern.split(rendered)
        for index, part in enumerate(parts):
            if part:
                yield part, index % 2 == 1


@attrs.frozen
class TemplateWords:
    """What a template itself says, as far as the marking of client text depends on it."""

    spoken: frozenset[str]
    """Its string constants and attribute names: what it may compare client text with."""
    written: frozenset[str]
    """Its string constants and literal text: what it may put beside client text."""
    private: frozenset[str] = frozenset()
    """Private-use code points in it, which cannot be stand-ins."""

    @classmethod
    def of(cls, *, spoken: Iterable[str], written: Iterable[str], source: str) -> TemplateWords:
        """Collect the words of the template with this source text."""
        spoken, written = frozenset(spoken), frozenset(written)
        private = set(_private_use.findall(source))
        for word in spoken | written:
            private.update(_private_use.findall(word))
        return cls(spoken, written, frozenset(private))


@attrs.frozen
class Guard:
    """How one model and one template go together; makes a ``Marking`` per request. Immutable."""

    tokens: ControlTokens
    words: TemplateWords
    # Spoken strings that contain a first character of rule 2, none of them with a literal in it.
    _kept: tuple[str, ...] = attrs.field(init=False)
    # Spoken strings without one: plain words, exempt from rule 4.
    _plain_words: frozenset[str] = attrs.field(init=False)
    # The literals that the template may begin, one after the other (rule 4), and their ends.
    _open: str = attrs.field(init=False)
    _open_longest: int = attrs.field(init=False)
    _open_ends: frozenset[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        tokens = self.tokens
        barred = {c for c in tokens.first_characters if not (c.isalnum() or c.isspace())}
        kept = {word for word in self.words.spoken if barred & set(word)}
        init = functools.partial(object.__setattr__, self)
        init("_kept", tuple(sorted(w for w in kept if not tokens.occurs_in(w))))
        init("_plain_words", self.words.spoken - kept)
        tails: set[str] = set()
        for word in self.words.written:
            for text in {word, word.rstrip()}:
                near = text[-tokens.longest :]
                tails.update(near[i:] for i in range(len(near)) if near[i:] in tokens.beginnings)
        opened = sorted(
            literal
            for literal in (tokens.literals if tails else ())
            if any(literal.startswith(tail) and literal != tail for tail in tails)
        )
        init("_open", "\0".join(opened))
        init("_open_longest", max(map(len, opened), default=0))
        init("_open_ends", frozenset(lit[i:] for lit in opened for i in range(1, len(lit))))

    def marking(self, client: Iterable[str]) -> Marking:
        """Choose stand-ins for a request whose client strings are these, all of them.

        Raises:
            ValueError: so many private-use code points occur in them that none is free.
        """
        taken = set(self.words.private | self.tokens.alphabet)
        for text in client:
            if not text.isascii():
                taken.update(_private_use.findall(text))
        free = (chr(c) for c in range(STAND_INS[0], STAND_INS[1] + 1) if chr(c) not in taken)
        stand_ins = dict(zip(sorted(self.tokens.alphabet), free, strict=False))
        marker = next(free, None)
        if marker is None:
            raise ValueError("the text uses too many private-use code points (U+E000 to U+F8FF)")
        return Marking(self, stand_ins, marker)

    def keeps(self, text: str) -> list[tuple[str, str, int]]:
        """Rule 2's exceptions in a text: for each, a character, the string around it, its index."""
        return [
            (char, word, index)
            for word in self._kept
            if word in text
            for index, char in enumerate(word)
            if char in self.tokens.first_characters
        ]

    def continuation(self, text: str) -> int:
        """Rule 4: the index of the character to replace in a client string, or -1."""
        if not self._open or text in self._plain_words:
            return -1
        indent = len(text) - len(text.lstrip())
        for start in {0, indent}:
            body = text[start : start + self._open_longest]
            for length in range(len(body), 0, -1):
                if body[:length] in self._open_ends:
                    return start + length - 1
        body = text.strip()
        if body and len(body) < self._open_longest and body in self._open:
            return indent
        return -1


class Marking:
    """The stand-ins of one request: marks its client strings, reads its rendered prompt."""

    def __init__(self, guard: Guard, stand_ins: dict[str, str], marker: str) -> None:
        self._guard = guard
        self._stand_ins = stand_ins
        self._used: set[str] = set()
        self.marker = marker
        """One more code point that occurs nowhere else: free for the caller to mark a place."""
        firsts = guard.tokens.first_characters
        self._first = re.compile(f"[{''.join(map(re.escape, firsts))}]") if firsts else None
        self._simple = all(not (c.isalnum() or c.isspace()) for c in firsts)

    def mark(self, text: str) -> str:
        """A client string with stand-ins where it could become part of a control token."""
        guard = self._guard
        at = guard.continuation(text)
        if self._first is not None and self._first.search(text):
            kept = guard.keeps(text)
            if self._simple and not kept:
                marked = text
                for char in guard.tokens.first_characters:
                    if char in marked:
                        marked = marked.replace(char, self._stand_in(char))
            else:
                marked = self._mark_chosen(text, kept)
        else:
            marked = text
        if at >= 0 and marked[at] == text[at]:
            marked = f"{marked[:at]}{self._stand_in(text[at])}{marked[at + 1 :]}"
        return marked

    def mark_all(self, value: object) -> object:
        """A JSON-like value with every string in it marked, keys included."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark_all(key): self.mark_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Text with its stand-ins turned back into what they stand for."""
        if text.isascii():
            return text
        for char in self._used:
            text = text.replace(self._stand_ins[char], char)
        return text

    def split(self, rendered: str) -> tuple[Segment, ...]:
        """The segments of a prompt rendered from marked strings: never empty, no two texts
        in a row."""
        return tuple(
            Segment(part, True) if control else Segment(self.restore(part), False)
            for part, control in self._guard.tokens.split(rendered)
        )

    def _stand_in(self, char: str) -> str:
        self._used.add(char)
        return self._stand_ins[char]

    def _mark_chosen(self, text: str, kept: list[tuple[str, str, int]]) -> str:
        """Rules 1 to 3 where some first characters must stay."""
        tokens = self._guard.tokens
        trimmed = len(text.rstrip())

        def replace(match: re.Match[str]) -> str:
            char, at = match[0], match.start()
            unfinished = (len(text) - at < tokens.longest and text[at:] in tokens.beginnings) or (
                0 < trimmed - at < tokens.longest and text[at:trimmed] in tokens.beginnings
            )
            if not unfinished and not tokens.starts_at(text, at):
                if char.isalnum() or char.isspace():
                    return char
                for kept_char, word, index in kept:
                    if kept_char == char and at >= index and text.startswith(word, at - index):
                        return char
            return self._stand_in(char)

        assert self._first is not None
        return self._first.sub(replace, text)


def walk_strings(value: object) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk_strings(key)
            yield from walk_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk_strings(item)


def _trie(literals: Iterable[str]) -> str:
    """A pattern for the literals, the longest first wherever several fit."""
    words = sorted(set(literals))
    optional = words[0] == ""
    if optional:
        del words[0]
    branches = []
    start = 0
    while start < len(words):
        end = start + 1
        while end < len(words) and words[end][0] == words[start][0]:
            end += 1
        group = words[start:end]
        # The words are sorted, so the first and the last share what all of them share. Taking it
        # in one step keeps the nesting as deep as the branching, not as long as the literals.
        shared = 1
        while shared < min(map(len, group)) and group[0][shared] == group[-1][shared]:
            shared += 1
        rest = [word[shared:] for word in group]
        branches.append(re.escape(group[0][:shared]) + (_trie(rest) if rest != [""] else ""))
        start = end
    if not branches:
        return ""
    # A greedy "?" prefers the longer literal.
    return f"(?:{'|'.join(branches)})" + ("?" if optional else "")
