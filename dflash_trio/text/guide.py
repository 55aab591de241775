"""A model's tokens as the grammars' compiler sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .bad_constraint import BadConstraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_CONTROL = b"\xff"
"""Before a token that is no text."""


def make_guide_tokenizer(
    pieces: Sequence[bytes], control_tokens: Mapping[str, int], end_tokens: Collection[int]
) -> LLTokenizer:
    """For :func:`text.structured.compile_grammar`. Takes a second for 262,144 tokens.

    ``pieces`` has each token's bytes, none for those that are no text. ``end_tokens``, one at
    least, are those that a mask allows where an answer may end. The result refers to nothing of
    the model.
    """
    from llguidance import LLTokenizer

    ends = sorted(end_tokens)
    if not ends:
        raise BadConstraint("this model has no token that could end an answer under a grammar")
    # Known by its attributes: the class that the stubs name is one way to have them.
    tokens: Any = _Tokens(pieces, control_tokens, ends[0])
    return LLTokenizer(tokens, eos_token=ends)


def control_reference(literal: str) -> str:
    """What a control token is called in grammars: its literal in angle brackets, which most bring
    along; ``[ARGS]`` becomes ``<ARGS>``, as llguidance has no other form of a name."""
    return literal if literal.startswith("<") else f"<{literal.strip('[]')}>"


class _Tokens:
    """What llguidance reads of a tokenizer. Its attributes' names are llguidance's."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(
        self, pieces: Sequence[bytes], control_tokens: Mapping[str, int], eos_token_id: int
    ) -> None:
        self.tokens = list(pieces)
        self.eos_token_id = eos_token_id
        for literal, token in control_tokens.items():
            name = control_reference(literal)
            self.tokens[token] = _CONTROL + name.encode("utf-8", "replace")
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text, the longest ones first: not the model's, but any will do.

        Grammars of ours never need them; one that a client wrote may, in a part of its own.
        """
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if not self._ids:
            # Two threads may both do this, with the same outcome.
            self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece}
        longest = max(map(len, self._ids))
        tokens, at = [], 0
        while at < len(raw):
            for end in range(min(len(raw), at + longest), at, -1):
                token = self._ids.get(raw[at:end])
                if token is not None:
                    tokens.append(token)
                    at = end
                    break
            else:
                break  # no token begins like this, so nothing behind it can be said either
        return tokens
