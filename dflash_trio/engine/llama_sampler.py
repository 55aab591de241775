"""Choosing tokens from a llama.cpp context's logits: greedily, or by llama.cpp's own chain."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as llama
import numpy as np

from ..generation.request import SamplingParams
from .model_runner import EngineError, TokenSampler

if TYPE_CHECKING:
    from .llama_runner import LlamaRunner


class GreedySampler:
    """The largest logit. Ten times cheaper than a candidate array over the whole vocabulary."""

    def __init__(self, runner: LlamaRunner, logit_bias: Sequence[tuple[int, float]]) -> None:
        self._runner = runner
        self._tokens = np.array([token for token, _ in logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in logit_bias], dtype=np.float32)

    def sample(self, output: int, mask: bytes | None = None) -> int:
        if mask is None and not len(self._tokens):
            return self._runner.likeliest(output)
        logits = self._runner.logits(output)
        if mask is not None:
            with _masked(logits, mask):
                return self._largest(logits)
        return self._largest(logits)

    def _largest(self, logits: Any) -> int:
        if not len(self._tokens):
            return int(logits.argmax())
        # In place, and undone: copying the row would cost more than looking through it.
        plain = logits[self._tokens]
        # `at`, so that a token named twice gets both biases, as llama.cpp's chain does it.
        np.add.at(logits, self._tokens, self._biases)
        token = int(logits.argmax())
        logits[self._tokens] = plain
        return token

    def accept(self, token: int) -> None:
        pass  # it has no memory

    def close(self) -> None:
        pass


@contextmanager
def _masked(logits: Any, mask: bytes) -> Iterator[None]:
    """Rules out, for as long as it is open, every token whose bit is not set."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: len(logits)]
    # A copy of a row is some ten microseconds; the rest of the step wants it as it was.
    plain = logits.copy()
    logits[bits == 0] = -np.inf
    try:
        yield
    finally:
        logits[:] = plain


class ChainSampler:
    """llama.cpp's own sampler chain, in llama.cpp's order: bias, penalties, filters, draw."""

    def __init__(
        self, runner: LlamaRunner, params: SamplingParams, prompt: Sequence[int], max_ctx: int
    ) -> None:
        self._runner = runner
        # An output, and what was chosen from it before anybody asked.
        self._ahead: tuple[int, int] | None = None
        chain_params = llama.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain: Any = llama.llama_sampler_chain_init(chain_params)
        size = runner.vocabulary.size
        add = self._add
        if params.logit_bias:
            array = (llama.llama_logit_bias * len(params.logit_bias))()
            for slot, (token, bias) in zip(array, params.logit_bias, strict=True):
                slot.token, slot.bias = token, bias
            add(llama.llama_sampler_init_logit_bias(size, len(array), array))
        look_back = 0
        if params.has_penalties:
            look_back = params.penalty_last_n
            if not 0 <= look_back <= max_ctx:
                # All of it. Clamped, because llama.cpp allocates as many tokens as it is told.
                look_back = max_ctx
            add(
                llama.llama_sampler_init_penalties(
                    size,
                    look_back,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.temperature <= 0:
            add(llama.llama_sampler_init_greedy())
        else:
            if params.top_k > 0:
                add(llama.llama_sampler_init_top_k(params.top_k))
            if params.top_p < 1.0:
                add(llama.llama_sampler_init_top_p(params.top_p, 1))
            if params.min_p > 0.0:
                add(llama.llama_sampler_init_min_p(params.min_p, 1))
            # Not below this: logits divided by less overflow, and the draw is nonsense then.
            add(llama.llama_sampler_init_temp(max(params.temperature, 1e-6)))
            add(llama.llama_sampler_init_dist(native_seed(params.seed)))
        for token in prompt[-look_back:] if look_back else ():
            llama.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        llama.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, output: int, mask: bytes | None = None) -> int:
        if self._ahead is not None:
            (chosen_from, token), self._ahead = self._ahead, None
            if chosen_from != output or mask is not None:
                # The chain has counted and drawn: it cannot be undone.
                raise EngineError(f"output {chosen_from} was sampled ahead, and not asked for")
            return token
        if mask is not None:
            with _masked(self._runner.logits(output), mask):
                return self._draw(output)
        return self._draw(output)

    def draw_ahead(self, output: int) -> None:
        """Choose what :meth:`sample` will be asked for next. On any thread, as long as nothing
        else happens to this sampler or to the last batch's outputs."""
        self._ahead = (output, self._draw(output))

    def _draw(self, output: int) -> int:
        return int(
            llama.llama_sampler_sample(
                self._chain, self._runner.context, self._runner.output_row(output)
            )
        )

    def accept(self, token: int) -> None:
        llama.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None


class SamplingThreads:
    """Threads on which chains draw at the same time.

    A chain looks through the whole vocabulary: with sixteen sequences on a GPU, that is as long as
    the step itself. It does so without the interpreter, and no two chains share anything but
    logits, which are only read.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # The caller's own thread is one of them.
        self._pool = ThreadPoolExecutor(threads - 1, "sampling")

    def draw_ahead(self, wanted: Sequence[tuple[TokenSampler, int]]) -> None:
        """See ModelRunner.sample_ahead. Samplers that are quick wait until they are asked."""
        slow = [(s, output) for s, output in wanted if isinstance(s, ChainSampler)]
        if len(slow) < 2:
            return
        # A share for each thread, not a task for each sampler: handing one over costs about what
        # drawing does.
        shares = [share for i in range(self._threads) if (share := slow[i :: self._threads])]
        others = [self._pool.submit(_draw_share, share) for share in shares[1:]]
        try:
            _draw_share(shares[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


def _draw_share(share: Sequence[tuple[ChainSampler, int]]) -> None:
    for sampler, output in share:
        sampler.draw_ahead(output)


def native_seed(seed: int | None) -> int:
    """A request's 64-bit seed as llama.cpp's 32-bit one; ``None`` lets llama.cpp draw its own.

    Small seeds map to themselves, larger ones by CRC-32, and never to llama.cpp's "random"
    (0xFFFFFFFF), so that the same seed always repeats.
    """
    random_seed = 0xFFFFFFFF
    if seed is None:
        return random_seed
    if seed < random_seed:
        return seed
    return min(zlib.crc32(seed.to_bytes(8, "little")), random_seed - 1)
