"""Even expert load for captures without values.

Routing decides how many rows travel to each rank and expert, and a run learns it from the device. A step without
values is either written for any routing, its sizes symbols that a run reads, or, for what it costs, for rows that
spread evenly. `assume_even_load` says that it is the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_load: ContextVar[float | None] = ContextVar("expert_load", default=None)


@contextlib.contextmanager
def assume_even_load(load: float = 1.0) -> Iterator[None]:
    """Inside, every expert is chosen equally often, and this rank's get `load` times as many rows as the mean.

    What is computed inside is for costs only: its sizes hold for no batch.
    """
    token = _load.set(load)
    try:
        yield
    finally:
        _load.reset(token)


def even_load() -> float | None:
    """The load that `assume_even_load` said; None where the routing is to be looked at."""
    return _load.get()


def evenly(rows: int, bins: int) -> list[int]:
    """`rows` spread over `bins` as evenly as they go; the first ones have one more."""
    return [rows // bins + (at < rows % bins) for at in range(bins)]
