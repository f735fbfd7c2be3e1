"""Replicas: groups of workers that hold one copy of the model and compute the same passes.

Ranks that differ along `replicate` are in different replicas, which run independently: a forward pass has no collective
over that axis. Ranks of one replica run in lockstep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from hyper_parallel.shard.sharded_model import is_sharded, sharded


@dataclass(frozen=True)
class Replica:
    """The replica of this process, the `index`-th of `count`."""

    index: int = 0
    count: int = 1
    leads: bool = True
    """Whether this is its first rank, which chooses tokens and reports answers."""
    group: Any = None
    """The process group of its ranks; None where it has one."""

    @classmethod
    def of(cls, model: nn.Module, context: int = 1) -> Replica:
        """Of this rank of a model whose weights are replicated over `context` ranks of each replica, too. A collective
        of all ranks of a parallelized one."""
        if not is_sharded(model) or sharded(model).mesh.world == 1:
            return cls()
        handle = sharded(model)
        ranks: dict[int, list[int]] = {}
        for rank in handle.axes.devices.ranks:
            index = handle.axes.devices.coordinate(rank)["replicate"] // context
            ranks.setdefault(index, []).append(rank)
        found = cls()
        for index, members in sorted(ranks.items()):
            # Every rank takes part in making every group.
            group = dist.new_group(members) if len(members) > 1 else None
            if handle.rank in members:
                found = cls(index, len(ranks), handle.rank == members[0], group)
        return found
