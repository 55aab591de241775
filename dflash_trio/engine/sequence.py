"""One generating sequence, and the only ways its life may go.

Theory of operation. A sequence is born QUEUED when its request is submitted: its slot and cells
are promised already, so it waits for nothing but the next step. PREFILLING puts its prompt into
the KV cache, a chunk a step. With the prompt's last token decoded it is DECODING: each step samples
one token and decodes it in the next. RETIRED is final and is entered exactly once, after its cells
were freed and its last event was recorded. Cancellation, an error or the server's shutdown may
retire it from any state; nothing else skips ahead, and nothing goes back.

A generation with several answers is as many sequences. The first prefills for all of them; the
others stay QUEUED until it has, and then begin DECODING on a copy of its cells.

    QUEUED -> PREFILLING -> DECODING -> RETIRED
       \\__________\\____________________/
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from enum import Enum

from attrs import define, field

from ..generation.constraint import TokenMatcher
from ..generation.events import ThinkingClosedBy
from ..generation.request import PreparedPrompt
from .admission import Hold
from .answer_text import AnswerText
from .model_runner import TokenSampler


class SequenceState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETIRED = "retired"


LAWFUL: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.QUEUED: frozenset(
        {SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.RETIRED}
    ),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, SequenceState.RETIRED}),
    SequenceState.DECODING: frozenset({SequenceState.RETIRED}),
    SequenceState.RETIRED: frozenset(),
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
    generated: int = field(default=0, init=False)
    """Tokens sampled."""
    last_token: int | None = field(default=None, init=False)
    """Sampled, not yet in the KV cache."""

    @property
    def prompt(self) -> AbstractSequence[int]:
        return self.prepared.tokens

    @property
    def length(self) -> int:
        """Prompt and answer so far, in tokens."""
        return len(self.prepared.tokens) + self.generated

    def close_thinking(self, tokens: Iterable[int], reason: ThinkingClosedBy) -> None:
        """Let ``tokens`` come next, which end its block of thinking."""
        self.forced.extend(tokens)
        self.closes_for = reason

    def enter(self, state: SequenceState) -> None:
        """Go on to ``state``, or raise :class:`UnlawfulTransition`."""
        if state not in LAWFUL[self.state]:
            raise UnlawfulTransition(f"{self.state.value} -> {state.value}")
        self.state = state
