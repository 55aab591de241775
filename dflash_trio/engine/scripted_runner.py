"""A verified fake: a runner with a real (small) KV cache discipline and no model.

It passes the same contract suite as the llama.cpp runner, so tests of the floors above may trust
it. Its tokens are bytes; its "logits" depend on the whole history of a sequence, so that a token
decoded at a wrong position, into a wrong sequence or after a missed rewind changes what follows.
Tests may script answers, make steps slow, make them fail, or hold them at a gate.
"""

from __future__ import annotations

import math
import pickle
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from attrs import define, field

from ..generation.events import TokenAlternative, TokenLogprob
from ..generation.request import SamplingParams
from ..text.guide import make_guide_tokenizer
from .model_runner import (
    Batching,
    BatchSlice,
    DecodeOutcome,
    EngineError,
    ModelInfo,
    TokenSampler,
)
from .token_tree import check_path, paths_of

_BYTES = 256
EOG = 256
BOS = 257
VOCAB_SIZE = 258

Script = Callable[[bytes, int], int | None]
"""(history as bytes, its length in tokens) -> the token to force, or ``None`` for none."""


class ScriptedVocabulary:
    """Byte tokens, one end-of-generation token and a BOS."""

    size = VOCAB_SIZE
    bos: int | None = BOS
    eos: int | None = EOG
    adds_bos = True
    eog_tokens = frozenset({EOG})
    control_tokens: Mapping[str, int] = {"<|end|>": EOG, "<|begin|>": BOS}

    def __init__(self) -> None:
        self.closed = False
        self._guide_lock = threading.Lock()
        self._guide: Any = None

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        if self.closed:
            raise EngineError("the model is no longer loaded")
        if not parse_special:
            return list(text.encode())
        tokens: list[int] = []
        while text:
            found = min(
                (at, literal) if (at := text.find(literal)) >= 0 else (len(text), "")
                for literal in self.control_tokens
            )
            at, literal = found
            tokens += text[:at].encode()
            if literal:
                tokens.append(self.control_tokens[literal])
            text = text[at + len(literal) :]
        return tokens

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < _BYTES else b""

    def shown_piece(self, token: int) -> bytes:
        literals = {token: literal for literal, token in self.control_tokens.items()}
        return literals[token].encode() if token in literals else self.piece(token)

    def guide_tokenizer(self) -> Any:
        with self._guide_lock:
            if self.closed:
                raise EngineError("the model is no longer loaded")
            if self._guide is None:
                pieces = list(map(self.piece, range(VOCAB_SIZE)))
                self._guide = make_guide_tokenizer(pieces, self.control_tokens, self.eog_tokens)
            return self._guide


class ScriptedSampler:
    """Greedy, or a seeded draw over the bytes; biases and penalties apply to both."""

    def __init__(
        self, runner: ScriptedRunner, params: SamplingParams, prompt: Sequence[int]
    ) -> None:
        self._runner = runner
        self._params = params
        # What penalties look back at, should there be any.
        self._history = list(prompt) if params.has_penalties else []
        self._random = random.Random(params.seed)
        self._ahead: tuple[int, int] | None = None
        self.closed = False

    def sample(self, output: int, mask: bytes | None = None) -> int:
        if self._ahead is not None:
            (chosen_from, token), self._ahead = self._ahead, None
            if chosen_from != output or mask is not None:
                raise EngineError(f"output {chosen_from} was sampled ahead, and not asked for")
            return token
        logits = self._runner.logits(output)
        for token, bias in self._params.logit_bias:
            logits[token] += bias
        if self._params.has_penalties:
            self._penalize(logits)
        if mask is not None:
            for token in range(VOCAB_SIZE):
                if not mask[token // 8] >> token % 8 & 1:
                    logits[token] = -math.inf
        largest = max(logits)
        if self._params.temperature <= 0:
            token = logits.index(largest)
        else:
            weights = [math.exp((x - largest) / self._params.temperature) for x in logits]
            token = self._random.choices(range(VOCAB_SIZE), weights)[0]
        self.accept(token)
        return token

    def draw_ahead(self, output: int) -> None:
        self._ahead = (output, self.sample(output))

    def accept(self, token: int) -> None:
        if self._params.has_penalties:
            self._history.append(token)

    def _penalize(self, logits: list[float]) -> None:
        params, last = self._params, self._params.penalty_last_n
        seen = self._history if last < 0 else self._history[-last:] if last else []
        for token, times in Counter(seen).items():
            if logits[token] > 0:
                logits[token] /= params.repeat_penalty
            else:
                logits[token] *= params.repeat_penalty
            logits[token] -= times * params.frequency_penalty + params.presence_penalty

    def close(self) -> None:
        if self.closed:
            raise EngineError("a sampler was closed twice")
        self.closed = True
        self._runner.open_samplers -= 1


@define
class _Tree:
    """What the last batch had for a row, until it is said what stays."""

    parents: Sequence[int]
    tokens: Sequence[int]
    checksums: list[int] = field(factory=list)
    cells: list[int] = field(factory=list)


class ScriptedRunner:
    """A fake model with ``slots`` sequences of ``cells`` KV cells in all."""

    def __init__(
        self,
        *,
        slots: int = 1,
        cells: int = 4096,
        shares_cells: bool = True,
        wants_runs: bool = False,
        rewinds_freely: bool = True,
        launches_ahead: bool = False,
        batching: Batching | None = None,
        window: int | None = None,
        tree_paths: int = 0,
        script: Script | None = None,
        before_decode: Callable[[Sequence[BatchSlice]], None] | None = None,
        chat_template: str | None = None,
        architecture: str = "scripted",
        saving_costs: float = 0.0,
    ) -> None:
        """``window``: tokens that a row remembers for going back; ``None``: all, and none without
        ``rewinds_freely``. ``script`` forces tokens; ``before_decode`` runs in each step and may
        block or raise."""
        self.info = ModelInfo(
            architecture=architecture,
            description="scripted",
            trained_ctx=cells,
            vocab_size=VOCAB_SIZE,
            chat_template=chat_template,
            device="cpu:0",
            threads=1,
            gpu_layers=0,
        )
        self.vocabulary = ScriptedVocabulary()
        self.open_samplers = 0
        self.closed = False
        self.decoded_tokens = 0
        self._cells = cells
        self._window = window
        self._script = script
        self._before_decode = before_decode
        self.shares_cells = shares_cells
        self.wants_runs = wants_runs
        self.rewinds_freely = rewinds_freely
        self.launches_ahead = launches_ahead
        self.batching = batching or Batching()
        self.saving_costs = saving_costs
        self._histories: list[list[int]] = [[] for _ in range(slots)]
        # Beside each history the checksum of each of its beginnings: a token costs the same
        # however long the sequence has become.
        self._checksums: list[list[int]] = [[] for _ in range(slots)]
        # Of each token of each history, the cell that it is in, and how many rows share it.
        self._cell_ids: list[list[int]] = [[] for _ in range(slots)]
        self._sharers: Counter[int] = Counter()
        self._next_cell = count()
        # For each output: the checksum and the length of the history, and, for a script, itself.
        self._outputs: list[tuple[int, int, bytes]] = []
        self.tree_paths = tree_paths if shares_cells else 0
        # Of rows whose last batch was a tree: its parents, tokens and checksums, and their cells.
        self._trees: dict[int, _Tree] = {}
        # Paths that a row is thought to keep ready, beside its own.
        self._paths: dict[int, int] = {}
        self._aborted = threading.Event()

    def new_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> ScriptedSampler:
        self.open_samplers += 1
        return ScriptedSampler(self, params, prompt)

    samples_ahead = True

    def sample_ahead(self, wanted: Sequence[tuple[TokenSampler, int]]) -> None:
        for sampler, output in wanted:
            assert isinstance(sampler, ScriptedSampler)
            sampler.draw_ahead(output)

    def warm_up(self) -> None:
        pass  # nothing in here is slower the first time

    def decode(
        self, batch: Sequence[BatchSlice], launched: Callable[[], None] = lambda: None
    ) -> DecodeOutcome:
        if self.closed:
            raise EngineError("decode after close")
        for item in batch:
            if not item.tokens:
                raise EngineError("an empty slice")
            if item.outputs > len(item.tokens):
                raise EngineError("more outputs than tokens")
            if item.seq_id in self._trees:
                raise EngineError(f"sequence {item.seq_id} has a tree of which nothing was kept")
            if item.position != len(self._histories[item.seq_id]):
                raise EngineError(
                    f"sequence {item.seq_id} continues at {len(self._histories[item.seq_id])}, "
                    f"not {item.position}"
                )
        self._take_paths(batch)
        if self.launches_ahead:
            launched()
        if self._before_decode is not None:
            self._before_decode(batch)
        if self._aborted.is_set():
            return DecodeOutcome.ABORTED
        if self.cells_used + sum(len(item.tokens) for item in batch) > self._cells:
            return DecodeOutcome.NO_CELLS
        self._outputs.clear()
        for item in batch:
            if item.parents is not None:
                self._decode_tree(item, item.parents)
                continue
            history, checksums = self._histories[item.seq_id], self._checksums[item.seq_id]
            wordless = len(item.tokens) - item.outputs
            for index, token in enumerate(item.tokens):
                before = checksums[-1] if checksums else 0
                history.append(token)
                checksums.append(zlib.crc32(token.to_bytes(2, "little"), before))
                cell = next(self._next_cell)
                self._cell_ids[item.seq_id].append(cell)
                self._sharers[cell] = 1
                if index >= wordless:
                    said = bytes(t for t in history if t < _BYTES) if self._script else b""
                    self._outputs.append((checksums[-1], len(history), said))
            self.decoded_tokens += len(item.tokens)
        return DecodeOutcome.DONE

    def _take_paths(self, batch: Sequence[BatchSlice]) -> None:
        """Count what the paths of a batch's trees take."""
        trees = [item for item in batch if item.parents is not None]
        if not trees:
            return
        wanted = {}
        for item in trees:
            parents = item.parents or ()
            if not len(parents) == len(item.tokens) == item.outputs:
                raise EngineError("a tree with other parents or outputs than tokens")
            try:
                wanted[item.seq_id] = len(paths_of(parents)[0]) - 1
            except ValueError as error:
                raise EngineError(str(error)) from None
        if sum(wanted.values()) > self.tree_paths:
            raise EngineError(f"trees of more than {self.tree_paths} paths beside their rows' own")
        self._paths = wanted

    def _decode_tree(self, item: BatchSlice, parents: Sequence[int]) -> None:
        history, checksums = self._histories[item.seq_id], self._checksums[item.seq_id]
        tree = self._trees[item.seq_id] = _Tree(parents, item.tokens)
        words: list[list[int]] = []
        for token, parent in zip(item.tokens, parents, strict=True):
            before = tree.checksums[parent] if parent >= 0 else checksums[-1] if checksums else 0
            tree.checksums.append(zlib.crc32(token.to_bytes(2, "little"), before))
            words.append([*(words[parent] if parent >= 0 else history), token])
            cell = next(self._next_cell)
            tree.cells.append(cell)
            self._sharers[cell] = 1
            said = bytes(t for t in words[-1] if t < _BYTES) if self._script else b""
            self._outputs.append((tree.checksums[-1], len(words[-1]), said))
        self.decoded_tokens += len(item.tokens)

    def keep_path(self, seq_id: int, path: Sequence[int]) -> None:
        if seq_id not in self._trees:
            raise EngineError(f"sequence {seq_id} has no tree")
        try:
            check_path(self._trees[seq_id].parents, path)
        except ValueError as error:
            raise EngineError(str(error)) from None
        tree = self._trees.pop(seq_id)
        for place in path:
            self._histories[seq_id].append(tree.tokens[place])
            self._checksums[seq_id].append(tree.checksums[place])
            self._cell_ids[seq_id].append(tree.cells[place])
        for cell in set(tree.cells) - {tree.cells[place] for place in path}:
            del self._sharers[cell]

    def forget_paths(self, seq_id: int) -> None:
        self._paths.pop(seq_id, None)

    @property
    def paths_held(self) -> int:
        return sum(self._paths.values())

    def logits(self, output: int) -> list[float]:
        """A row of VOCAB_SIZE floats, for an output of the last batch."""
        if not 0 <= output < len(self._outputs):
            raise EngineError(f"no logits for output {output}")
        checksum, length, said = self._outputs[output]
        logits = [0.0] * VOCAB_SIZE
        forced = self._script(said, length) if self._script is not None else None
        if forced is not None:
            logits[forced] = 50.0
            return logits
        # Lower-case letters only: every answer is readable text of one byte a token.
        for rank in range(4):
            logits[97 + (checksum >> (8 * rank)) % 26] += 4.0 - rank
        return logits

    @property
    def cells_used(self) -> int:
        return len(self._sharers)

    def sequence_length(self, seq_id: int) -> int:
        return len(self._histories[seq_id])

    def rewind(self, seq_id: int, length: int) -> None:
        if length > len(self._histories[seq_id]):
            raise EngineError(f"sequence {seq_id} cannot be rewound forward to {length}")
        if seq_id in self._trees:
            for cell in self._trees.pop(seq_id).cells:
                del self._sharers[cell]
        if not length:
            self.forget_paths(seq_id)
        for cell in self._cell_ids[seq_id][length:]:
            self._sharers[cell] -= 1
            if not self._sharers[cell]:
                del self._sharers[cell]
        del self._cell_ids[seq_id][length:]
        del self._histories[seq_id][length:]
        del self._checksums[seq_id][length:]

    def logprobs(self, output: int, token: int, top: int) -> TokenLogprob:
        logits = self.logits(output)
        largest = max(logits)
        normaliser = largest + math.log(sum(math.exp(x - largest) for x in logits))

        def alternative(candidate: int) -> TokenAlternative:
            piece = self.vocabulary.shown_piece(candidate)
            return TokenAlternative(candidate, piece, logits[candidate] - normaliser)

        likeliest = sorted(range(VOCAB_SIZE), key=lambda t: (-logits[t], t))[:top]
        return TokenLogprob(alternative(token), tuple(map(alternative, likeliest)))

    def copy(self, source: int, target: int, length: int) -> None:
        if self._histories[target]:
            raise EngineError(f"sequence {target} is not empty")
        if length > len(self._histories[source]):
            raise EngineError(f"sequence {source} is shorter than {length}")
        self._histories[target] = self._histories[source][:length]
        self._checksums[target] = self._checksums[source][:length]
        if self.shares_cells:
            cells = self._cell_ids[source][:length]
        else:
            cells = [next(self._next_cell) for _ in range(length)]
        self._cell_ids[target] = cells
        self._sharers.update(cells)

    def save(self, seq_id: int) -> bytes:
        return pickle.dumps((self._histories[seq_id], self._checksums[seq_id]))

    def load(self, seq_id: int, state: bytes) -> None:
        if self._histories[seq_id]:
            raise EngineError(f"sequence {seq_id} is not empty")
        history, checksums = pickle.loads(state)
        if self.cells_used + len(history) > self._cells:
            raise EngineError("no cells for a saved state")
        self._histories[seq_id], self._checksums[seq_id] = history, checksums
        self._cell_ids[seq_id] = [next(self._next_cell) for _ in self._histories[seq_id]]
        self._sharers.update(self._cell_ids[seq_id])

    def can_rewind(self, seq_id: int, length: int) -> bool:
        if not self.rewinds_freely:
            return length == len(self._histories[seq_id])
        return self._window is None or len(self._histories[seq_id]) - length <= self._window

    def abort(self) -> None:
        self._aborted.set()

    def rearm(self) -> None:
        self._aborted.clear()

    def close(self) -> None:
        self.vocabulary.closed = True
        self.closed = True
