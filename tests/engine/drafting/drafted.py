"""The same requests with and without drafts, and what each told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

import attrs

from dflash_trio.engine.admission import Hold, KVLedger
from dflash_trio.engine.drafting.controller import DraftController
from dflash_trio.engine.drafting.drafter import Drafter, TreeDrafter
from dflash_trio.engine.model_runner import BatchSlice
from dflash_trio.engine.prefix_store import PrefixStore
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import VOCAB_SIZE, Script, ScriptedRunner
from dflash_trio.engine.sequence import Sequence as EngineSequence
from dflash_trio.generation.constraint import ConstraintError
from dflash_trio.generation.events import (
    Event,
    Failed,
    Finished,
    Retired,
    TextDelta,
    TokenLogprob,
)
from dflash_trio.generation.request import PreparedPrompt, SamplingParams
from tests.engine.drafting.scripted_provider import Always, CheckingProvider, Guess
from tests.engine.engine_helpers import prompt

LIMIT = 10_000
"""Tokens of a batch with guesses: none, here."""


@attrs.define
class Told:
    """One answer, however many deltas it came in."""

    parts: list[tuple[str, str]] = attrs.field(factory=list)
    """(channel, text), neighbours of one channel as one."""
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    ending: Finished | Failed | None = None
    deltas: list[TextDelta] = attrs.field(factory=list, eq=False)

    def add(self, event: TextDelta | Finished | Failed) -> None:
        assert self.ending is None, f"{event} after {self.ending}"
        if not isinstance(event, TextDelta):
            if isinstance(event, Finished):
                usage = attrs.evolve(event.usage, accepted_drafts=None, rejected_drafts=None)
                event = attrs.evolve(event, usage=usage)
            self.ending = event
            return
        assert not self.deltas or event.tokens >= self.deltas[-1].tokens
        self.deltas.append(event)
        self.logprobs += event.logprobs
        if self.parts and self.parts[-1][0] == event.channel:
            self.parts[-1] = (event.channel, self.parts[-1][1] + event.text)
        elif event.text:
            self.parts.append((event.channel, event.text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)

    @property
    def finished(self) -> Finished:
        assert isinstance(self.ending, Finished), self.ending
        return self.ending


class GivesUp:
    """A grammar that allows everything, five times."""

    finished = False

    def __init__(self) -> None:
        self.left = 5

    def mask(self) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ConstraintError("too much")
        return b"\xff" * 36

    def accept(self, token: int) -> None:
        pass

    def new_matcher(self) -> GivesUp:
        return GivesUp()


def crowd_of(
    texts: Sequence[str],
    tokens: Sequence[int],
    temperatures: Sequence[float],
    answers: Sequence[int],
) -> list[PreparedPrompt]:
    """A request for each text; of the others what there is beyond is left out."""
    return [
        attrs.evolve(
            prompt(text, limit, sampling=SamplingParams(temperature=heat, seed=5)), n=answers_of
        )
        for text, limit, heat, answers_of in zip(texts, tokens, temperatures, answers, strict=False)
    ]


class Engine:
    """A scheduler on a scripted runner; with ``guess``, a checking provider drafts for it: chains,
    or trees of at most ``tree`` tokens."""

    def __init__(
        self,
        guess: Guess | None = None,
        *,
        slots: int = 4,
        max_ctx: int = 300,
        pool: int | None = None,
        cells: int | None = None,
        headroom: int = 24,
        chunk: int = 32,
        prefixes: int = 0,
        shares_cells: bool = True,
        window: int | None = None,
        script: Script | None = None,
        store: PrefixStore | None = None,
        longest: int = 8,
        controller: DraftController | None = None,
        tree: int | None = None,
        paths: int = 12,
        drafting: type[CheckingProvider] = CheckingProvider,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        pool = slots * max_ctx if pool is None else pool
        self.ledger = KVLedger(slots=slots, pool=pool, max_ctx=max_ctx, decode_headroom=headroom)
        self.batches: list[list[BatchSlice]] = []
        self.before_decode: Callable[[], None] = lambda: None
        self.runner = ScriptedRunner(
            slots=slots,
            cells=pool if cells is None else cells,
            shares_cells=shares_cells,
            window=window,
            tree_paths=0 if tree is None else paths,
            script=script,
            before_decode=self._record,
        )
        self.provider = drafting(guess, longest=longest) if guess is not None else None
        drafter = None
        if self.provider is not None and tree is None:
            drafter = Drafter(
                self.provider, controller or Always(longest), verify_limit=LIMIT, clock=clock
            )
        elif self.provider is not None and tree is not None:
            drafter = TreeDrafter(
                self.provider,
                controller or Always(tree),
                budget=tree,
                paths=paths,
                verify_limit=LIMIT,
                clock=clock,
            )
        self.scheduler = Scheduler(
            self.runner, self.ledger, chunk=chunk, prefixes=prefixes, store=store, drafter=drafter
        )
        self.told: dict[tuple[int, int], Told] = {}
        self.usage: dict[tuple[int, int], tuple[int | None, int | None]] = {}
        self.holds: dict[int, Hold] = {}
        self.said: list[tuple[int, ...]] = []
        """All tokens of each answer that has ended, prompt included."""
        self.alive: dict[tuple[int, int], EngineSequence] = {}
        self.ids = count(1)

    def _record(self, batch: Sequence[BatchSlice]) -> None:
        self.batches.append(list(batch))
        self.before_decode()

    def try_add(self, prepared: PreparedPrompt) -> int | None:
        hold = self.ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens, prepared.n)
        if hold is None:
            return None
        generation_id = next(self.ids)
        self.holds[generation_id] = hold
        for index in range(prepared.n):
            self.told[generation_id, index] = Told()
        self.scheduler.add(EngineSequence(generation_id, prepared, hold))
        for key, sequence in self.scheduler._sequences.items():
            self.alive.setdefault(key, sequence)
        return generation_id

    def add(self, prepared: PreparedPrompt) -> int:
        generation_id = self.try_add(prepared)
        assert generation_id is not None, "the test asks for more than the ledger has"
        return generation_id

    def step(self) -> None:
        self.scheduler.step()
        self.listen()

    def listen(self) -> None:
        for generation_id, event in self.scheduler.take_events():
            self._hear(generation_id, event)

    def _hear(self, generation_id: int, event: Event) -> None:
        if isinstance(event, Retired):
            self.ledger.release(self.holds.pop(generation_id))
            return
        if isinstance(event, Failed):
            for (owner, _), told in self.told.items():
                if owner == generation_id and told.ending is None:
                    told.add(event)
            return
        key = generation_id, event.index
        if isinstance(event, Finished):
            self.usage[key] = event.usage.accepted_drafts, event.usage.rejected_drafts
            sequence = self.alive[key]
            self.said.append((*sequence.prompt, *sequence.answer))
        self.told[key].add(event)

    def run(self, *requests: PreparedPrompt, limit: int = 3000) -> dict[tuple[int, int], Told]:
        """All of them at once, as far as there is room, to the end."""
        waiting = list(requests)
        while waiting or not self.scheduler.idle:
            limit -= 1
            assert limit, "no end in sight"
            while waiting and self.try_add(waiting[0]) is not None:
                waiting.pop(0)
            self.step()
        self.check_empty()
        return self.told

    def check_empty(self) -> None:
        self.scheduler.check_idle()
        assert not self.holds
        assert self.runner.open_samplers == 0
        statistics = self.ledger.statistics()
        assert (statistics.slots_reserved, statistics.committed) == (0, 0)
        assert self.scheduler.statistics().cells_used == 0
        if self.provider is not None:
            lengths = {row: self.runner.sequence_length(row) for row in self.provider.rows}
            for row, known in self.provider.rows.items():
                assert known is None or len(known) == lengths[row]


def right(said: Sequence[Sequence[int]]) -> Guess:
    """Guesses that are right as far as somebody has said the same before, and nonsense after."""

    def guess(tokens: Sequence[int], limit: int) -> list[int]:
        length = len(tokens)
        for known in said:
            if len(known) > length and tuple(known[:length]) == tuple(tokens):
                return [*known[length : length + limit], *[7] * limit][:limit]
        return [7] * limit

    return guess


def wrong_at(guess: Guess, *places: int) -> Guess:
    """Those guesses, wrong at some places of each run."""

    def spoilt(tokens: Sequence[int], limit: int) -> list[int]:
        guesses = list(guess(tokens, limit))
        for place in places:
            if place < len(guesses):
                guesses[place] = (guesses[place] + 1) % VOCAB_SIZE
        return guesses

    return spoilt


def at_random(guess: Guess, seed: int) -> Guess:
    """Those guesses, of random number, some of them wrong."""
    dice = random.Random(seed)

    def random_guess(tokens: Sequence[int], limit: int) -> list[int]:
        guesses = list(guess(tokens, limit))[: dice.randint(0, limit)]
        return [dice.randrange(VOCAB_SIZE) if dice.random() < 0.15 else t for t in guesses]

    return random_guess
