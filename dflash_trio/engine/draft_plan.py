"""Guesses in a batch: put behind the tokens of decoding sequences, and taken out again."""

from __future__ import annotations

from .cell_needs import CellNeeds
from .drafting.draft_tree import DraftTree
from .drafting.drafter import Drafter
from .drafting.provider import Wanted
from .model_runner import BatchSlice
from .prefill_shares import Planned


def add_proposals(planned: list[Planned], drafter: Drafter, needs: CellNeeds) -> None:
    """Let guesses follow in a batch of decoding sequences, without taking anything from anybody."""
    if drafter.dozing:
        return
    records = [item.sequence.drafts for item in planned]
    longest = drafter.choose(records)
    if not longest:
        return
    # Batches of one shape, also where not all that is guessed could still be said.
    whole = longest if drafter.provider.steady else 0
    wanted: list[Wanted | None] = []
    for item, record in zip(planned, records, strict=True):
        assert record is not None
        spare, cells = needs.spare(item.sequence, whole)
        row, tokens = item.slice.seq_id, record.tokens
        wanted.append(drafter.want(row, tokens, longest, spare, cells) if spare > 0 else None)
    generations = frozenset(item.sequence.generation_id for item in planned)
    for place, proposals in enumerate(drafter.propose(wanted, records, generations)):
        if proposals:
            plain = planned[place].slice
            parents = None
            if isinstance(proposals, DraftTree):
                parents, proposals = (-1, *proposals.parents), proposals.tokens
            tokens = (plain.tokens[0], *proposals)
            guessed = BatchSlice(plain.seq_id, plain.position, tokens, len(tokens), parents)
            planned[place] = Planned(planned[place].sequence, guessed)


def drop_proposals(planned: list[Planned]) -> bool:
    """Take all guesses out of a batch. False: there are none."""
    guessing = [place for place, item in enumerate(planned) if item.slice.outputs > 1]
    for place in guessing:
        guessed = planned[place].slice
        plain = BatchSlice(guessed.seq_id, guessed.position, guessed.tokens[:1], 1)
        planned[place] = Planned(planned[place].sequence, plain)
    return bool(guessing)
