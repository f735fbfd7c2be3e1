"""Collectives are counted wherever they are called: by hand, by FSDP2, in the backward pass, on every driver."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness import run_ranks
from hyper_parallel.compat import collectives
from hyper_parallel.compat.collectives import Collective
from hyper_parallel.compat.local_tensor import per_rank, per_rank_int, simulated_ranks

F32 = 4


def _figures(counted: list[Collective]) -> list[tuple[str, int, int, int, int]]:
    return [(c.kind, c.size, c.bytes_in, c.bytes_out, c.bytes_received) for c in counted]


def _four_kinds() -> list[Collective]:
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    x = per_rank(lambda rank: torch.ones(8, 3))
    with collectives.counting() as counted:
        collectives.all_reduce(x, group)
        collectives.all_gather(x, group, 4)
        collectives.reduce_scatter(x, group, 4)
        collectives.all_to_all(x, [2] * 4, [2] * 4, group)
    collectives.all_reduce(x, group)
    return counted


def _on_a_rank(rank: int, world: int) -> list[Collective]:
    return _four_kinds()


EXPECTED = [
    ("all_reduce", 4, 96, 96, 144),
    ("all_gather", 4, 96, 384, 288),
    ("reduce_scatter", 4, 96, 24, 72),
    ("all_to_all", 4, 96, 96, 72),
]


def test_a_simulated_rank_and_a_real_one_count_the_same() -> None:
    with simulated_ranks(4):
        simulated = _four_kinds()
    assert _figures(simulated) == EXPECTED
    assert {c.ranks for c in simulated} == {(0, 1, 2, 3)}
    for counted in run_ranks(_on_a_rank, 4):
        assert _figures(counted) == EXPECTED


def test_what_a_rank_sends_to_itself_is_not_received() -> None:
    with simulated_ranks(2):
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        x = per_rank(lambda rank: torch.ones(3 + rank, 5))
        # Rank 0 keeps 1 row and sends 2; rank 1 sends 3 and keeps 1.
        send = [per_rank_int(lambda rank: 1 + 2 * rank), per_rank_int(lambda rank: 2 - rank)]
        receive = [per_rank_int(lambda rank: 1 + rank), per_rank_int(lambda rank: 3 - 2 * rank)]
        with collectives.counting() as counted:
            collectives.all_to_all(x, send, receive, group)
    assert _figures(counted) == [("all_to_all", 2, 15 * F32, 20 * F32, 15 * F32)]


def _classic(rank: int, world: int) -> list[Collective]:
    """What torch.distributed offers beside the functional ones, which rank 1 of 4 calls."""
    with collectives.counting() as counted:
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        dist.all_gather([torch.empty(4) for _ in range(world)], x)
        dist.all_to_all_single(torch.empty(4), x)
        dist.all_to_all_single(torch.empty(1 * world), x, [1] * world, [1] * world)
        dist.reduce(x, dst=0)
        if rank == 0:
            dist.send(x, dst=1)
        elif rank == 1:
            dist.recv(x, src=0)
        dist.barrier()
    return counted


def test_calls_of_torch_distributed_are_counted_too() -> None:
    counted = run_ranks(_classic, 4)
    common = [
        ("all_reduce", 4, 16, 16, 24),
        ("broadcast", 4, 16, 16, 16),
        ("all_gather", 4, 16, 64, 48),
        ("all_to_all", 4, 16, 16, 12),
        ("all_to_all", 4, 16, 16, 12),
        ("reduce", 4, 16, 16, 12),
    ]
    assert _figures(counted[0]) == [*common, ("send", 2, 16, 0, 0)]
    assert counted[0][-1].ranks == counted[1][-1].ranks == (0, 1)
    assert _figures(counted[1]) == [*common, ("recv", 2, 0, 16, 16)]
    assert _figures(counted[2]) == common


def _fsdp(rank: int, world: int) -> tuple[list[Collective], list[Collective]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    with collectives.counting() as forward:
        loss = model(torch.ones(2, 8)).sum()
    with collectives.counting() as backward:
        loss.backward()
    return forward, backward


def test_fsdp2_is_counted_forward_and_backward() -> None:
    layer = 8 * 16 * F32
    gathered = ("all_gather", 4, layer // 4, layer, layer * 3 // 4)
    scattered = ("reduce_scatter", 4, layer, layer // 4, layer * 3 // 4)
    for forward, backward in run_ranks(_fsdp, 4):
        assert _figures(forward) == [gathered] * 2
        assert sorted(_figures(backward)) == sorted([gathered] * 2 + [scattered] * 2)
