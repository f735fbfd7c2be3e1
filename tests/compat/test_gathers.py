"""Gathers over gloo with several under way: PyTorch's own way through gloo loses a worker within seconds."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from harness import run_ranks
from hyper_parallel.compat import collectives

_ops = torch.ops._c10d_functional
ROUNDS, UNDER_WAY = 120, 2


def _many(rank: int, world: int) -> int:
    names = [dist.group.WORLD.group_name, dist.new_group([*range(world)]).group_name]
    draw, right = random.Random(0), 0

    def end(gathered: torch.Tensor, number: float) -> bool:
        of_ranks = collectives.waited(gathered).chunk(world)
        return all(bool((part == number + other).all()) for other, part in enumerate(of_ranks))

    for _ in range(ROUNDS):
        begun: list[tuple[torch.Tensor, float]] = []
        for _ in range(30):
            number = float(draw.randint(0, 9))
            part = torch.full((2 * draw.randint(1, 8), draw.choice((3, 64, 128))), number + rank)
            begun.append((_ops.all_gather_into_tensor(part, world, draw.choice(names)), number))
            while len(begun) > UNDER_WAY:
                right += end(*begun.pop(0))
        right += sum(end(*one) for one in begun)
    dist.barrier()
    return right


def test_many_gathers_under_way_are_right_and_lose_no_worker() -> None:
    assert run_ranks(_many, 2) == [30 * ROUNDS] * 2


def test_the_cpu_has_kernels_of_ours() -> None:
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        for form in (name, f"{name}_coalesced"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{form}", "CPU")
