"""Expert load: reports the imbalance of incoming rows before memory is allocated for them.

load = rows that came to this rank / those that come where rows spread evenly
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

_asked: ContextVar[Callable[[torch.Tensor], None] | None] = ContextVar("asked_for_loads", default=None)


@contextlib.contextmanager
def reporting_loads(tell: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, `tell` is given this rank's load, fp32 [1], once for each exchange of rows and before it. It may be a
    collective: every rank of the mesh comes to it."""
    token = _asked.set(tell)
    try:
        yield
    finally:
        _asked.reset(token)


def ask(arriving: torch.Tensor, even: Callable[[], int]) -> None:
    """Tell the load of rows that are about to come, where it was asked for. `arriving` adds up to their number; `even`
    says the number where they spread evenly."""
    tell = _asked.get()
    if tell is not None:
        tell((arriving.sum().float() / max(even(), 1)).view(1))
