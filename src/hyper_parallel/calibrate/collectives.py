"""Collectives of real workers by kind, ranks and size, and the α and β that fit them.

The closed forms of `cluster.collective_cost` are linear in α and 1/β,

    t(B) = a · α + b(B) / β,        a = form(n, 0, 1, 1),   b(B) = form(n, B, 0, 1)

so that the least squares of relative errors, Σ ((a α + b/β) / t − 1)², have a solution in closed form (`fit`), with
α ≥ 0 and β > 0.

A step gathers a layer's weights, and reduce-scatters their gradients, in one call. So do these measurements, with the
tensors of a decoder layer (`LAYER`); the times include what a runtime does with several tensors, such as packing small
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from hyper_parallel.calibrate.results import Results
from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.compat import Backend, collectives

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

LAYER = (4, 4, 4, 2, 2, 1, 1)
"""A layer's weights as shares of their sum: a gated MLP, query and output projections, keys and values."""


def sizes(level: str) -> tuple[int, ...]:
    """Bytes that a rank sends, for a gather those that it receives; multiples of four bytes for each of 64 ranks."""
    return {
        "full": (2**10, 2**14, 2**17, 2**20, 2**22, 2**24),
        "shared": (2**10, 2**14, 2**17, 2**20, 2**22, 2**24),
        "quick": (2**12, 2**16, 2**18, 2**20, 2**22, 2**24),
        "tiny": (2**12, 2**16),
    }[level]


def group_sizes(world: int) -> list[int]:
    """Ranks of the groups to measure: all, and halves down to pairs where they are even; equal groups run at once."""
    found = [world]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def measure_collectives(
    backend: Backend,
    device: torch.device,
    level: str,
    clock: Callable[[Callable[[], object], int], list[float]],
    results: Results,
) -> None:
    """Seconds by ("collective", kind, ranks, bytes that a rank gives). Every rank of the default group calls it."""
    world = dist.get_world_size()
    for ranks in group_sizes(world):
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        calls = _calls(group, ranks)
        for kind in KINDS:
            for size in sizes(level):
                given = size // ranks if kind == "all_gather" else size
                x = torch.ones(given // 4, device=device)
                taken = sorted(clock(partial(calls[kind], x), size))
                # What the slowest rank took is what the group took.
                quarter, median, last = (taken[len(taken) * part // 4] for part in (1, 2, 3))
                longest = torch.tensor([quarter, (last - quarter) / median], device=device)
                dist.all_reduce(longest, op=dist.ReduceOp.MAX)
                results.add(("collective", kind, ranks, given), longest[0].item(), longest[1].item())
        dist.barrier()


def _calls(group: dist.ProcessGroup, ranks: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """The calls that a step's graph makes, by kind."""
    name = group.group_name

    def even(x: torch.Tensor, multiple: int) -> torch.Tensor:
        return x[: x.numel() // multiple * multiple]

    def layer(x: torch.Tensor, multiple: int) -> list[torch.Tensor]:
        unit = x.numel() // (sum(LAYER) * multiple) * multiple
        if not unit:
            return [even(x, multiple)]
        return list(x[: sum(LAYER) * unit].split([part * unit for part in LAYER]))

    def to_all(x: torch.Tensor) -> torch.Tensor:
        parts = [x.numel() // ranks] * ranks
        return collectives.all_to_all(even(x, ranks), parts, parts, name)

    return {
        "all_reduce": lambda x: collectives.all_reduce(x, name),
        "all_gather": lambda x: collectives.all_gather_coalesced(layer(x, 1), name, ranks),
        "reduce_scatter": lambda x: collectives.reduce_scatter_coalesced(layer(x, ranks), name, ranks),
        "all_to_all": to_all,
        "broadcast": lambda x: dist.broadcast(x, group_src=0, group=group),
    }


def fit(kind: str, ranks: int, points: Mapping[int, float]) -> tuple[float, float, float]:
    """α in seconds, β in B/s, and the mean of |fitted / measured − 1|; `points` are seconds by bytes."""
    closed = form(kind)
    rows = [
        (closed(ranks, 0, 1.0, 1.0) / seconds, closed(ranks, size, 0.0, 1.0) / seconds)
        for size, seconds in points.items()
    ]
    aa, ab, bb = (
        sum(x * y for x, y in pairs) for pairs in ([(a, a) for a, _ in rows], rows, [(b, b) for _, b in rows])
    )
    a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency, inverse = 0.0, b / bb
    if determinant > 0:
        latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency <= 0:
        latency, inverse = 0.0, b / bb
    elif inverse <= 0:
        # Nothing but latency shows: the largest size bounds the bandwidth.
        latency, inverse = a / aa, min(seconds / closed(ranks, n, 0.0, 1.0) for n, seconds in points.items())
    residual = sum(abs(latency * a + inverse * b - 1) for a, b in rows) / len(rows)
    return latency, 1 / inverse, residual
