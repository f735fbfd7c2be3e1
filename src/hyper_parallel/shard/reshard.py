"""A tensor from one Layout to another: one uneven all-to-all among all ranks, by intersecting boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import on_rank, per_rank, per_rank_int
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.transfer import Transfer, transfers


def reshard(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """Reshard a tensor: this rank's piece in layout `target`, from `local`, its piece in layout `source`.

    Layouts may be uneven, fused, joint, folded and partial. Partial sums are added in order of rank, so that all copies
    of the result are bitwise equal. Every rank of the default process group calls it. No gradient flows.

    Raises StrategyError when the layouts have different shapes or numbers of ranks.
    """
    world = source.mesh.world
    outgoing: list[list[Transfer]] = [[] for _ in range(world)]
    incoming: list[list[Transfer]] = [[] for _ in range(world)]
    for transfer in transfers(source, target):
        outgoing[transfer.sender].append(transfer)
        incoming[transfer.receiver].append(transfer)
    local = local.detach()

    def pack(rank: int) -> torch.Tensor:
        mine = on_rank(local, rank)
        return torch.cat([mine.new_empty(0), *(mine[one.give].reshape(-1) for one in outgoing[rank])])

    def unpack(rank: int) -> torch.Tensor:
        came = on_rank(rows, rank)
        piece = came.new_zeros(target.local_shape(target.mesh.coordinate(rank)))
        sizes = [math.prod(one.shape) for one in incoming[rank]]
        for one, elements in zip(incoming[rank], came.split(sizes), strict=True):
            piece[one.take] += elements.view(one.shape)
        return piece

    rows = per_rank(pack)
    if world > 1:
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        send = [per_rank_int(_counter(outgoing, peer, "receiver")) for peer in range(world)]
        receive = [per_rank_int(_counter(incoming, peer, "sender")) for peer in range(world)]
        rows = collectives.all_to_all(rows, send, receive, group)
    return per_rank(unpack)


def _counter(moved: Sequence[Sequence[Transfer]], peer: int, side: str) -> Callable[[int], int]:
    """Rank to how many elements it sends to a peer, or gets from it."""
    return lambda rank: sum(math.prod(one.shape) for one in moved[rank] if getattr(one, side) == peer)
