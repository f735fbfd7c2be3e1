"""Expert load balancing: load of each expert, auxiliary loss, bias update.

Auxiliary loss, as Transformers' ``load_balancing_loss_func`` has it (Switch Transformer, arXiv 2101.03961, equations
4 to 6), over the R rows that routers see: all layers, all tokens of a global micro-batch:

    L = E · Σ_e f_e · P_e,    f_e = (times that e is among the k chosen) / R,    P_e = (sum of e's probabilities) / R

Both are taken over all ranks that see other tokens, so that neither the value nor its gradient depends on the axes.
f has no gradient; each rank's part is linear in its own probabilities.

Bias correction (DeepSeek-V3; arXiv 2408.15664, algorithm 1): after a step, b_e += rate · sign(mean load − load_e),
with the loads of the whole batch, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hyper_parallel.shard.model_structure import text_config
from hyper_parallel.shard.plan.types import ExpertsPlan, Plan
from hyper_parallel.shard.sharded_model import LOSS_AXES, ShardedModel, sharded

BIAS = "e_score_correction_bias"
"""The buffer by which families with a corrected router name its bias."""


@dataclass(eq=False)
class Routing:
    """What has been seen of a model's routers since somebody asked. `of` makes one that watches a model."""

    experts: dict[str, ExpertsPlan]
    own_tokens: bool
    """Ranks of the tensor axes see different tokens."""
    coefficient: float = 0.0
    """Of the auxiliary loss; 0 when the model's config does not ask for it."""
    top_k: int = 0
    watching: bool = False
    """A forward pass of the training is running; recomputed layers and evaluation are not counted."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """By experts module, int64[E]: rows sent to each expert, added up."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[T, E] of each router, of the last forward pass."""
    placements: dict[str, Placement] = field(default_factory=dict)
    """By experts module: which rank has which experts. Changed by `move_experts` where the plan says `balanced`."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> Routing:
        """Watch the model's layers and, if its config asks for the auxiliary loss, its routers."""
        config: Any = text_config(model)
        own_tokens = any(experts.own_tokens for experts in plan.experts.values())
        routing = cls(dict(plan.experts), own_tokens)
        for name, experts in plan.experts.items():
            routing.placements[name] = Placement(tuple(range(experts.count)), experts.replicas)
        if getattr(config, "output_router_logits", False):
            routing.coefficient = float(getattr(config, "router_aux_loss_coef", 0.0))
            routing.top_k = int(config.num_experts_per_tok)
        layers = plan.layers or ""
        wrap(model.get_submodule(layers.rpartition(".")[0]), routing._watch)
        if routing.coefficient:
            for module, index in _routers(model):
                wrap(module, routing._recorder(index))
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
        self.logits.clear()
        self.watching = torch.is_grad_enabled()
        try:
            return forward(*args, **kwargs)
        finally:
            self.watching = False

    def _recorder(self, index: int) -> Any:
        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.watching:
                self.logits.append(output[index] if isinstance(output, tuple) else output)
            return output

        return wrapper


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output, at an index, Transformers records as the router's logits."""
    targets: dict[type[nn.Module], int] = {}
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in recorded if isinstance(recorded, list) else [recorded]:
            target = getattr(one, "target_class", one)
            if isinstance(target, type):
                targets[target] = int(getattr(one, "index", 0))
    for module in model.modules():
        index = next((i for target, i in targets.items() if isinstance(module, target)), None)
        if index is not None:
            yield module, index


def auxiliary_loss(handle: ShardedModel) -> torch.Tensor:
    """This rank's part of the last forward pass's auxiliary loss, its coefficient included; a zero-dim fp32 tensor.

    The sum of the parts over LOSS_AXES is the loss of the global micro-batch; ranks along the tensor axes hold the
    same part. A collective, unless the model's config does not ask for the loss (`output_router_logits`, with
    `router_aux_loss_coef`): then it is zero. Tokens are counted whether they bear loss or not, as in Transformers
    without an attention mask.
    """
    routing = handle.routing
    if routing is None or not routing.coefficient or not routing.logits:
        return torch.zeros((), device=handle.device)
    experts = routing.logits[0].size(-1)
    chosen, probabilities, rows = [], [], []
    for logits in routing.logits:
        shares = torch.softmax(logits, dim=-1)
        chosen.append(count(shares.topk(routing.top_k, dim=-1).indices.flatten(), experts))
        probabilities.append(shares.float().sum(0))
        rows.append(torch.ones_like(logits[:, 0], dtype=torch.float32).sum())
    routing.logits.clear()
    counted = torch.cat([torch.stack(chosen).sum(0).float(), torch.stack(rows).sum().view(1)])
    mine = torch.stack(probabilities).sum(0)
    axes: tuple[str, ...] = LOSS_AXES
    if routing.own_tokens:
        axes = (*LOSS_AXES, *handle.mesh.atoms(handle.mesh.tensor))
        # Each rank of the tensor axes has a part of the tokens, and then holds the loss of all of them.
        mine = handle.axes[handle.mesh.tensor].reduce(mine)
    counted = handle.all_reduce(counted, axes)
    fractions, total = counted[:-1] / counted[-1], counted[-1]
    return routing.coefficient * experts * (fractions * (mine / total)).sum()


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
