"""Experts of a mixture whose weights can be read one by one.

Transformers stacks the experts of a layer in parameters [E, ...], and the own code of modules that go through its
experts interface takes one expert's matrix after the other by its number. A module of another kind has its projections
streamed as a whole.
"""

from __future__ import annotations

from torch import nn

from hyper_parallel.shard.experts.plan import is_experts


def stacked_experts(module: nn.Module) -> int:
    """The number of experts E of a module whose weights are stacks of E, each for itself and plain; else 0."""
    count = getattr(module, "num_experts", 0)
    stacks = list(module.parameters(recurse=False))
    if not is_experts(module) or not hasattr(type(module).forward, "__wrapped__") or not stacks:
        return 0
    # Other weights of the module, and those of modules below it, have no expert's number.
    if len(stacks) != len(list(module.parameters())) or not isinstance(count, int):
        return 0
    return count if all(type(one) is nn.Parameter and one.shape[:1] == (count,) for one in stacks) else 0
