"""Greedy recomputation until the peak memory meets a limit.

Each activation that can be computed again has a price, what the operators cost that make it from what is alive late
anyhow, and frees its bytes. Those that free most for their price are taken first, as many as the goal needs. An
operator's price is its FLOPs, a byte that it moves counted as `FLOPS_A_BYTE` of them.

It is no optimum: a storage's price does not change with what else was chosen. Jain et al., "Checkmate", arXiv
1910.02653, solve for that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.ir import StepGraph
from hyper_parallel.graph.liveness import lifetimes, peak
from hyper_parallel.graph.recompute import chains, recompute
from hyper_parallel.units import format_bytes
from hyper_parallel.workload.work import Work

FLOPS_A_BYTE = 100.0
"""About what a device can compute while it moves a byte: 295 on an H100 SXM (989 TFLOP/s in bf16, 3.35 TB/s, NVIDIA's
data sheet), tens on a CPU. It only orders the choice."""

_TRIES = 16


def fit(step: StepGraph, goal: int, sizes: Mapping[Any, int] | None = None) -> StepGraph:
    """The step with a peak of at most `goal` bytes, what comes from outside included.

    `sizes` gives the symbols values. Raises GraphError, with the lowest peak found, when the goal is not reached.
    """
    found = peak(step, sizes).bytes
    if found <= goal:
        return step.copy()
    order = _by_worth(step, sizes)
    lowest, previous = found, 0
    for count in _counts(len(order)):
        made = recompute(step, order[:count])
        now = peak(made, sizes).bytes
        if now <= goal:
            return _fewer(step, order, previous, count, goal, sizes)
        lowest, previous = min(lowest, now), count
    raise GraphError(
        f"the step's peak of {format_bytes(found)} was to be {format_bytes(goal)}, and computing activations again "
        f"brings it to {format_bytes(lowest)} at best; give it that much, fewer rows, or more ranks"
    )


def _fewer(
    step: StepGraph, order: list[int], short: int, enough: int, goal: int, sizes: Mapping[Any, int] | None
) -> StepGraph:
    """The graph with as few storages computed again as bisection finds: `short` are too few, `enough` are not."""
    made = recompute(step, order[:enough])
    while enough - short > 1:
        middle = (short + enough) // 2
        tried = recompute(step, order[:middle])
        if peak(tried, sizes).bytes <= goal:
            enough, made = middle, tried
        else:
            short = middle
    return made


def _by_worth(step: StepGraph, sizes: Mapping[Any, int] | None) -> list[int]:
    """Activations that can be computed again, those that free most for their price first."""
    bytes_of = {
        life.storage: life.bytes
        for life in lifetimes(step, sizes)
        if life.kind == "activation" and life.bytes
    }
    priced = {
        node: cost.flops + cost.vector_flops + FLOPS_A_BYTE * (cost.read + cost.written)
        for node, cost in costs(step, sizes).items()
        if isinstance(cost, Work)
    }
    worth = {
        storage: bytes_of[storage] / max(sum(priced.get(node, 0.0) for node in nodes), 1.0)
        for storage, nodes in chains(step, bytes_of).items()
    }
    return sorted(worth, key=lambda storage: (-worth[storage], storage))


def _counts(most: int) -> list[int]:
    return sorted({max(1, most * step // _TRIES) for step in range(1, _TRIES + 1)}) if most else []
