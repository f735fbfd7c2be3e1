"""Resident memory of a rank, exact: parameters, gradients, optimizer state, gathered weights.

| | elements of | dtype | when |
|---|---|---|---|
| parameters | the Layout | `precision.param` | always |
| gradients | the Layout | `precision.param` | from the backward pass to the update |
| not yet reduced | the Layout, gathered | `precision.reduce` | `shard: optimizer`, between micro-batches |
| optimizer state | its own pieces | its own | always |
| gathered weights | the Layout, gathered | the module's | those kept, and two at once of those freed |

Two: the one computed with and the one that is gathered ahead. While gradients are reduced the group at hand has them
whole, once as they were computed and once as they are sent; those outside of layers wait for the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.fsdp_units import frees_after_forward, separately_gathered
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.precision import compute_dtypes, dtype
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that one rank keeps of one parameter."""

    layout: str
    parameter: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that one rank holds whole over their storage axes."""

    kept: int
    """Of modules that do not free theirs: from the forward to the end of the backward pass, or of the step."""
    freed: int
    """Of modules that do, as many as are there at once: two layers, or two of what is outside of layers."""
    gradients: int
    """Of gradients before they are reduced: those of what is outside of layers, and those of one more group of modules
    or these same ones in the dtype they are sent in."""

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.kept + self.freed + self.gradients


def resident_bytes_of(handle: ShardedModel, config: RunConfig, rank: int) -> dict[str, ResidentBytes]:
    """By parameter name, what `rank` keeps of a model that was parallelized on the meta device."""
    strategy, coordinate = handle.strategy, handle.axes.devices.coordinate(rank)
    state = _optimizer_bytes(handle, config)
    micro_batches = count_micro_batches(config)
    stored, reduce = dtype(strategy.precision.param), dtype(strategy.precision.reduce)
    accumulates = strategy.memory.shard == "optimizer" and micro_batches > 1
    found = {}
    for parameter in handle.parameters():
        layout = parameter.layout
        local = math.prod(layout.local_shape(coordinate)) * stored.itemsize
        gradient = 0
        if parameter.parameter.requires_grad:
            gradient = local
            planned = handle.plan.parameters[parameter.name]
            if accumulates and _is_gathered(handle.plan, planned.storage):
                gradient += math.prod(planned.computed.local_shape(coordinate)) * reduce.itemsize
        found[parameter.name] = ResidentBytes(str(layout), local, gradient, state.get(parameter.name, 0))
    return found


def count_micro_batches(config: RunConfig) -> int:
    """Micro-batches of a step on each rank."""
    share = config.train.batch // config.effective_strategy.axes.data
    return share // (config.train.micro_batch or share)


def gathered_by(model: nn.Module, plan: Plan, strategy: Strategy, rank: int) -> Gathered:
    """What `rank` gathers of a model that is not parallelized yet, a group of modules at a time as FSDP2 does it."""
    dtypes = compute_dtypes(model, strategy.precision)
    apart = separately_gathered(model, plan, dtypes)
    frees = frees_after_forward(strategy.memory, apart)
    reduce = dtype(strategy.precision.reduce)
    weights: dict[str, int] = {}
    computed: dict[str, int] = {}
    sent: dict[str, int] = {}
    seen: set[int] = set()
    coordinate = plan.mesh.coordinate(rank)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        group = _group_of(name, apart)
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            planned = plan.parameters[known[id(parameter)]]
            elements = math.prod(planned.computed.local_shape(coordinate))
            compute, stored = dtypes[name], dtype(strategy.precision.param)
            if _is_gathered(plan, planned.storage):
                weights[group] = weights.get(group, 0) + elements * compute.itemsize
                if parameter.requires_grad:
                    computed[group] = computed.get(group, 0) + elements * compute.itemsize
                    sent[group] = sent.get(group, 0) + elements * reduce.itemsize
            elif compute != stored:
                # A cast that autograd keeps for the backward pass.
                weights[""] = weights.get("", 0) + elements * compute.itemsize
    kept = sum(size for group, size in weights.items() if not frees.get(group, False))
    freed: dict[str, int] = {}
    for group, size in weights.items():
        if frees.get(group, False):
            # Experts are gathered by themselves, while their layer's other weights are there.
            freed[_outermost(group, apart)] = freed.get(_outermost(group, apart), 0) + size
    # The root's are reduced last: those of the head are there while layers compute and send theirs.
    root = computed.pop("", 0)
    others = max((size + sent[group] for group, size in computed.items()), default=0)
    return Gathered(kept, sum(sorted(freed.values())[-2:]), root + max(sent.get("", 0), others))


def _is_gathered(plan: Plan, storage: str) -> bool:
    """Whether FSDP2 has the parameters that are stored over this axis."""
    return plan.mesh.size(storage) * plan.mesh.size("replicate") > 1


def _group_of(name: str, apart: Mapping[str, str]) -> str:
    """The innermost module gathered by itself that a module is in; the root's name if there is none."""
    while name and name not in apart:
        name = name.rpartition(".")[0]
    return name


def _outermost(name: str, apart: Mapping[str, str]) -> str:
    """The outermost module gathered by itself that a module is in, or is."""
    parts = name.split(".")
    paths = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next(path for path in paths if path in apart)


def _optimizer_bytes(handle: ShardedModel, config: RunConfig) -> dict[str, int]:
    """By parameter name, the bytes of all state that the run's optimizer keeps for it, as it declares its pieces."""
    optimizer = build_optimizer(handle.model, config.train.optimizer)
    names = {p.name for p in handle.parameters()}
    found: dict[str, int] = {}
    for key, piece in optimizer.pieces().items():
        # optimizer.<kind>.<parameter>
        name = key.split(".", 2)[2]
        assert name in names, f"state {key!r} of no parameter"
        found[name] = found.get(name, 0) + _bytes(piece.local)
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
