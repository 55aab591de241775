"""One generating sequence, and the only ways its life may go.

Theory of operation. A sequence is born QUEUED when its request is submitted: its slot and cells
are promised already, so it waits for nothing but the next step. PREFILLING puts its prompt into
the KV cache, a chunk a step. With the prompt's last token decoded it is DECODING: each step samples
one token and decodes it in the next. RETIRED is final and is entered exactly once, after its cells
were freed and its last event was recorded. Cancellation, an error or the server's shutdown may
retire it from any state; nothing else skips ahead.

A generation with several answers is as many sequences. The first prefills for all of them; the
others stay QUEUED until it has, and then begin DECODING on a copy of its cells.

When the pool runs out, a sequence may be PAUSED: its cells are gone, everything else of it stays.
To go on it is PREFILLING again, its answer so far included, and then DECODING from where it was.

    QUEUED -> PREFILLING -> DECODING -> RETIRED
                 ^  |          |
                 |  v          v
                 +--- PAUSED <-+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from enum import Enum
from typing import overload

from attrs import define, field

from ..generation.constraint import TokenMatcher
from ..generation.events import ThinkingClosedBy
from ..generation.request import PreparedPrompt
from .admission import Hold
from .answer_text import AnswerText
from .drafting.record import DraftRecord
from .model_runner import TokenSampler


class SequenceState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    RETIRED = "retired"


_Q, _F, _D, _P, _R = SequenceState
LAWFUL: dict[SequenceState, frozenset[SequenceState]] = {
    _Q: frozenset({_F, _D, _P, _R}),
    _F: frozenset({_D, _P, _R}),
    _D: frozenset({_P, _R}),
    _P: frozenset({_F, _R}),
    _R: frozenset(),
}
"""From each state, the states that may follow. The whole machine."""


class UnlawfulTransition(Exception):
    """A bug in the scheduler, never a client's fault."""


@define(eq=False)
class Sequence:
    """One answer of a generation inside the engine. Owned by the scheduler, on the worker's
    thread."""

    generation_id: int
    prepared: PreparedPrompt
    hold: Hold
    """Shared by all answers of the generation."""
    index: int = 0
    """Which of the generation's answers."""
    text: AnswerText | None = field(default=None, init=False)
    """What its tokens say; from its start on."""
    matcher: TokenMatcher | None = field(default=None, init=False)
    """Where it is in the grammar that its answer follows; ``None`` without one."""
    forced: deque[int] = field(factory=deque, init=False)
    """Tokens that come next whatever the model would say: the engine closes its thinking."""
    closes_for: ThinkingClosedBy = field(default="model", init=False)
    """Why it does."""
    state: SequenceState = field(default=SequenceState.QUEUED, init=False)
    seq_id: int | None = field(default=None, init=False)
    """Its row in the KV cache, from PREFILLING on."""
    sampler: TokenSampler | None = field(default=None, init=False)
    computed: int = field(default=0, init=False)
    """Tokens of it in the KV cache: position of the next one to decode."""
    answer: list[int] = field(factory=list, init=False)
    """Tokens sampled. While it is decoding, the last one is not yet in the KV cache."""
    cached: int = field(default=0, init=False)
    """Tokens of the prompt that were in the cache when it began."""
    drafts: DraftRecord | None = field(default=None, init=False)
    """From its start on, where there are drafts."""

    @property
    def prompt(self) -> AbstractSequence[int]:
        return self.prepared.tokens

    @property
    def generated(self) -> int:
        """Tokens sampled."""
        return len(self.answer)

    @property
    def length(self) -> int:
        """Prompt and answer so far, in tokens."""
        return len(self.prepared.tokens) + len(self.answer)

    @property
    def to_prefill(self) -> int:
        """Tokens that have to be in the cache before it can decode: the prompt, and of an answer
        that goes on after a pause all but the last token."""
        return max(len(self.prepared.tokens), self.length - 1)

    @property
    def prefill_end(self) -> int:
        """As many of them as may be computed at once: other answers go on from the prompt's end,
        and not every cache can go back there."""
        prompt = len(self.prepared.tokens)
        return prompt if self.prepared.n > 1 and self.computed < prompt else self.to_prefill

    def tokens(self, begin: int, end: int) -> AbstractSequence[int]:
        """Those at positions ``begin`` .. ``end`` - 1."""
        prompt = len(self.prepared.tokens)
        if end <= prompt:
            return self.prepared.tokens[begin:end]
        head = self.prepared.tokens[begin:prompt] if begin < prompt else ()
        return (*head, *self.answer[max(0, begin - prompt) : end - prompt])

    @property
    def samples_freely(self) -> bool:
        """Its next token is what its sampler makes of the logits: nobody else has a say in it. Its
        first one is not, since others of its generation may share the logits."""
        thinks = self.text is not None and self.text.thinking
        return bool(self.answer) and self.matcher is None and not self.forced and not thinks

    def close_thinking(self, tokens: Iterable[int], reason: ThinkingClosedBy) -> None:
        """Let ``tokens`` come next, which end its block of thinking."""
        self.forced.extend(tokens)
        self.closes_for = reason

    def enter(self, state: SequenceState) -> None:
        """Go on to ``state``, or raise :class:`UnlawfulTransition`."""
        if state not in LAWFUL[self.state]:
            raise UnlawfulTransition(f"{self.state.value} -> {state.value}")
        self.state = state


class TokenView(AbstractSequence[int]):
    """All tokens of a sequence, prompt and answer, as it grows. Copies none but what is sliced."""

    __slots__ = ("_answer", "_prompt")

    def __init__(self, sequence: Sequence) -> None:
        self._prompt = sequence.prompt
        self._answer = sequence.answer

    def __len__(self) -> int:
        return len(self._prompt) + len(self._answer)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> AbstractSequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | AbstractSequence[int]:
        prompt = len(self._prompt)
        if isinstance(place, int):
            if place < 0:
                place += prompt + len(self._answer)
            if place < 0:
                raise IndexError("before the first token")
            return self._prompt[place] if place < prompt else self._answer[place - prompt]
        begin, end, step = place.indices(prompt + len(self._answer))
        if step != 1:
            return tuple(self[at] for at in range(begin, end, step))
        if begin >= prompt:
            return self._answer[begin - prompt : max(0, end - prompt)]
        if end <= prompt:
            return self._prompt[begin:end]
        return (*self._prompt[begin:], *self._answer[: end - prompt])


def cells_used(sequences: Iterable[Sequence]) -> int:
    """What sequences have in the cache; a prompt of several answers counts once."""
    used, shared = 0, set()
    for sequence in sequences:
        used += sequence.computed
        if sequence.computed and sequence.generation_id in shared:
            used -= len(sequence.prompt)
        elif sequence.computed and sequence.prepared.n > 1:
            shared.add(sequence.generation_id)
    return used
