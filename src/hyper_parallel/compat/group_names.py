"""Names of process groups: torch makes that of a group which its own ranks make alone of its ranks and of how many
groups the process has. Ranks of unlike device groups have made unlike numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def level_group_counts() -> None:
    """Have every rank have made as many process groups, by groups of one rank. A collective of all ranks."""
    mine = len(distributed_c10d._world.pg_names)
    most = torch.tensor(mine)
    if dist.get_backend() != "gloo":
        most = most.to(distributed_c10d._get_pg_default_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for _ in range(int(most) - mine):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
