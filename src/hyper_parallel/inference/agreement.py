"""Numbers on which ranks agree, so that all of them decide alike: sizes, budgets, room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """Between the ranks of a process group; of one process alone without one."""

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        """`device`: where the group's collectives take their tensors."""
        self._group, self._device = group, device

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self._group is None

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Each number, as large as on any rank. A collective."""
        if self._group is None or not numbers:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [int(one) for one in found.tolist()]

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """Each number, as small as on any rank. A collective."""
        return [-one for one in self.largest([-one for one in numbers])]
