"""Policies of recomputation: which results are kept, and which are computed again.

`selective` keeps the results of matrix products, fused attention and collectives; everything else of a layer is
recomputed from them, as are batched products that are cheap for their size (`is_expensive`): the scores of attention
(Korthikanti et al., arXiv 2205.05198, section 5; torchtitan's `selective` of option `op`). `narrow` repeats the casts
of gradients in low precision, `fit` computes again as much as a limit on the peak asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.host_nodes import is_update, storages_of
from hyper_parallel.graph.ir import StepGraph, is_collective, is_wait, values_of
from hyper_parallel.graph.liveness import lifetimes, peak
from hyper_parallel.graph.memory_effects import touched, writes
from hyper_parallel.graph.operator_costs import is_expensive, operator_name
from hyper_parallel.graph.recompute import chains, homes, inside, recompute, repeatable
from hyper_parallel.units import format_bytes
from hyper_parallel.workload.work import Work


def selective(step: StepGraph, modules: Collection[str], *, weights: bool = True) -> StepGraph:
    """Keep of these modules what expensive operators give, and compute the rest again for the backward pass.

    `weights`: also weights that are gathered or cast inside of a module. Collectives are never repeated.
    """
    expensive = {
        storage
        for node in step.nodes
        if _keeps(node)
        for storage in {value.storage for value in values_of(node)} | writes(node)
    }
    cheap = [one for one in inside(step, modules, weights=weights) if one not in expensive]
    given = {storage for storage, module in homes(step, modules).items() if module is None}
    return recompute(step, cheap, collectives="none", kept=expensive | given)


def _keeps(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    given = [next(values_of(arg), None) for arg in node.args if isinstance(arg, fx.Node)]
    shapes = [value.shape for value in given if value is not None]
    return is_collective(node) or is_wait(node) or is_expensive(operator_name(node), shapes)


# Low-precision gradients: kept in the dtype they were cast from until the update.
#
# A product in bfloat16 gives a gradient in bfloat16, which is cast to the parameter's float32 at once and waits for the
# update in twice the bytes. Here it waits as it was made, and is cast a second time where it is used next:
#
#     g = cast(n) … uses … update(g)    →    g = cast(n) … early uses;  … g' = cast(n);  late uses, update(g')
#
# The same kernel runs on the same bits, so that g' = g. It helps where early uses end soon (`nearer.sums_at_birth`) and
# late ones stand together (`nearer.updates_together`). What a gradient is added to (several micro-batches), what is
# reduced in float32 and what the host updates with stay as they are.


def narrow(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> StepGraph:
    """The step with gradients that wait in fewer bits, where they can; `sizes` gives the symbols values."""
    nodes = list(step.nodes)
    users: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        for storage in touched(node) | {value.storage for value in values_of(node)}:
            users.setdefault(storage, []).append(at)
    bytes_of = [known(storage.bytes, dict(sizes or {})) for storage in step.storages]
    to_host = {storage for node in nodes if is_update(node) for storage in storages_of(node)}
    lates: dict[int, int] = {}
    sources: dict[int, int] = {}
    """Gradient to what it was cast from."""
    for storage in step.gradients:
        places = users.get(storage, [])
        if storage in to_host or len(places) < 2 or operator_name(nodes[places[0]]) != "_to_copy":
            continue
        (source,) = touched(nodes[places[0]]) or {storage}
        if bytes_of[source] < bytes_of[storage] and step.storages[source].name is None:
            # Up to the first write: behind that it is no longer what was cast.
            until = next((at for at in places[1:] if storage in writes(nodes[at])), places[-1])
            gaps = pairwise(places[: places.index(until) + 1])
            _, lates[storage] = max(gaps, key=lambda gap: gap[1] - gap[0])
            sources[storage] = source
    chosen = repeatable(step, lates, collectives="none", lates=lates)
    kept = {sources[storage] for storage in chosen}
    made = recompute(step, chosen, collectives="none", kept=kept, lates=lates)
    named = {sources[storage]: step.gradients[storage] for storage in chosen}
    made.gradients = {**made.gradients, **named, **_repeated(made)}
    return made


def _repeated(step: StepGraph) -> dict[int, str]:
    """Storages of the repetitions of gradients, to the names of their parameters."""
    of = {node.name: value.storage for node in step.nodes for value in values_of(node)}
    return {
        value.storage: step.gradients[of[node.meta["origin"]]]
        for node in step.nodes
        if node.meta["recomputed"] and of.get(node.meta.get("origin", "")) in step.gradients
        for value in values_of(node)
    }


# Greedy recomputation until the peak memory meets a limit.
#
# Each activation that can be computed again has a price, what the operators cost that make it from what is alive late
# anyhow, and frees its bytes. Those that free most for their price are taken first, as many as the goal needs. An
# operator's price is its FLOPs, a byte that it moves counted as `FLOPS_A_BYTE` of them.
#
# It is no optimum: a storage's price does not change with what else was chosen. Jain et al., "Checkmate", arXiv
# 1910.02653, solve for that one.

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
