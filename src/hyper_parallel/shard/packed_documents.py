"""Packed documents: whether rows hold several, also where tensors have no values.

Transformers asks the positions' values where documents begin, and builds a mask only if there are several. Which it is
decides which attention kernel runs, so a step without values must be told, and is right for such batches only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hyper_parallel.graph.step_context import current_step


@contextlib.contextmanager
def documents_known(several: bool) -> Iterator[None]:
    """Inside, rows hold `several` documents, or one each, and no values are looked at to find out."""
    import transformers.masking_utils as masks

    asked = masks.find_packed_sequence_indices, masks.is_tracing
    masks.find_packed_sequence_indices = _documents if several else lambda position_ids: None
    # Transformers takes fake tensors for a compilation, in which it builds masks that a run does not.
    masks.is_tracing = lambda tensor=None: False
    try:
        with replace(current_step(), documents=several).installed():
            yield
    finally:
        masks.find_packed_sequence_indices, masks.is_tracing = asked


def several_documents(positions: Tensor) -> bool:
    """Whether any row of int64 [B, S] begins anew: its values are looked at."""
    return bool((positions.diff(dim=-1) != 1).any())


def _documents(position_ids: Tensor) -> Tensor:
    """What `find_packed_sequence_indices` gives where there are several."""
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
