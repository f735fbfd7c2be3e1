"""Costs of a compiled step: memory-bound operators that a compiler fuses are priced as one kernel.

With `train.compile` PyTorch's Inductor compiles the layers (`graph.compiled`). Where memory-bound operators of one
layer and pass follow one another, between products, attention and collectives, it makes one kernel of them (Ansel et
al., PyTorch 2, ASPLOS 2024, section 4): what they hand to one another stays in registers. So a run of them reads what
it is given from outside once, writes what is used behind it, and is launched once:

    read    = Σ bytes of the storages that the run reads and has not made, each once          `_price`
    written = Σ bytes of the storages that it makes and that are used later, and of those that it changes
    FLOPs   = Σ FLOPs of its operators

Lookups, scatters and sorts stay kernels of their own. Reductions over rows are taken to keep their rows on the chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from hyper_parallel.graph.collective_groups import is_wait
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.ir import StepGraph, Value, values_of
from hyper_parallel.graph.matmuls import operator_name
from hyper_parallel.graph.memory_effects import touched, writes
from hyper_parallel.graph.operator_kinds import ADDS_INTO, LOOKS_UP
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.suspension import HOST
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work

PHASES = frozenset({"forward", "loss", "backward"})
"""Phases that are compiled; the update's operators are whole kernels already."""
_ALONE = LOOKS_UP | ADDS_INTO | {"sort", "topk", "argsort", "cumsum", "cumprod", "bincount", "nonzero"}
"""Memory-bound operators that no compiler fuses with their neighbours."""
_FUSED = ("elementwise", "reduce", "copy")

Costs = Mapping[fx.Node, Work | Collective]


def fused_costs(
    step: StepGraph,
    costs: Costs,
    sizes: Mapping[object, int] | None = None,
    phases: frozenset[str] = PHASES,
) -> dict[fx.Node, Work | Collective]:
    """The costs with each run of fused operators at its last one; the others of a run do nothing.

    `costs`: of `graph.costs.costs`, with the same `sizes`. `phases`: in which operators are fused.
    """
    found = dict(costs)
    last = _last_uses(step)
    run: list[tuple[int, fx.Node]] = []
    key: tuple[object, ...] | None = None
    for at, node in enumerate(step.nodes):
        cost = costs.get(node)
        if isinstance(cost, Work) and cost.kind == "view":
            continue
        if cost is None and not is_wait(node) and node.target is not HOST:
            continue
        own = _key(node) if _is_fused(node, cost, phases) else None
        if own is None or own != key:
            _join(run, found, last, step, sizes)
            run, key = [], own
        if own is not None:
            run.append((at, node))
    _join(run, found, last, step, sizes)
    return found


def _key(node: fx.Node) -> tuple[object, ...]:
    region = region_of(node)
    return region.layer, region.phase, region.micro_batch, bool(node.meta["recomputed"])


def _is_fused(node: fx.Node, cost: Work | Collective | None, phases: frozenset[str]) -> bool:
    return (
        isinstance(cost, Work)
        and cost.kind in _FUSED
        and (region_of(node).phase in phases or ("loss" in phases and _is_loss_backward(node)))
        and operator_name(node) not in _ALONE
    )


def _is_loss_backward(node: fx.Node) -> bool:
    """Whether a node is of no module and of the backward pass: of the loss, whose operators are in no module."""
    return region_of(node).phase == "backward" and not node.meta["module"]


def _last_uses(step: StepGraph) -> dict[int, int]:
    """By storage, the place of the last node that touches it; what outlives the step is used behind its end."""
    found: dict[int, int] = {}
    end = 0
    for at, node in enumerate(step.nodes):
        end = at
        for storage in touched(node):
            found[storage] = at
    outlives = set(step.outside)
    outlives |= {value.storage for node in step.returned.values() for value in values_of(node)}
    return found | dict.fromkeys(outlives | set(step.gradients), end + 1)


def _join(
    run: Sequence[tuple[int, fx.Node]],
    costs: dict[fx.Node, Work | Collective],
    last: Mapping[int, int],
    step: StepGraph,
    sizes: Mapping[object, int] | None,
) -> None:
    """One kernel in place of a run's, where that moves fewer bytes."""
    if len(run) < 2:
        return
    works = [cost for _, node in run if isinstance(cost := costs[node], Work)]
    read, written = _price(run, last, step, sizes)
    read, written = min(read, sum(one.read for one in works)), min(written, sum(one.written for one in works))
    widest = max(works, key=lambda one: one.read + one.written)
    kinds = {one.kind for one in works}
    whole = Work(
        "reduce" if "reduce" in kinds else "elementwise" if "elementwise" in kinds else "copy",
        vector_flops=sum(one.vector_flops for one in works),
        read=read,
        written=written,
        dtype=widest.dtype,
        op="fused",
        fresh=min(written, sum(one.fresh for one in works)),
    )
    for _, node in run[:-1]:
        del costs[node]
    costs[run[-1][1]] = whole


def _price(
    run: Sequence[tuple[int, fx.Node]],
    last: Mapping[int, int],
    step: StepGraph,
    sizes: Mapping[object, int] | None,
) -> tuple[float, float]:
    """Bytes that a run reads from outside, and that it leaves behind."""
    values = dict(sizes or {})
    end = run[-1][0]
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    changed: dict[int, int] = {}
    for _, node in run:
        given = {
            value.storage: max(_bytes(step, value, values), read.get(value.storage, 0))
            for source in node.all_input_nodes
            for value in values_of(source)
            if value.storage not in made
        }
        read.update(given)
        old = touched(node)
        into = set(writes(node))
        for value in values_of(node):
            size = _bytes(step, value, values)
            if value.storage not in into and (value.storage not in old or value.storage in made):
                made[value.storage] = size
            elif value.storage in into and value.storage not in made:
                changed[value.storage] = size
    kept = sum(size for storage, size in made.items() if last.get(storage, end) > end)
    return float(sum(read.values())), float(kept + sum(changed.values()))


def _bytes(step: StepGraph, value: Value, sizes: Mapping[object, int]) -> int:
    """Of what is broadcast, what is there."""
    return min(known(value.bytes, sizes), known(step.storages[value.storage].bytes, sizes))
