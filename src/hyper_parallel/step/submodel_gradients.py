"""Gradients of parameters that several submodels train together: the sum of what each has computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.pipeline_gradients import shared_gradients
from hyper_parallel.step.pipeline_stages import PipelineStages


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
