"""Which rewrites a step's graph goes through before it runs, by what the strategy asks for."""

from __future__ import annotations

from hyper_parallel.graph import Pass, Rewrite, StepGraph, regather
from hyper_parallel.shard.rules import matching
from hyper_parallel.strategy import Memory, Strategy


def passes_for(strategy: Strategy) -> tuple[Pass, ...]:
    """In the order in which they run."""
    memory = strategy.memory
    gathers = strategy.axes.world > 1 and memory.shard == "parameters"
    if not gathers or memory.reshard_after_forward is False:
        return ()

    def gather_again(step: StepGraph) -> StepGraph:
        return regather(step, kept=lambda module: _stays(module, memory))

    return (Rewrite("regather", gather_again, provides=frozenset({"regathered"})),)


def _stays(module: str, memory: Memory) -> bool:
    """Whether the weights that were gathered for a module are kept for its backward pass.

    As in eager runs, those of the model's root are, and of a layer what the last pattern that matches it says.
    """
    given = memory.reshard_after_forward
    if not module or not isinstance(given, dict):
        return not module
    parts = module.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    frees = [True, *(frees for pattern, frees in given.items() if matching(pattern, around))]
    return not frees[-1]
