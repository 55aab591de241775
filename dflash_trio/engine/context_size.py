"""How large a context is made for a block: one arithmetic for the plan and for the loading."""

from __future__ import annotations

from attrs import frozen

CELL_PADDING = 256
"""llama.cpp rounds a stream's cells up to a multiple of this."""
DEFAULT_MAX_CTX = 8192
LARGEST_MICROBATCH = 512
"""Tokens that the graph is built for; a larger batch runs in pieces."""

LARGEST_CPU_VERIFY = 63
"""From 64 tokens on a CPU computes in another way, and answers would depend on it."""
LARGEST_GPU_VERIFY = 256
LARGEST_SEQUENCES = 256
"""Sequence ids that llama.cpp knows in a context."""
LARGEST_DRAFT_BATCH = 256
SMALLEST_DRAFT_BATCH = 64
"""What the target's layers had for a prompt goes into a draft by as many tokens."""

MOST_PENDING_BYTES = 64 * 2**20
"""Of buffers for what the target's layers had, while it waits on the host for its draft: of all
rows together, after each step. See :func:`pending_bytes` for what they take within a step."""


@frozen
class ContextSize:
    """The cells of a context and how they are shared."""

    max_ctx: int
    """Tokens that one sequence may hold."""
    pool: int
    """Cells that the ledger gives away."""
    slots: int
    partitioned: bool
    """Each sequence has a stream of its own; otherwise all share one."""

    @property
    def has_all_cells(self) -> bool:
        """Every slot has its whole context: no cells are shared."""
        return self.pool >= self.slots * self.max_ctx

    @property
    def streams(self) -> int:
        return self.slots if self.partitioned else 1

    @property
    def stream_cells(self) -> int:
        """Cells of one stream, as llama.cpp allocates them."""
        return padded(self.max_ctx) if self.partitioned else max(padded(self.pool), CELL_PADDING)

    @property
    def cells(self) -> int:
        """``n_ctx``: all streams together."""
        return self.streams * self.stream_cells


def context_size(
    *, trained: int, slots: int, max_ctx: int | None, pool: int | None, unified: bool = False
) -> ContextSize:
    """The context of a block; ``None`` is what the operator left open.

    Partitioned where no cells are shared and the pool is every slot's whole context: faster, and
    what bit-equal answers need. ``unified``: all sequences share the cells in any case.
    """
    each = max_ctx or min(trained, DEFAULT_MAX_CTX)
    largest = each * slots
    cells = min(pool or largest, largest)
    return ContextSize(each, cells, slots, partitioned=cells >= largest and not unified)


def size_warnings(
    path: str, size: ContextSize, *, trained: int, max_ctx: int | None, pool: int | None
) -> list[str]:
    """What an operator should know of a context that can be made, and is not what it looks like.

    ``max_ctx`` and ``pool`` are what was asked for. One line each.
    """
    lines = []
    if max_ctx is not None and max_ctx > trained:
        lines.append(
            f"--max-ctx {max_ctx} is beyond the {trained} tokens that {path} was "
            "trained on: answers may turn to noise there"
        )
    if pool is not None and pool > size.pool:
        lines.append(
            f"--kv-pool-tokens {pool} is more than --max-concurrency x --max-ctx can use: "
            f"it is {size.pool} here"
        )
    if size.pool < size.max_ctx:
        lines.append(
            f"--kv-pool-tokens {size.pool} is less than one context of {size.max_ctx} tokens: "
            f"no sequence can hold more than {size.pool}"
        )
    return lines


def microbatch(chunk: int, slots: int) -> int:
    """Tokens that llama.cpp computes at a time."""
    return min(LARGEST_MICROBATCH, chunk + slots)


def verify_tokens(slots: int, longest: int, *, on_cpu: bool) -> int:
    """Tokens that a batch with guesses may have, at most ``longest`` guesses for each sequence.
    With more sequences than that under way, there are none."""
    most = LARGEST_CPU_VERIFY if on_cpu else LARGEST_GPU_VERIFY
    return min(slots * (1 + longest), most)


def tree_paths(slots: int, verified: int) -> int:
    """Leaves of a batch's trees, beside one for each sequence, where a batch with guesses has so
    many tokens."""
    return max(0, min(LARGEST_SEQUENCES - slots, verified - slots))


def draft_context(target: ContextSize, spare: int, *, on_cpu: bool) -> ContextSize:
    """A draft's cache: on a CPU laid out as its target's would be without trees, with ``spare``
    more cells for each sequence. On a GPU shared by all: a partitioned one computes rows at once
    only if they lie beside each other."""
    each, whole = target.max_ctx + spare, target.has_all_cells
    pool = target.pool + target.slots * spare
    if whole and not on_cpu:
        # What :mod:`llama_block_pass` wants: it gives each row its own cells, and one more.
        pool = target.slots * padded(each + 1)
    return ContextSize(each, pool, target.slots, partitioned=on_cpu and whole)


def draft_batch(slots: int, block: int) -> int:
    """Tokens that a block draft decodes at once: the blocks of all sequences, as far as they are
    not too many. Logits are made for all of them, and the memory for that is set aside."""
    return min(max(slots * block, SMALLEST_DRAFT_BATCH), LARGEST_DRAFT_BATCH)


def pending_bytes(step: int) -> int:
    """The most that ever waits on the host for a block draft. ``step``: bytes of what one step of
    the target brings.

    It is added to what waits before there is a look at the bound, and buffers that grow get a
    quarter more than they need. One that is made anew stands beside the one before: which was
    within the bound if it grows, and has twice as much if it shrinks.
    """
    grown = 5 * (MOST_PENDING_BYTES + step) // 4
    return grown + max(MOST_PENDING_BYTES, grown // 2)


def padded(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING
