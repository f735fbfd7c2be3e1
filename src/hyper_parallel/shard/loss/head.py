"""The output head and the loss: while a loss is computed, the head leaves its logits split over the vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_ATTRIBUTE = "_hyper_parallel_split_logits"


def leaves_split(module: nn.Module) -> bool:
    """Whether the module is an output head whose logits are wanted as each rank computes them, not gathered."""
    return bool(module.__dict__.get(_ATTRIBUTE, False))


@contextlib.contextmanager
def split_logits(head: nn.Module) -> Iterator[None]:
    """Inside, `head` leaves its logits split over the vocabulary."""
    head.__dict__[_ATTRIBUTE] = True
    try:
        yield
    finally:
        del head.__dict__[_ATTRIBUTE]
