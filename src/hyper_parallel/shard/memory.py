"""`strategy.memory` and `strategy.precision` put into effect: recomputed layers, FSDP units, compute dtypes.

In eager steps a layer keeps its input and is computed again in the backward pass (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174); random numbers are functions of the element, so no generator state needs
saving. In captured steps graph passes recompute layers and gather weights again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_parallel.compat.dispatch import mapped
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph import Pass, Rewrite, StepGraph, layers, regather, selective
from hyper_parallel.graph.operator_costs import is_expensive
from hyper_parallel.graph.reorder_for_memory import collectives_in_place
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.model_structure import is_own, layers_or_refuse
from hyper_parallel.shard.plan.plan import Plan
from hyper_parallel.shard.rules import matching, matching_or_refuse
from hyper_parallel.shard.sharded_model import ShardedModel
from hyper_parallel.strategy import Precision, Strategy, recomputed_layers, recomputes
from hyper_parallel.strategy.memory import Memory

_COLLECTIVES = "_c10d_functional"


def recomputed_modules(
    model: nn.Module, strategy: Strategy, counts: Sequence[int] | None = None
) -> list[str]:
    """The names of the layers that the strategy recomputes. `counts`: the layers of each stage of a pipeline.

    Raises StrategyError for a model without a list of layers, and for more layers than there are.
    """
    memory = strategy.memory
    if not recomputes(memory):
        return []
    name, found = layers_or_refuse(model, f"memory.recompute: {memory.recompute}")
    return [f"{name}.{index}" for index in recomputed_layers(memory, counts or [len(found)])]


def apply_recompute(layers: Iterable[nn.Module], selective: bool) -> None:
    """Recompute each of `layers` in the backward pass: all of it, or what `_policy` does not keep."""
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        wrap(layer, partial(_recomputed, options))


def _recomputed(options: dict[str, Any], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    context = current_step()
    if context.recompute_in_graph or not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # The backward pass may run outside of what the forward pass ran in, and in another thread.
        with context.installed():
            return forward(*args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _policy(_context: Any, op: Any, *args: Any, **_options: Any) -> CheckpointPolicy:
    """The policy of an operator in a layer's forward pass: whether its results are kept."""
    namespace, _, rest = op._schema.name.partition("::")
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    kept = namespace == _COLLECTIVES or is_expensive(rest.removesuffix("_"), shapes)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def separately_gathered(model: nn.Module, plan: Plan, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Module name to the axis of its storage, of the modules that FSDP2 gathers each by itself; inner ones first.

    They are the decoder layers, and inside and outside of these the modules whose weights are stored over other axes
    or computed with in another dtype than the model's. What is left goes with the model's root; so does a layer that
    shares a weight with modules outside of it (Zamba), since FSDP2 keeps a weight one only inside of a group.
    """
    plans = {id(p): plan.parameters[name] for name, p in model.named_parameters()}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        storages = {plans[id(p)].storage for p in module._parameters.values() if p is not None}
        if name and storages and (dtypes[name] != dtypes[""] or storages != {plan.mesh.storage}):
            assert len(storages) == 1, f"{name} has weights stored over {storages}"
            found[name] = storages.pop()
    if plan.layers is not None:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for index, layer in model.get_submodule(plan.layers).named_children():
            inside = Counter(id(p) for _, p in layer.named_parameters(remove_duplicate=False))
            if all(uses[parameter] == count for parameter, count in inside.items()):
                found.setdefault(f"{plan.layers}.{index}", plan.mesh.storage)
    return found


def frees_after_forward(memory: Memory, gathered: Iterable[str]) -> dict[str, bool]:
    """Module name to whether its gathered parameters are freed after its forward pass, of `separately_gathered`.

    Raises StrategyError when a pattern of memory.reshard_after_forward matches none of them.
    """
    names, given = list(gathered), memory.reshard_after_forward
    if not isinstance(given, dict):
        return dict.fromkeys(names, memory.shard == "parameters" and given is not False)
    found = dict.fromkeys(names, memory.shard == "parameters")
    for pattern, frees in given.items():
        matched = matching(pattern, names)
        if not matched:
            raise StrategyError(
                f"strategy.memory.reshard_after_forward: the pattern {pattern!r} matches no module that is gathered "
                f"by itself; these are {', '.join(names[:3]) or 'none'}{', …' if len(names) > 3 else ''}"
            )
        found.update(dict.fromkeys(matched, frees))
    return found


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

    return Rewrite("regather", gather_again)


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


def dtype(name: str) -> torch.dtype:
    """The torch dtype that a file's name for it means."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def compute_dtypes(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Module name to compute dtype. A pattern's dtype holds for the module and everything below it."""
    names = [name for name, _ in model.named_modules()]
    matched: dict[str, torch.dtype] = {"": dtype(precision.compute)}
    for pattern, theirs in precision.modules.items():
        found = matching_or_refuse(pattern, names, "strategy.precision.modules")
        matched.update(dict.fromkeys(found, dtype(theirs)))
    dtypes: dict[str, torch.dtype] = {}
    for name in names:  # parents come before children
        dtypes[name] = matched[name] if name in matched else dtypes[name.rpartition(".")[0]]
    return dtypes


def apply_casts(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Where a module computes in another dtype than its parent, cast what goes in and what comes out."""
    for name, module in model.named_modules():
        inner, outer = dtypes[name], dtypes[name.rpartition(".")[0]]
        if not name and inner != torch.float32:
            wrap(module, _cast(inner, None))
        elif inner != outer:
            wrap(module, _cast(inner, outer))


def _cast(inner: torch.dtype, outer: torch.dtype | None) -> Wrapper:
    def to(x: Any, wanted: torch.dtype) -> Any:
        return x.to(wanted) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(lambda x: to(x, inner), (args, kwargs))
        output = forward(*args, **kwargs)
        return output if outer is None else mapped(lambda x: to(x, outer), output)

    return wrapper
