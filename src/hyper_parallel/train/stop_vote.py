"""The ranks' vote on whether to stop, between steps; in a step they agree by its control vector."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.launch import stop_requested


class StopVote:
    """Of one run; every rank calls it at the same points."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.stopping = False
        """How the last vote ended."""

    def __call__(self) -> bool:
        """Whether some rank was asked to stop. A collective of the hosts."""
        asked = torch.tensor(float(stop_requested()))
        if self._world > 1:
            dist.all_reduce(asked)
        self.stopping = asked.item() > 0
        return self.stopping
