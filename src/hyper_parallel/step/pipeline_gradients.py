"""Gradients of a rank's parameters from the sums that its stages come to, as tensors or as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import Value
from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.pipeline_plan import PipelinePlan
from hyper_parallel.step.pipeline_stages import PipelineStages, parameter_of

T = TypeVar("T")


@dataclass(frozen=True)
class Arithmetic(Generic[T]):
    """What is done with the sums."""

    run: Callable[[StepGraph, Mapping[str, T]], Mapping[str, T]]
    """(graph, its inputs by name) to its outputs."""
    added: Callable[[T, T], T]
    zeros: Callable[[Value], T]


def reduced_gradients(sums: Mapping[str, T], reduce: StepGraph | None, does: Arithmetic[T]) -> dict[str, T]:
    """Gradients by parameter. `sums`: of the stages' gradients over the micro-batches, by name; `reduce`: as of
    `PipelineStages.reduce`."""
    known = {} if reduce is None else given_to(reduce)
    found = {name: value for name, value in sums.items() if GRADIENT + name not in known}
    if reduce is None:
        return found
    given = {
        name: sums[key]
        if (key := name.removeprefix(GRADIENT)) in sums
        # A part of the gradient that other stages have.
        else does.zeros(value)
        for name, value in known.items()
    }
    for output, value in does.run(reduce, given).items():
        name = parameter_of(output)
        found[name] = does.added(found[name], value) if name in found else value
    return found


def given_to(step: StepGraph) -> dict[str, Value]:
    """What a graph is given, by name."""
    return {
        entry.name: node.meta["value"] for entry, node in zip(step.inputs, step.placeholders, strict=True)
    }


def shared_gradients(
    stages: PipelineStages, owners: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Parameters with a gradient that several device groups hold, and these; in one order on all ranks."""
    outputs = {name for stage in stages.partition.stages for name in stage.step.outputs}
    trained = {*stages.reduced, *(name.removeprefix(GRADIENT) for name in outputs)}
    return {name: holders for name, holders in sorted(owners.items()) if len(holders) > 1 and name in trained}


def gradient_value(plan: PipelinePlan, parameter: str) -> Value:
    """What the captured micro-batch has as the gradient of a parameter."""
    value: Value = plan.stages.whole.returned[GRADIENT + parameter].meta["value"]
    return value


@dataclass(frozen=True)
class SharedGradients:
    """This rank's shared parameters, and the process group of all ranks that hold each."""

    handle: ShardedModel
    groups: dict[str, dist.ProcessGroup]
    """By parameter, in an order that is the same on all ranks."""

    @classmethod
    def of(
        cls, stages: PipelineStages, owners: Mapping[str, tuple[int, ...]], handle: ShardedModel
    ) -> SharedGradients:
        """Make the process groups. A collective: all ranks make all groups, since torch names one that its own ranks
        make by how many each of them has, and device groups of unlike axes have made unlike numbers."""
        place = handle.pipeline
        assert place is not None, "the model was spread over device groups"
        shared = shared_gradients(stages, owners)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for holders in sorted(set(shared.values())):
            ranks = sorted(rank for index in holders for rank in place.groups[index].ranks)
            group: dist.ProcessGroup = dist.new_group(ranks)
            if place.index in holders:
                made[holders] = group
        return cls(handle, {name: made[holders] for name, holders in shared.items() if holders in made})

    def add_up(self) -> None:
        """Give each shared parameter the sum of all groups' gradients. A collective of the groups that share some."""
        place = self.handle.pipeline
        assert place is not None, "the model was spread over device groups"
        named = {one.name: one for one in self.handle.owned()}
        for name, group in self.groups.items():
            one = named[name]
            gradient = one.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(one.local)
            # Other groups have cut it otherwise. Each counts once.
            whole: Tensor = self.handle.gather(gradient, one.layout).contiguous()
            if self.handle.rank != place.devices.ranks[0]:
                whole = torch.zeros_like(whole)
            dist.all_reduce(whole, group=group)
            one.parameter.grad = self.handle.cut(whole, one.layout).contiguous().view_as(one.local)
