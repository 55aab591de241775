"""What the scheduler needs of a model, and nothing more.

Two runners implement this protocol and pass one contract suite: ``llama_runner`` on llama.cpp and
``scripted_runner``, a verified fake. A runner belongs to the thread that made it; only
:meth:`ModelRunner.abort` and the :class:`Vocabulary` may be used from other threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from attrs import frozen

from ..generation.events import TokenLogprob
from ..generation.request import SamplingParams


class EngineError(Exception):
    """The engine cannot go on: a fatal return code, a lost device, a broken invariant."""


class ModelLoadError(Exception):
    """The model cannot be loaded. ``str()`` is one line for the operator."""


class LoadingStopped(Exception):
    """Loading was given up because somebody asked for it; not an error."""


@frozen
class ModelInfo:
    """Facts about a loaded model."""

    architecture: str
    description: str
    trained_ctx: int
    vocab_size: int
    chat_template: str | None
    """The file's own Jinja source, if it carries one."""
    device: str
    """The resolved device, ``backend:index``."""
    threads: int
    gpu_layers: int


@frozen
class BatchSlice:
    """Consecutive tokens of one sequence inside a batch.

    ``tokens[i]`` is decoded at position ``position + i``. The logits after each of the last
    ``outputs`` tokens are kept until the next decode: none in the middle of a prompt, one to go
    on from, and one more for each token that is a guess.

    Outputs are counted through the batch, in the order of its slices: those of the first slice
    are 0, 1, ..., and those of the next go on from there.

    With ``parents`` the tokens are a tree instead: ``tokens[i]`` follows ``tokens[parents[i]]``, a
    place before its own, and sees no other branch; -1 for the first, which is at ``position``.
    Each has an output. After the step nothing may be done to the sequence but
    :meth:`CacheRows.keep_path`, or a rewind to the root's position at most.
    """

    seq_id: int
    position: int
    tokens: Sequence[int]
    outputs: int
    parents: Sequence[int] | None = None


@frozen
class Batching:
    """What a step is best made of, by device and cache."""

    full: int = sys.maxsize
    """Tokens of prompts from which on each further one makes a step longer by as much as it would a
    step of its own: more prompts at once only make the first of them wait for the last."""
    apart: bool = False
    """Prompts cost as much beside decoding sequences as in a step without them."""


class DecodeOutcome(Enum):
    """What became of a batch. Anything worse is an :class:`EngineError`."""

    DONE = "done"
    NO_CELLS = "no cells"
    """The KV cache had no room; nothing was decoded."""
    ABORTED = "aborted"
    """:meth:`ModelRunner.abort` cut the step; the batch's sequences may hold part of it."""


class Vocabulary(Protocol):
    """A model's tokens. Usable from any thread until the runner is closed."""

    @property
    def size(self) -> int: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool:
        """Whether the model was trained with a BOS in front of every sequence."""
        ...

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Tokens that end a generation: end of turn, end of text."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Literal -> id of every control token."""
        ...

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``, no BOS added.

        ``parse_special``: control-token literals in it become control tokens.
        Raises EngineError once the runner is closed.
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; empty for control tokens."""
        ...

    def shown_piece(self, token: int) -> bytes:
        """As :meth:`piece`, with control tokens by their literals."""
        ...

    def guide_tokenizer(self) -> Any:
        """What grammars are compiled for: an ``llguidance.LLTokenizer``, the same every time.

        The first call takes a second in a large vocabulary. What it returns, and whatever is
        compiled for it, refers to nothing of the model and outlives it.
        Raises EngineError once the runner is closed.
        """
        ...


class TokenSampler(Protocol):
    """Chooses tokens for one sequence. Owned by it; ``close`` exactly once, same thread."""

    def sample(self, output: int, mask: bytes | None = None) -> int:
        """The next token, from the logits of output ``output`` of the last batch.

        ``mask``: one bit for each token that is allowed, see generation.constraint; at least one.
        The logits are afterwards as they were.
        """
        ...

    def accept(self, token: int) -> None:
        """Count a token that was not sampled as said."""
        ...

    def close(self) -> None: ...


class CacheRows(Protocol):
    """The rows of a KV cache, one for each sequence, and what can be done to them between steps."""

    @property
    def shares_cells(self) -> bool:
        """All rows draw on one pool of cells, and a copy shares its original's. False: each row has
        cells of its own."""
        ...

    @property
    def wants_runs(self) -> bool:
        """Steps take less time where the rows of a batch lie beside each other."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Give sequence ``target``, which must be empty, the first ``length`` tokens of
        ``source``. Moves no data where cells are shared."""
        ...

    def save(self, seq_id: int) -> bytes:
        """Everything that a sequence has in the cache, for :meth:`load` of this runner
        or of another one for the same model in the same configuration."""
        ...

    @property
    def saving_costs(self) -> float:
        """What :meth:`save` and :meth:`load` of a row cost: so many tokens of a prompt could be
        computed in that time. 0 where it is not known yet."""
        ...

    def load(self, seq_id: int, state: bytes) -> None:
        """Give a sequence, which must be empty, what another one had. The bytes must be as
        :meth:`save` gave them. Raises EngineError if they do not fit,
        or if there are not cells enough; the sequence may hold anything then."""
        ...

    def can_rewind(self, seq_id: int, length: int) -> bool:
        """Whether a sequence could go on exactly from its first ``length`` tokens: some caches
        have lost what is far back, or cannot go back at all."""
        ...

    def sequence_length(self, seq_id: int) -> int:
        """Cells that a sequence holds: one more than its last position."""
        ...

    def rewind(self, seq_id: int, length: int) -> None:
        """Drop a sequence's cells from position ``length`` on. 0 frees it."""
        ...

    def keep_path(self, seq_id: int, path: Sequence[int]) -> None:
        """Of the tree that the last batch had for a sequence, keep the tokens at these places, from
        the root on, each the next one's parent; the cells of all others are free again."""
        ...

    def forget_paths(self, seq_id: int) -> None:
        """No tree is wanted for a sequence soon: give back what is kept ready for it."""
        ...

    @property
    def paths_held(self) -> int:
        """What is kept ready for trees, in paths; 0 where nobody decodes."""
        ...


class ModelRunner(CacheRows, Protocol):
    """A model with a KV cache of ``slots`` sequences, ids 0 .. slots - 1."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def rewinds_freely(self) -> bool:
        """What a sequence got in the last batch can be rewound again, to any length. False for
        models with a state instead of cells: they can only go on."""
        ...

    @property
    def tree_paths(self) -> int:
        """Leaves that the trees of a batch may have in all, beside one for each; 0: only trees that
        do not branch."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def new_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> TokenSampler:
        """A sampler for one generation; penalties look back into ``prompt`` too."""
        ...

    @property
    def samples_ahead(self) -> bool:
        """Whether :meth:`sample_ahead` is of any use here."""
        ...

    def sample_ahead(self, wanted: Sequence[tuple[TokenSampler, int]]) -> None:
        """Have samplers of this runner choose from outputs of the last batch at the same time, each
        from one. What each is asked next has to be that: ``sample`` of this output, and without a
        mask."""
        ...

    def logprobs(self, output: int, token: int, top: int) -> TokenLogprob:
        """How likely ``token`` and the ``top`` likeliest tokens were by output ``output`` of the
        last batch, in the model's own distribution."""
        ...

    def warm_up(self) -> None:
        """Decode something once and forget it, so that the first client does not wait for weights
        to be paged in and graphs to be built. May be cut by :meth:`abort`."""
        ...

    @property
    def batching(self) -> Batching: ...

    @property
    def launches_ahead(self) -> bool:
        """A step computes without the interpreter, so ``launched`` is called."""
        ...

    def decode(
        self, batch: Sequence[BatchSlice], launched: Callable[[], None] = lambda: None
    ) -> DecodeOutcome:
        """One step: every slice's tokens enter the KV cache, outputs become readable.

        Blocks for the whole step. Slices continue their sequences without a gap. ``launched`` is
        called once the step wants nothing more of the interpreter: right before it where the call
        itself computes, and elsewhere when the device has its work and before its end is waited
        for.
        """
        ...

    def abort(self) -> None:
        """Cut the running decode short as soon as possible, or the next one if none is running.
        Thread-safe; a no-op where the device cannot. Holds until :meth:`rearm`."""
        ...

    def rearm(self) -> None:
        """Forget an abort that came before. Thread-safe. Whoever aborts decides who may be hit,
        so whoever plans the next batch calls this before it, under the same lock."""
        ...

    def close(self) -> None:
        """Free everything on the device, on the calling (owning) thread. Idempotent."""
        ...
