"""The load of each expert, and what balances it: corrected biases of routers, and experts that move between ranks.

Bias correction (DeepSeek-V3; arXiv 2408.15664, algorithm 1): after a step, b_e += rate · sign(mean load − load_e),
with the loads of the whole batch, equal on all ranks (`update_biases`). `move_experts` moves experts to other ranks
between steps, to a placement of `experts.placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.local_tensor import per_rank
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.layout.layout import elements_moved
from hyper_parallel.shard.experts.placement import Placement, heaviest, set_places
from hyper_parallel.shard.experts.routing import Routing
from hyper_parallel.shard.plan.plan import ExpertsPlan
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.shard.reshard import reshard
from hyper_parallel.shard.sharded_model import ShardedModel, sharded

BIAS = "e_score_correction_bias"
"""The buffer by which families with a corrected router name its bias."""


def _counted(routing: Routing) -> dict[str, ExpertsPlan]:
    """The experts whose rows are counted: those of the layers that run."""
    runs = current_step().runs
    return {name: experts for name, experts in routing.experts.items() if runs(name)}


def _by_layer(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Loads of all layers to those of each."""
    if len(set(counts)) == 1:
        every = rows.view(-1, counts[0])
        return [every[layer] for layer in range(len(counts))]
    return list(rows.split(list(counts)))


def loads(handle: ShardedModel) -> torch.Tensor:
    """float32[sum of E over the layers]: this rank's rows for each expert since `take_loads`; no collective.

    The sum over all axes is the load of the whole batch: of the ranks that see the same tokens, one counts them.
    """
    routing = handle.routing
    if routing is None:
        return torch.zeros(0, device=handle.device)
    zeros = {
        name: torch.zeros(e.count, dtype=torch.int64, device=handle.device)
        for name, e in _counted(routing).items()
    }
    rows = torch.cat([routing.counts.get(name, zero) for name, zero in zeros.items()]).float()
    if routing.own_tokens:
        return rows
    return rows * per_rank(
        lambda rank: torch.tensor(handle.axes.speaks(LOSS_AXES, rank), device=handle.device)
    )


def take_loads(handle: ShardedModel) -> torch.Tensor:
    """Return `loads` and reset the counts."""
    rows = loads(handle)
    if handle.routing is not None:
        handle.routing.counts.clear()
    return rows


def by_layer(handle: ShardedModel, summed: Sequence[float]) -> dict[str, list[int]]:
    """Name of the experts module to the load of each of its experts; `summed`: those of all layers (`StepResult`)."""
    routing = handle.routing
    if routing is None:
        return {}
    left = iter(summed)
    return {
        name: [int(rows) for rows in islice(left, experts.count)] for name, experts in routing.experts.items()
    }


def imbalance(handle: ShardedModel, summed: torch.Tensor) -> torch.Tensor:
    """max / mean of the experts' load in the layer where it is the largest; zero-dim fp32, 1 when all are equal.

    `summed` is what `take_loads` said, summed over all ranks.
    """
    assert handle.routing is not None
    counts = [experts.count for experts in _counted(handle.routing).values()]
    if len(set(counts)) == 1:
        # A few operators for all layers, whose number is that of the graph's nodes.
        every = summed.view(-1, counts[0])
        return (every.amax(1) / every.mean(1).clamp(min=1e-9)).max()
    return torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in summed.split(counts)]).max()


def rank_imbalance(handle: ShardedModel, summed: Sequence[float]) -> float:
    """The heaviest rank's rows over the mean, in the layer where that is the largest, of the ranks of the expert axis;
    rows of replicas count evenly. `summed` as for `by_layer`."""
    assert handle.routing is not None
    ranks, placements = handle.mesh.size("expert"), handle.routing.placements
    layers = by_layer(handle, summed).items()
    return max(heaviest(load, placements[name], ranks) for name, load in layers)


@torch.no_grad()
def update_biases(model: nn.Module, summed: torch.Tensor, rate: float) -> None:
    """Correct each router's bias by the step's loads: `summed` as for `imbalance`. Layers without one are left alone.

    Raises StrategyError for a model without experts.
    """
    routing = sharded(model).routing
    if routing is None:
        raise StrategyError(
            f"{type(model).__name__} has no experts whose loads could correct a router's bias"
        )
    counted = _counted(routing)
    layers = _by_layer(summed, [experts.count for experts in counted.values()])
    for (name, experts), load in zip(counted.items(), layers, strict=True):
        for module in model.get_submodule(name.rpartition(".")[0]).modules():
            bias = module._buffers.get(BIAS)
            if bias is not None and bias.shape == (experts.count,):
                bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=rate)


def has_biases(model: nn.Module) -> bool:
    """Whether some router of the model has a bias to correct."""
    return any(BIAS in module._buffers for module in model.modules())


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
                    with present(local, changed=True):
                        local.copy_(reshard(local, source, target))
                    moved += elements_moved(source, target) * local.element_size()
                handle.orders[parameter.name] = placement.order
        routing.placements[name] = placement
        set_places(module, placement)
    return moved
