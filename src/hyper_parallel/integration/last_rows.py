"""The last batch of an epoch, which Accelerate fills up with rows that the epoch has had.

One process has a short last batch. Over ranks every one gets as many rows as before, some of them a second time. In
training these are taken out; a rank that has no row of its own then keeps them, in a batch that does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.shard.loss import IGNORED

log = logging.getLogger(__name__)
_LABELS = ("labels", "shift_labels")


class NoRows(dict[str, Any]):
    """The batch of a rank that has no row of its own; its loss does not count."""


def new_rows(state: Any, share: int, rows: int) -> int | None:
    """How many of the `rows` that a share of the batch has were not there before; None where that is all.

    `state`: Accelerate's GradientState, right after the batch was read.
    """
    if not state.end_of_dataloader or state.remainder <= 0:
        return None
    return min(max(int(state.remainder) - share * rows, 0), rows)


def shortened(batch: Mapping[str, Any], kept: int | None, rows: int) -> Mapping[str, Any]:
    """A batch of `rows` rows without those that were there before."""
    if kept is None or kept == rows:
        return batch
    if kept:
        return {key: value[:kept] if _by_row(value, rows) else value for key, value in batch.items()}
    masked = {key: torch.full_like(batch[key], IGNORED) for key in _LABELS if _bears_tokens(batch.get(key))}
    return NoRows({**batch, **masked})


def check_rows(batch: Mapping[str, Any], state: Any, rows: int, spread: ParallelRun) -> None:
    """Raise IntegrationError where the last batch will have rows twice that cannot be told in it, or that would count
    in the routers' auxiliary loss. For the first batch, not after an epoch."""
    if state.remainder <= 0:
        return
    mend = "set dataloader_drop_last=True"
    if not any(_by_row(value, rows) for value in batch.values()):
        raise IntegrationError(
            f"the last batch of an epoch has fewer rows than the ranks take together, and in this collator's batches, "
            f"which do not have {rows} rows each, those that fill it up cannot be told; {mend}"
        )
    if spread.handle.balancing is not None and state.remainder <= (spread.data_ranks - 1) * rows:
        raise IntegrationError(
            "the last batch of an epoch has fewer rows than there are ranks to share them, and rows that fill it up "
            f"would count in the routers' auxiliary loss; {mend}"
        )


def warn_of_stream(state: Any, *, drops: bool) -> None:
    """Log that the last batch of a stream without a length may have rows twice: nobody counted them."""
    if state.end_of_dataloader and state.remainder < 0 and not drops:
        log.warning(
            "the last batch before the stream began again may have rows a second time, to fill it up; set "
            "dataloader_drop_last=True, or give the dataset a length"
        )


def _by_row(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == rows


def _bears_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point()
