"""The ceiling: our engine's runner in a loop, with no scheduler, no text and no HTTP around it.

Run as ``python -m bench_lib.bare SERVER-OPTIONS``; it loads the model as the server would. Then
each round is two lines on standard input: what to do, for which prompts are rendered and tokenized
at once, and ``{}``, the start. Each is answered by one line.

The batches are those of the engine's own continuous batching: prompts by their turns, up to
``--chunk``, and one token of every sequence that is under way. As soon as a stream's answer is
whole, its next prompt takes its place. ``--prefix-cache-slots`` counts here too: what is kept of
ended sequences is found and used by the engine's own prefix cache, and costs what that costs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import Any, cast

import attrs

from dflash_trio.cli import parse_command_line
from dflash_trio.engine.llama_runner import LlamaRunner
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.model_runner import BatchSlice, DecodeOutcome, TokenSampler
from dflash_trio.engine.placement import place_models
from dflash_trio.engine.prefill_shares import PrefillTurns
from dflash_trio.engine.prefix_cache import PrefixCache
from dflash_trio.generation.request import GenerationRequest, SamplingParams
from dflash_trio.model_loading import load_llama
from dflash_trio.routing.router import usable_cores
from dflash_trio.routing.served_model import ServedModel


@attrs.define(eq=False)
class Running:
    """One sequence. ``prefill_end`` and ``computed`` are what the shares of a step are worked out
    from."""

    prefill_end: int
    computed: int
    prompt: tuple[int, ...]
    stream: int
    row: int
    sampler: TokenSampler
    sent: float
    answer: list[int] = attrs.field(factory=list)
    arrivals: list[float] = attrs.field(factory=list)
    cached: int = 0


class Loop:
    """A loaded model and its rounds."""

    def __init__(self, words: list[str]) -> None:
        config = parse_command_line(words, {}).config.models[0]
        (place,) = place_models([config], [check_model_file(config.path)])
        loaded = load_llama(config, place, usable_cores(), lambda _: None, threading.Event())
        self._runner = cast(LlamaRunner, loaded.runner)
        self._runner.warm_up()
        self._turns = PrefillTurns(loaded.chunk, self._runner.batching)
        self._slots = config.max_concurrency
        self._cache = PrefixCache(
            self._runner, slots=self._slots, prefixes=loaded.prefixes, prompts=0
        )
        self._served = ServedModel(
            config,
            cast(Any, None),  # the way to a worker's thread: only serving goes there
            info=self._runner.info,
            vocabulary=self._runner.vocabulary,
            ledger=loaded.ledger,
        )

    def tokens_of(self, prompt: str, api: str) -> tuple[int, ...]:
        if api == "completions":
            request = GenerationRequest((), body_bytes=len(prompt), raw_prompt=prompt)
        else:
            request = GenerationRequest(({"role": "user", "content": prompt},), len(prompt))
        return self._served.tokenize_chat(request)

    def run(self, prompts: list[list[tuple[int, ...]]], job: dict[str, Any]) -> list[Running]:
        """One round: every stream's prompts, one after the other."""
        if len(prompts) > self._slots:
            raise SystemExit(f"{len(prompts)} streams, but --max-concurrency {self._slots}")
        sampling = SamplingParams(temperature=job["temperature"])
        waiting = [deque(stream) for stream in prompts]
        eog = frozenset() if job["ignore_eos"] else self._runner.vocabulary.eog_tokens
        begin = perf_counter()
        running = [self._begin(i, queue, sampling, begin) for i, queue in enumerate(waiting)]
        ended: list[Running] = []
        while running:
            planned = self._plan(running)
            outcome = self._runner.decode([item for _, item in planned])
            if outcome is not DecodeOutcome.DONE:
                raise SystemExit(f"a step ended with: {outcome.value}")
            output = -1
            for s, item in planned:
                s.computed += len(item.tokens)
                if not item.outputs:
                    continue
                output += 1
                if not s.answer:
                    self._cache.computed(s.row, s.prompt)
                token = s.sampler.sample(output)
                s.answer.append(token)
                now = perf_counter()
                s.arrivals.append(now)
                if len(s.answer) < job["tokens"] and token not in eog:
                    continue
                s.sampler.close()
                self._cache.end(s.row, (*s.prompt, *s.answer)[: s.computed], keep=True)
                running.remove(s)
                ended.append(s)
                if waiting[s.stream]:
                    running.append(self._begin(s.stream, waiting[s.stream], sampling, now))
        return ended

    def _plan(self, running: list[Running]) -> list[tuple[Running, BatchSlice]]:
        # Shared out by the engine's own rule, which asks no more of a sequence than ours have.
        prefilling = cast(Any, [s for s in running if not s.answer])
        decoding = [s for s in running if s.answer]
        turn, decodes = self._turns.next(prefilling, decoding=bool(decoding))
        shares = cast(list[tuple[Running, int]], turn)
        planned = [
            (s, BatchSlice(s.row, s.computed, (s.answer[-1],), 1)) for s in decoding if decodes
        ]
        for s, share in shares:
            end = s.computed + share
            tokens = s.prompt[s.computed : end]
            planned.append((s, BatchSlice(s.row, s.computed, tokens, int(end == s.prefill_end))))
        return planned

    def _begin(
        self, stream: int, queue: deque[tuple[int, ...]], sampling: SamplingParams, now: float
    ) -> Running:
        prompt = queue.popleft()
        row, cached = self._cache.begin(prompt)
        sampler = self._runner.new_sampler(sampling, prompt)
        return Running(len(prompt), cached, prompt, stream, row, sampler, now, cached=cached)

    def close(self) -> None:
        self._runner.close()


def as_request(sequence: Running) -> dict[str, Any]:
    """The fields of a ``figures.Request``."""
    arrivals = sequence.arrivals
    return {
        "sent": sequence.sent,
        "first": arrivals[0],
        "last": arrivals[-1],
        "gaps": [b - a for a, b in pairwise(arrivals)],
        "tokens": len(arrivals),
        "prompt_tokens": len(sequence.prompt),
        "cached_tokens": sequence.cached,
    }


def answer(value: list[Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    loop = Loop(sys.argv[1:])
    try:
        answer([])
        prompts: list[list[tuple[int, ...]]] = []
        job: dict[str, Any] = {}
        for line in sys.stdin:
            message = json.loads(line)
            if message:
                job = message
                prompts = [
                    [loop.tokens_of(prompt, job["api"]) for prompt in stream]
                    for stream in job["prompts"]
                ]
                answer([])
            else:
                answer([as_request(sequence) for sequence in loop.run(prompts, job)])
    finally:
        loop.close()


if __name__ == "__main__":
    main()
