"""Selective recomputation: results of expensive operators are kept, what lies between them is computed again.

Kept are the results of matrix products, fused attention and collectives. Everything else of a layer (norms, activation
functions, rotations, casts, residual sums) is recomputed from them in the backward pass. Of batched products one kind
is cheap for its size and recomputed too (`matmuls.is_expensive`): the scores of attention where no kernel fuses it.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 5,
recompute these scores; torchtitan's `selective` of option `op` keeps the products.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.matmuls import is_expensive, operator_name
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.recompute import homes, inside, recompute


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
