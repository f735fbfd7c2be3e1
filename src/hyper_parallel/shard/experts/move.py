"""Experts to other ranks between steps: weights, what an optimizer keeps of them, and the places that tokens go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.transfer import elements_moved
from hyper_parallel.shard.experts.placement import Placement
from hyper_parallel.shard.experts.places import set_places
from hyper_parallel.shard.reshard import reshard
from hyper_parallel.shard.sharded_model import ShardedModel


@torch.no_grad()
def move_experts(
    handle: ShardedModel, placements: Mapping[str, Placement], state: Mapping[str, Sequence[torch.Tensor]]
) -> int:
    """Place the experts of these modules anew; the bytes that crossed between ranks, over all ranks. A collective:
    every rank gives the same placements, between steps, when nobody holds gradients.

    `state`: name of a parameter to this rank's pieces of what else is laid out as it is, such as an optimizer's
    moments. Values are moved in place, one tensor at a time, and have the same bits; `ShardedParameter.layout` is
    another one afterwards. The plan says that the experts are `balanced`.
    """
    routing = handle.routing
    assert routing is not None
    fsdp.free_gathered(handle.model)
    named = {id(one.parameter): one for one in handle.parameters()}
    moved = 0
    for name, placement in placements.items():
        module = handle.model.get_submodule(name)
        if placement.order != routing.placements[name].order:
            for parameter in filter(None, map(named.get, map(id, module._parameters.values()))):
                source, target = parameter.layout, parameter.planned.ordered(0, placement.order)
                for local in (parameter.local, *state.get(parameter.name, ())):
                    moved += _move(local, source, target)
                handle.orders[parameter.name] = placement.order
        routing.placements[name] = placement
        set_places(module, placement)
    return moved


def _move(local: torch.Tensor, source: Layout, target: Layout) -> int:
    with present(local, changed=True):
        local.copy_(reshard(local, source, target))
    return elements_moved(source, target) * local.element_size()
