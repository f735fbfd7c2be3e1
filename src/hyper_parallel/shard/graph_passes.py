"""Graph passes that a sharding strategy asks for: weights gathered again, layers recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.graph import Pass, Rewrite, StepGraph, layers, regather, selective
from hyper_parallel.graph.collectives_in_place import collectives_in_place
from hyper_parallel.shard.rules import is_own, matching
from hyper_parallel.shard.sharded_model import ShardedModel
from hyper_parallel.strategy import Memory, Strategy


def in_place(step: StepGraph, handle: ShardedModel) -> StepGraph:
    """A captured step whose weights are gathered where they are used, also of a model that gathers all at its root."""
    return collectives_in_place(step) if handle.mesh.world > 1 and is_own(handle.model) else step


def regather_pass(strategy: Strategy) -> Pass | None:
    """The pass that gathers weights again in the backward pass; None where the strategy keeps them or splits none."""
    memory = strategy.memory
    gathers = strategy.axes.world > 1 and memory.shard == "parameters"
    if not gathers or memory.reshard_after_forward is False:
        return None

    def gather_again(step: StepGraph) -> StepGraph:
        return regather(step, kept=lambda module: _stays(module, memory))

    return Rewrite("regather", gather_again, provides=frozenset({"regathered"}))


def recompute_pass(strategy: Strategy, modules: Sequence[str]) -> Pass | None:
    """The pass with which the backward pass computes these modules again; None without modules.

    Whole modules with their collectives, or what `memory.recompute: selective` does not keep of them. On one device
    weights are only cast, and that is repeated; gathered weights are freed or kept by `regather_pass`.
    """
    alone = strategy.axes.world == 1
    if not modules:
        return None
    if strategy.memory.recompute == "selective":
        return Rewrite("selective", lambda step: selective(step, modules, weights=alone))
    return Rewrite("layers", lambda step: layers(step, modules, weights=alone, collectives=True))


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
