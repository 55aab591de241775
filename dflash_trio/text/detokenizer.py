"""From the bytes of tokens to text, whole characters only."""

from __future__ import annotations

import codecs

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one sequence's token bytes as UTF-8.

    A token may end in the middle of a character, so an incomplete character at the end of what
    has come is held until the bytes that complete it arrive. Bytes that can no longer become a
    character turn into U+FFFD, one for each maximal ill-formed part, just as decoding everything
    at once would do: how the bytes were cut into tokens never shows in the text.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _utf8_decoder(errors="replace")

    def push(self, piece: bytes) -> str:
        """Take a token's bytes; return the text that is certain now, maybe empty."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """End the text; return what is left of it.

        A token limit can cut inside a character. Its first bytes say nothing to a reader, and
        U+FFFD would claim that the model wrote something ill-formed, so they are dropped. As
        ``push`` hands over every whole character at once, the answer is always the empty string;
        it is there so that callers treat all stages of the text alike. The detokenizer is as new
        afterwards.
        """
        self._decoder.reset()
        return ""
