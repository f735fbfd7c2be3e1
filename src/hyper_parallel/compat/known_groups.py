"""Registry of this process's process groups."""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def collectives_begun() -> int:
    """How many collectives this process has begun, over all its process groups; 0 where there is none.

    Ranks of one program begin the same ones in the same order, so that of ranks that wait for one another the one that
    is waited for has begun fewest. May be called from another thread.
    """
    begun = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a library that does not count
            begun += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return begun
