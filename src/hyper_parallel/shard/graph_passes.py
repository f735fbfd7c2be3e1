"""Graph passes that a sharding strategy asks for: weights gathered again, layers recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.graph import Pass, Rewrite, StepGraph, layers, regather, rewritten
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


def computed_again(step: StepGraph, modules: Sequence[str], *, alone: bool) -> StepGraph:
    """The step with each of these modules computed again in the backward pass, its collectives too; `alone`: on one
    device."""
    # Weights that are gathered are freed, or kept, by a pass of their own; on one device they are only cast.
    again = Rewrite("layers", lambda step: layers(step, modules, weights=alone, collectives=True))
    return rewritten(step, [again])


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
