"""RowMirror: a model's cache rows, with the draft's knowledge of them kept in step."""

from __future__ import annotations

from collections.abc import Sequence

from ..model_runner import CacheRows
from .provider import DraftProvider


class RowMirror:
    """The rows of ``rows``; every change to them is told to the provider as well.

    First the row changes, then the provider hears of it: a row that could not be changed is none
    that anybody goes on with.
    """

    def __init__(self, rows: CacheRows, provider: DraftProvider) -> None:
        self._rows = rows
        self._provider = provider
        self.shares_cells, self.wants_runs = rows.shares_cells, rows.wants_runs
        # What only reads goes through as it is.
        self.save = rows.save
        self.can_rewind = rows.can_rewind
        self.sequence_length = rows.sequence_length
        # A draft knows nothing of these.
        self.forget_paths = rows.forget_paths

    @property
    def saving_costs(self) -> float:
        return self._rows.saving_costs

    @property
    def paths_held(self) -> int:
        return self._rows.paths_held

    def keep_path(self, seq_id: int, path: Sequence[int]) -> None:
        # The provider was told by ``observe_trees``.
        self._rows.keep_path(seq_id, path)

    def copy(self, source: int, target: int, length: int) -> None:
        self._rows.copy(source, target, length)
        self._provider.copy(source, target, length)

    def load(self, seq_id: int, state: bytes) -> None:
        try:
            self._rows.load(seq_id, state)
        finally:
            # A load that failed may have left anything there.
            self._provider.replaced(seq_id)

    def rewind(self, seq_id: int, length: int) -> None:
        self._rows.rewind(seq_id, length)
        self._provider.rewind(seq_id, length)
