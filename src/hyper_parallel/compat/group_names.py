"""Names of process groups: torch makes that of a group which its own ranks make alone of its ranks and of how many
groups the process has. Ranks of unlike device groups have made unlike numbers."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def level_group_counts() -> None:
    """Have every rank have made as many process groups, by groups of one rank. A collective of all ranks."""
    counts = [len(distributed_c10d._world.pg_names)] * dist.get_world_size()
    mine = counts[dist.get_rank()]
    dist.all_gather_object(counts, mine)
    for _ in range(max(counts) - mine):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
