"""Rank agreement: an error on one rank becomes an error on all, so that none waits forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hyper_parallel.errors import BudgetError, FollowsError
from hyper_parallel.shard import ShardedModel
from hyper_parallel.units import format_bytes

T = TypeVar("T")


def agreed(handle: ShardedModel | None, make: Callable[[], T]) -> T:
    """Return what `make` returns on this rank, once it has succeeded on every rank.

    Every rank calls it; it all-reduces two numbers. `make` itself must not communicate. `handle` None is a model on one
    device, without communication. Raises what `make` raises; a BudgetError then has the least budget that is enough for
    every rank. Raises FollowsError where `make` raised on other ranks only.
    """
    if handle is None or handle.mesh.world == 1:
        return make()
    made, error = [], None
    try:
        made.append(make())
    # The other ranks learn of any error before it is raised here.
    except Exception as raised:
        error = raised
    floor = error.floor if isinstance(error, BudgetError) else None
    told = torch.tensor([int(error is not None), floor or 0], dtype=torch.int64, device=handle.device)
    failed, most = handle.all_reduce(told, handle.mesh.names, "max").tolist()
    if error is not None:
        if isinstance(error, BudgetError) and floor is not None and most > floor:
            raise BudgetError(
                f"{error}; another worker needs more: {format_bytes(most)}", error.why, most
            ) from error
        raise error
    if failed:
        raise FollowsError(
            "hp.offload: the passes of the model have no plan on another worker, whose log says why, and none of the "
            "workers runs them"
        )
    return made[0]
