"""Reduce-scatters and coalesced collectives over gloo: an exchange, and sums in the order of the ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from hyper_parallel.compat import collectives, gloo

_ops = torch.ops._c10d_functional
CALLS, UNDER_WAY = 600, 3


def _many(rank: int, world: int) -> int:
    """Coalesced calls of tensors that hold one number each, waited for in any order; how many results were right."""
    names = [dist.group.WORLD.group_name, dist.new_group([*range(world)]).group_name]
    draw, right = random.Random(0), 0
    begun: list[tuple[str, list[torch.Tensor], int]] = []

    def end(what: str, results: list[torch.Tensor], number: int) -> bool:
        order = draw.sample(range(len(results)), len(results))
        done = {at: collectives.waited(results[at]) for at in order}
        if what == "scatter":
            ranks = world * (world - 1) // 2
            return all(bool((done[at] == world * (number + at) + ranks).all()) for at in order)
        parts = [
            (part, number + at + other) for at in order for other, part in enumerate(done[at].chunk(world))
        ]
        return all(bool((part == value).all()) for part, value in parts)

    for number in range(CALLS):
        what, name = draw.choice(("scatter", "gather")), draw.choice(names)
        xs = [
            torch.full((world * draw.randint(1, 8), draw.choice((3, 64, 128))), float(number + rank + at))
            for at in range(draw.randint(1, 4))
        ]
        if what == "scatter":
            results = _ops.reduce_scatter_tensor_coalesced(xs, "sum", world, name)
        else:
            results = _ops.all_gather_into_tensor_coalesced(xs, world, name)
        begun.append((what, results, number))
        while len(begun) > UNDER_WAY:
            right += end(*begun.pop(0))
    right += sum(end(*one) for one in begun)
    dist.barrier()
    return right


def _sums(rank: int, world: int) -> dict[str, bool]:
    """What each rule of the sums comes to."""
    name = dist.group.WORLD.group_name
    draws = [torch.randn(8, 5, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    in_order = draws[0].clone()
    for other in draws[1:]:
        in_order += other
    own = slice(rank * 8 // world, (rank + 1) * 8 // world)
    x = draws[rank]

    def scattered(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return collectives.waited(_ops.reduce_scatter_tensor(x, op, world, name))

    large = torch.zeros(gloo.PACKED // 4 + 8)
    calls = _ops.reduce_scatter_tensor_coalesced([x[:, 1:].contiguous(), large, x], "sum", world, name)
    bucketed = [collectives.waited(one) for one in calls]
    halves = [draw.bfloat16() for draw in draws]
    wide = torch.stack([half.float() for half in halves])
    total = wide[0].clone()
    for other in wide[1:]:
        total += other
    return {
        "in the order of the ranks": torch.equal(scattered(x), in_order[own]),
        "alike in a bucket": torch.equal(bucketed[0], in_order[own, 1:])
        and torch.equal(bucketed[2], in_order[own]),
        "in float32": torch.equal(scattered(halves[rank]), total[own].bfloat16()),
        "mean": torch.equal(scattered(x, "avg"), in_order[own] / world),
        "greatest": torch.equal(scattered(x, "max"), torch.stack(draws).amax(0)[own]),
        "nothing is left": torch._C._distributed_c10d._get_work_registry_size() == 0,
    }


def test_many_under_way_are_right_whatever_is_waited_for_first() -> None:
    assert run_ranks(_many, 2) == [CALLS] * 2


def test_sums_have_one_order_and_half_precision_is_rounded_once() -> None:
    for found in run_ranks(_sums, 4):
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("wholes", "found"),
    [
        ([("a", 8), ("a", 8)], [[0, 1]]),
        ([("a", 8), ("b", 8), ("a", 8)], [[0, 2], [1]]),
        ([("a", gloo.PACKED + 1), ("a", 8), ("a", gloo.PACKED)], [[0], [1, 2]]),
    ],
)
def test_small_tensors_of_one_dtype_travel_together(
    wholes: list[tuple[str, int]], found: list[list[int]]
) -> None:
    assert gloo.buckets(wholes) == found
