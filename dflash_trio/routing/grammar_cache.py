"""GrammarCache: a model's compiled grammars, so that a client's schema is compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..engine.model_runner import Vocabulary
from ..generation.constraint import TokenConstraint
from ..text.structured import compile_grammar

MOST_GRAMMARS = 32
"""Kept, the latest used. Compiling takes milliseconds, so a few are enough to spare the rounds of a
conversation; each may be some megabytes."""


class GrammarCache:
    """Of one vocabulary. Usable from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Guards the one below, held for bookkeeping only: two threads may compile the same.
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, TokenConstraint] = OrderedDict()

    def compile(self, source: str) -> TokenConstraint:
        """CPU-bound, the first time seconds for a large vocabulary. Raises text.structured's
        BadConstraint, and EngineError once the model is unloaded."""
        with self._lock:
            known = self._compiled.get(source)
            if known is not None:
                self._compiled.move_to_end(source)
                return known
        compiled = compile_grammar(self._vocabulary.guide_tokenizer(), source)
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled
