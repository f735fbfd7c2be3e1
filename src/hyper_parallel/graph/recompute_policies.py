"""Policies of recomputation: which results are kept, and which are computed again.

`selective` keeps the results of matrix products, fused attention and collectives; everything else of a layer is
recomputed from them, as are batched products that are cheap for their size (`is_expensive`): the scores of attention
(Korthikanti et al., arXiv 2205.05198, section 5; torchtitan's `selective` of option `op`). `narrow` repeats the casts
of gradients in low precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from torch import fx

from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.host_nodes import is_update, storages_of
from hyper_parallel.graph.ir import StepGraph, is_collective, is_wait, values_of
from hyper_parallel.graph.memory_effects import touched, writes
from hyper_parallel.graph.operator_costs import is_expensive, operator_name
from hyper_parallel.graph.recompute import homes, inside, recompute, repeatable


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
# The same kernel runs on the same bits, so that g' = g. It helps where early uses end soon and late ones stand together
# (`reorder_for_memory`). What a gradient is added to (several micro-batches), what is reduced in float32 and what the
# host updates with stay as they are.


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
    rewritten = recompute(step, chosen, collectives="none", kept=kept, lates=lates)
    named = {sources[storage]: step.gradients[storage] for storage in chosen}
    rewritten.gradients = {**rewritten.gradients, **named, **_repeated(rewritten)}
    return rewritten


def _repeated(step: StepGraph) -> dict[int, str]:
    """Storages of the repetitions of gradients, to the names of their parameters."""
    of = {node.name: value.storage for node in step.nodes for value in values_of(node)}
    return {
        value.storage: step.gradients[of[node.meta["origin"]]]
        for node in step.nodes
        if node.meta["recomputed"] and of.get(node.meta.get("origin", "")) in step.gradients
        for value in values_of(node)
    }
