"""Protocol of rows of data: packed text, or rows of a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hyper_parallel.data.dealing import RowWork


class Rows(Protocol):
    """Rows to train or to evaluate on, the same in every process."""

    sequence: int
    """The most positions of a row."""
    documents: int

    def __len__(self) -> int: ...

    @property
    def several(self) -> bool:
        """Whether any row holds several documents."""

    def positions(self, rows: Sequence[int], multiple: int = 1) -> int:
        """Positions of each of these rows where they are computed at the same time, a multiple of `multiple`."""

    def work(self, row: int, encoder: float) -> RowWork:
        """The work of a row. `encoder`: what encoders do for a position that stands for media, in positions of the
        language model. Rows that are always computed in the same shape have the same."""

    def batch(self, rows: Sequence[int], length: int | None = None) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` (shifted; the loss ignores -100), int64 [len(rows), length], and what else the
        model takes. `length`: as of `positions`, of these rows or more; left out, of these."""
