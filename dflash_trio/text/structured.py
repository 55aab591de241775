"""What an answer has to look like, compiled to what the engine asks: which token may come next.

Everything here is computation: :func:`check_constraint` takes milliseconds, up to some tenths of a
second for the largest schemas, and so does :func:`compile_grammar`; both belong off the event loop.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..generation.constraint import ConstraintError, TokenConstraint, TokenMatcher
from ..generation.request import OutputConstraint
from .bad_constraint import BadConstraint as BadConstraint
from .bad_constraint import printable
from .gbnf import gbnf_to_lark
from .json_schema import enforceable
from .patterns import check_pattern, pattern_source

MAX_GRAMMAR = 65_536
"""Characters of a GBNF or Lark grammar."""
MAX_SOURCE = 524_288
"""Characters of what is compiled: a schema's JSON, with its escapes, is the largest."""

ITEM_SEPARATOR = ", "
KEY_SEPARATOR = ": "
"""The only white space between the values of JSON: what Python's ``json.dumps`` writes."""

# Tokens of forced text are not forced one by one: that would ask the tokenizer, whose native half
# may be gone by then, and again at every step of a long text. The last such line wins.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

# Measured in docs/structured-output.md. Fuel and items bound one mask's time, states its memory.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=100_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


def check_constraint(constraint: OutputConstraint) -> None:
    """Refuse whatever can be refused without a vocabulary. Raises BadConstraint."""
    refusal = LLMatcher.validate_grammar(grammar_source(constraint), limits=_LIMITS)
    if refusal and not refusal.startswith("WARNING"):
        raise _refused(refusal)


def grammar_source(constraint: OutputConstraint) -> str:
    """The constraint as a grammar in llguidance's Lark. Raises BadConstraint."""
    match constraint.kind:
        case "json_object":
            return _json_source({"type": "object"})
        case "json_schema":
            return _json_source(enforceable(constraint.source))
        case "regex":
            pattern = _text(constraint.source, "a regular expression")
            check_pattern(pattern, schema=False)
            return f"start: {pattern_source(pattern)}{_OPTIONS}"
        case "gbnf":
            return gbnf_to_lark(_text(constraint.source, "a grammar")) + _OPTIONS
        case "lark":
            return _text(constraint.source, "a grammar") + _OPTIONS


def compile_grammar(tokenizer: LLTokenizer, source: str) -> TokenConstraint:
    """Compile what :func:`grammar_source` made, for one vocabulary.

    Raises BadConstraint if it does not compile, goes beyond the bounds, or accepts nothing.
    """
    if len(source) > MAX_SOURCE:
        raise BadConstraint(f"the grammar is larger than {MAX_SOURCE} characters")
    compiled = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if compiled.is_error():
        raise _refused(compiled.get_error())
    # llguidance's own mask has a word more where the vocabulary fills its last.
    size = (tokenizer.vocab_size + 31) // 32 * 4
    constraint = CompiledGrammar(compiled, frozenset(tokenizer.eos_tokens), size)
    try:
        first = constraint.new_matcher().mask()
    except ConstraintError as error:
        raise BadConstraint(f"the grammar cannot be begun: {error}") from None
    if not any(first):
        raise BadConstraint("the grammar accepts nothing")
    return constraint


class CompiledGrammar:
    """A grammar for one vocabulary. Its own matcher never moves; it is there to be copied."""

    def __init__(self, compiled: LLMatcher, ends: frozenset[int], size: int) -> None:
        """``size``: of a mask, in bytes."""
        self._compiled, self._ends, self._size = compiled, ends, size

    def new_matcher(self) -> TokenMatcher:
        return GrammarMatcher(self._compiled.deep_copy(), self._ends, self._size)


class GrammarMatcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], size: int) -> None:
        self._matcher, self._ends, self._size = matcher, ends, size

    @property
    def finished(self) -> bool:
        # An error stops it as well, and completes nothing.
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()  # afterwards: a mask that could not be made allows the end, as if by right
        return mask[: self._size]

    def accept(self, token: int) -> None:
        if self.finished and token in self._ends:
            return
        try:
            self._matcher.consume_token(token)
        except (OverflowError, ValueError) as error:
            raise ConstraintError(f"no such token: {printable(str(error), 100)}") from None
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher.get_error()))


# Where llguidance's own say nothing to a client, or name options that it does not have.
_OWN_WORDS = {
    "panic": "it is too large",
    "NoExtension": "it accepts nothing",
    "oneOf constraints": "the schemas of its oneOf may not exclude each other",
}


def _json_source(schema: dict[str, Any]) -> str:
    # All escapes stay allowed: without the numbered ones, llguidance 1.9.1 leaves out characters
    # that have no other, and "a\x01b" becomes "ab".
    options = {
        "whitespace_flexible": False,
        "item_separator": ITEM_SEPARATOR,
        "key_separator": KEY_SEPARATOR,
    }
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}{_OPTIONS}"


def _text(source: Any, what: str) -> str:
    if not isinstance(source, str):
        raise BadConstraint(f"{what} has to be a string")
    if len(source) > MAX_GRAMMAR:
        raise BadConstraint(f"{what} is longer than {MAX_GRAMMAR} characters")
    if any("\ud800" <= char <= "\udfff" for char in source) or "\0" in source:
        raise BadConstraint(f"{what} has a character in it that no text has")
    return source


def _refused(message: str) -> BadConstraint:
    return BadConstraint(f"the constraint is refused: {_reason(message)}")


def _reason(message: str) -> str:
    """llguidance's message, without the listing and the state that follow it."""
    for beginning, reason in _OWN_WORDS.items():
        if message.startswith(beginning):
            return reason
    reason = message.split("\n   1 |")[0].split("<state>")[0].split("<non-verbose/>")[0]
    reason = re.sub(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", reason)
    return printable(reason, 200) or "no reason is known"
