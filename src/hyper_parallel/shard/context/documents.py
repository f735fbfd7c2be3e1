"""Documents and padding, read off whole rows before positions are cut.

What Transformers does with the same arguments on one device: without a mask, a document begins wherever a position is
not the one before it plus one; with a mask, rows are one document and its zeros hide keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.compat.fake_process_group import is_fake
from hyper_parallel.compat.local_tensor import each_rank, one_device
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step


def documents_of(positions: Tensor, padding: Any, rows: int, length: int) -> tuple[Tensor, Tensor] | None:
    """(of queries, of keys): int64 [B, S] each, never falling along a row; None where every row is one document.

    `positions` [B or 1, S]; or [4, B, S] with those of the text first; [3, B, S] tell no documents. `padding` [B, S] or
    None. Raises StrategyError for any other mask, and for padding that is not at the end of rows.
    """
    if padding is not None:
        return _padded(padding, rows, length)
    if positions.dim() == 3:
        if positions.size(0) != 4:
            return None
        positions = positions[0]
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    documents = begins.long().cumsum(-1).expand(rows, -1)
    known = current_step().documents
    several = _any(begins) if known is None else known
    return (documents, documents) if several else None


def _padded(padding: Any, rows: int, length: int) -> tuple[Tensor, Tensor] | None:
    if not isinstance(padding, Tensor) or tuple(padding.shape) != (rows, length):
        got = f"of shape {list(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise StrategyError(
            f"with axes.context an attention mask has the shape of input_ids, [{rows}, {length}]; got one {got}"
        )
    hidden = padding == 0
    if not _any(hidden):
        return None
    if _any(hidden[:, :1]) or _any(hidden[:, :-1] & ~hidden[:, 1:]):
        raise StrategyError(
            "with axes.context an attention mask may hide the ends of rows only; pad rows on the right, or pack "
            "documents and tell them apart by position_ids"
        )
    return torch.zeros_like(hidden, dtype=torch.int64), hidden.long()


def _any(x: Tensor) -> bool:
    if is_fake(x):
        return False  # nothing is to be read from tensors without values, on which costs are worked out
    with one_device():
        return any(bool(mine.any()) for mine in each_rank(x).values())
