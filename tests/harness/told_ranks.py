"""A handle whose other ranks have told their numbers: agreements by one all-reduce, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


def among(*others: Sequence[float]) -> Any:
    """The handle of a rank beside `others`, each with the numbers that it puts into the all-reduce; zeros follow."""

    def all_reduce(told: torch.Tensor, names: Any, how: str) -> torch.Tensor:
        assert how == "max"
        filled = [[*one, *[0] * (len(told) - len(one))] for one in others]
        return torch.stack([told, *(torch.tensor(one, dtype=told.dtype) for one in filled)]).amax(0)

    mesh = SimpleNamespace(world=1 + len(others), names=("shard",))
    return SimpleNamespace(mesh=mesh, device="cpu", all_reduce=all_reduce)
