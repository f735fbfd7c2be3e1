"""Gradients of a rank's parameters: from the sums that its stages come to, as tensors or as nodes of a graph, and of
parameters that several device groups hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import Value
from hyper_parallel.shard import ShardedModel, ShardedParameter
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


class SharedGradients:
    """The parameters of this rank that several device groups hold, and the sums of their gradients."""

    def __init__(
        self, stages: PipelineStages, owners: Mapping[str, tuple[int, ...]], handle: ShardedModel
    ) -> None:
        """Make the process groups. A collective, right behind the making of the groups of this rank's axes."""
        place = handle.pipeline
        assert place is not None, "the model was spread over device groups"
        self._handle, self._place = handle, place
        shared = shared_gradients(stages, owners)
        made = {holders: self._group(holders) for holders in sorted(set(shared.values()))}
        self.groups: dict[str, dist.ProcessGroup] = {
            name: made[holders] for name, holders in shared.items() if place.index in holders
        }
        """By parameter, in an order that is the same on all ranks."""

    def _group(self, holders: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of the device groups `holders`: of their ranks at this rank's place, or of all their ranks
        where their meshes are unlike. Another one where this rank's group is none of them.

        Torch names a group that its own ranks make by how many each of them has. So every rank of a pipeline makes as
        many, one with itself alone in place of each that it is not in: with another number, groups would have other
        names on other ranks, which then wait for each other for ever. Device groups of unlike axes have made unlike
        numbers, and all their ranks make all groups.
        """
        place, rank = self._place, self._handle.rank
        if place.submodels:
            everyone = sorted(rank for index in holders for rank in place.groups[index].ranks)
            whole: dist.ProcessGroup = dist.new_group(everyone)
            return whole
        here = place.devices.place(rank)
        ranks = [rank]
        if place.index in holders:
            ranks = sorted(place.groups[index].ranks[here] for index in holders)
        group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
        if group is None:
            raise HyperParallelError(f"rank {rank} is not one of the ranks {ranks} that share weights")
        return group

    def add_up(self) -> None:
        """Give each shared parameter the sum of all groups' gradients. A collective of the groups that share some."""
        named = {one.name: one for one in self._handle.owned()}
        for name, group in self.groups.items():
            one = named[name]
            if one.parameter.grad is None:
                # Another holder's stages compute the whole gradient.
                one.parameter.grad = torch.zeros_like(one.parameter)
            if self._place.submodels:
                self._add_up_whole(one, group)
            else:
                dist.all_reduce(one.parameter.grad, group=group)

    def _add_up_whole(self, one: ShardedParameter, group: dist.ProcessGroup) -> None:
        """Sum a gradient that other groups have cut otherwise. Each counts once."""
        handle, gradient = self._handle, one.parameter.grad
        assert gradient is not None
        whole: Tensor = handle.gather(gradient, one.layout).contiguous()
        if handle.rank != self._place.devices.ranks[0]:
            whole = torch.zeros_like(whole)
        dist.all_reduce(whole, group=group)
        one.parameter.grad = handle.cut(whole, one.layout).contiguous().view_as(one.local)
