"""Expert load balancing: load of each expert, bias update. The auxiliary loss is `shard.experts.auxiliary_loss`.

Bias correction (DeepSeek-V3; arXiv 2408.15664, algorithm 1): after a step, b_e += rate · sign(mean load − load_e),
with the loads of the whole batch, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.experts.dispatch import count
from hyper_parallel.shard.experts.placement import Placement, heaviest
from hyper_parallel.shard.experts.places import set_places
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.plan.types import ExpertsPlan, Plan
from hyper_parallel.shard.sharded_model import LOSS_AXES, ShardedModel, sharded

BIAS = "e_score_correction_bias"
"""The buffer by which families with a corrected router name its bias."""


@dataclass(eq=False)
class Routing:
    """What has been seen of a model's experts since somebody asked. `of` makes one that watches a model."""

    experts: dict[str, ExpertsPlan]
    own_tokens: bool
    """Ranks of the tensor axes see different tokens."""
    watching: bool = False
    """A forward pass of the training is running; recomputed layers and evaluation are not counted."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """By experts module, int64[E]: rows sent to each expert, added up."""
    placements: dict[str, Placement] = field(default_factory=dict)
    """By experts module: which rank has which experts. Changed by `move_experts` where the plan says `balanced`."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> Routing:
        """Watch the model's layers."""
        routing = cls(dict(plan.experts), has_own_tokens(plan))
        for name, experts in plan.experts.items():
            routing.placements[name] = Placement(tuple(range(experts.count)), experts.replicas)
        wrap(around_layers(model, plan), routing._watch)
        return routing

    def count(self, name: str, ids: torch.Tensor) -> None:
        """Add the rows that `ids`, int64[..., k], send to each expert of a module."""
        if self.watching:
            found = count(ids.flatten(), self.experts[name].count)
            self.counts[name] = self.counts[name] + found if name in self.counts else found

    def write_places(self, model: nn.Module) -> None:
        """Write the placements of balanced experts into the model's buffers, which have memory now."""
        for name, experts in self.experts.items():
            if experts.balanced:
                set_places(model.get_submodule(name), self.placements[name])

    def _watch(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.watching = torch.is_grad_enabled()
        try:
            return forward(*args, **kwargs)
        finally:
            self.watching = False


def has_own_tokens(plan: Plan) -> bool:
    """Whether ranks of the tensor axes see different tokens in the experts."""
    return any(experts.own_tokens for experts in plan.experts.values())


def around_layers(model: nn.Module, plan: Plan) -> nn.Module:
    """The module that holds the list of layers."""
    return model.get_submodule((plan.layers or "").rpartition(".")[0])


def _counted(routing: Routing) -> dict[str, ExpertsPlan]:
    """The experts whose rows are counted: those of the layers that run."""
    runs = current_step().runs
    return {name: experts for name, experts in routing.experts.items() if runs(name)}


def _by_layer(told: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Loads of all layers to those of each."""
    if len(set(counts)) == 1:
        every = told.view(-1, counts[0])
        return [every[layer] for layer in range(len(counts))]
    return list(told.split(list(counts)))


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
    told = torch.cat([routing.counts.get(name, zero) for name, zero in zeros.items()]).float()
    return (
        told
        if routing.own_tokens
        else told
        * per_rank(lambda rank: torch.tensor(handle.axes.speaks(LOSS_AXES, rank), device=handle.device))
    )


def take_loads(handle: ShardedModel) -> torch.Tensor:
    """Return `loads` and reset the counts."""
    told = loads(handle)
    if handle.routing is not None:
        handle.routing.counts.clear()
    return told


def by_layer(handle: ShardedModel, told: torch.Tensor) -> dict[str, list[int]]:
    """Name of the experts module to the load of each of its experts; `told` as for `imbalance`. The host waits."""
    routing = handle.routing
    if routing is None:
        return {}
    layers = told.split([experts.count for experts in routing.experts.values()])
    return {
        name: [int(rows) for rows in load.tolist()]
        for name, load in zip(routing.experts, layers, strict=True)
    }


def imbalance(handle: ShardedModel, told: torch.Tensor) -> torch.Tensor:
    """max / mean of the experts' load in the layer where it is the largest; zero-dim fp32, 1 when all are equal.

    `told` is what `take_loads` said, summed over all ranks.
    """
    assert handle.routing is not None
    counts = [experts.count for experts in _counted(handle.routing).values()]
    if len(set(counts)) == 1:
        # A few operators for all layers, whose number is that of the graph's nodes.
        every = told.view(-1, counts[0])
        return (every.amax(1) / every.mean(1).clamp(min=1e-9)).max()
    return torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in told.split(counts)]).max()


def rank_imbalance(handle: ShardedModel, told: torch.Tensor) -> float:
    """The heaviest rank's rows over the mean, in the layer where that is the largest, of the ranks of the expert axis;
    rows of replicas count evenly. `told` as for `imbalance`. The host waits."""
    assert handle.routing is not None
    ranks, placements = handle.mesh.size("expert"), handle.routing.placements
    layers = by_layer(handle, told).items()
    return max(heaviest(load, placements[name], ranks) for name, load in layers)


@torch.no_grad()
def update_biases(model: nn.Module, told: torch.Tensor, rate: float) -> None:
    """Correct each router's bias by the step's loads: `told` as for `imbalance`. Layers without one are left alone.

    Raises StrategyError for a model without experts.
    """
    routing = sharded(model).routing
    if routing is None:
        raise StrategyError(
            f"{type(model).__name__} has no experts whose loads could correct a router's bias"
        )
    counted = _counted(routing)
    layers = _by_layer(told, [experts.count for experts in counted.values()])
    for (name, experts), load in zip(counted.items(), layers, strict=True):
        for module in model.get_submodule(name.rpartition(".")[0]).modules():
            bias = module._buffers.get(BIAS)
            if bias is not None and bias.shape == (experts.count,):
                bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=rate)


def has_biases(model: nn.Module) -> bool:
    """Whether some router of the model has a bias to correct."""
    return any(BIAS in module._buffers for module in model.modules())
