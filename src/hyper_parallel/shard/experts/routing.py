"""Expert routing: tokens at the boundary of experts modules, and counts of the rows that each expert is sent.

The auxiliary loss is `shard.loss.auxiliary_loss`; what is done with the counts is `experts.loads`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import per_rank
from hyper_parallel.shard.experts import dispatch
from hyper_parallel.shard.experts.dispatch import count
from hyper_parallel.shard.experts.placement import Placement, Places, add_places, set_places
from hyper_parallel.shard.experts.plan import is_concatenated
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.mesh_axis import Axis, _pad
from hyper_parallel.shard.plan.plan import ExpertsPlan, Plan
from hyper_parallel.shard.process_mesh import ProcessMesh


@dataclass(eq=False)
class Routing:
    """The rows that a model's experts were sent since the counts were read. `of` makes one that watches a model."""

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


# Token layout at the boundary of an experts module, by tensor axes.
#
# | along tensor | the experts' features are whole | the experts' features are split |
# |---|---|---|
# | every rank has the same tokens | `split`, compute, `gather` | `copy`, compute, `reduce` |
# | every rank has its own (`sequence`) | compute | `gather_sum`, compute, `reduce_split` |
#
# The weights of the chosen experts go the same way as the tokens. They are applied, and the k results of a token
# summed, where the token is: rows travel without them.


def apply_experts_plan(model: nn.Module, plan: Plan, axes: ProcessMesh) -> Routing | None:
    """Wrap the experts that the plan names, and routers where something is asked of them; None without experts."""
    if not plan.experts:
        return None
    routing = Routing.of(model, plan)
    for name, experts in plan.experts.items():
        module = model.get_submodule(name)
        if experts.balanced:
            device = next(module.parameters()).device
            add_places(module, experts.count, len(experts.replicas), device)
        wrap(module, _Boundary(module, name, experts, axes[plan.mesh.tensor], axes["expert"], routing))
    return routing


@dataclass(frozen=True)
class _Boundary:
    """The wrapper of one experts module."""

    module: nn.Module
    name: str
    plan: ExpertsPlan
    tensor: Axis
    expert: Axis
    routing: Routing

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        hidden, ids, scores = inspect.signature(forward).bind(*args, **kwargs).args
        self.routing.count(self.name, ids)
        if not self.plan.taken_over:
            return forward(hidden, ids, scores)
        x, ids, scores = hidden.reshape(-1, hidden.size(-1)), ids.flatten(0, -2), scores.flatten(0, -2)
        tokens = x.size(0)
        x, ids, scores = self._enter(x, ids, scores)
        out = dispatch.compute(
            self.module, self._weights(), x, ids, self.expert, self.plan.count, self._places(x.device)
        )
        out = (out * scores.unsqueeze(-1)).sum(1).to(hidden.dtype)
        return self._leave(out, tokens).view(hidden.shape)

    @property
    def _crosses(self) -> bool:
        """Whether anything is done along the tensor axes: whole experts take the tokens of a rank as they are, unless
        other ranks have the same ones and there is an owner to send each to."""
        if self.tensor.size == 1:
            return False
        return self.plan.features or (self.expert.size > 1 and not self.plan.own_tokens)

    def _enter(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensor = self.tensor
        if not self._crosses:
            return x, ids, scores
        if not self.plan.features:
            return tensor.split(x, 0), tensor.split(ids, 0), tensor.split(scores, 0)
        if not self.plan.own_tokens:
            return tensor.copy(x), ids, tensor.copy(scores)
        return tensor.gather_sum(x, 0), tensor.gather(ids, 0), tensor.gather_sum(scores, 0)

    def _leave(self, out: torch.Tensor, tokens: int) -> torch.Tensor:
        tensor = self.tensor
        if not self._crosses:
            return out
        if not self.plan.features:
            return tensor.gather(out, 0, tokens)
        return tensor.reduce_split(out, 0) if self.plan.own_tokens else tensor.reduce(out)

    def _places(self, device: torch.device) -> Places | None:
        if self.plan.balanced:
            return Places.of(self.module)
        return Places.fixed(self.plan.count, self.plan.replicas, device)

    def _weights(self) -> dict[str, torch.Tensor]:
        """The parameters by name. Where results are summed over the tensor axes, only the first rank adds the bias: it
        is a term of each chosen expert's result, which the token's weight multiplies."""
        own = {name: weight for name, weight in self.module._parameters.items() if weight is not None}
        weights: dict[str, torch.Tensor] = dict(own)
        if not self.plan.features:
            return weights
        experts: Any = self.module
        if experts.has_gate and not is_concatenated(experts):
            # As many features as pairs of gate and up, padding included (`experts.plan`).
            pairs = weights["gate_up_proj"].size(2 if experts.is_transposed else 1) // 2
            weights["down_proj"] = _pad(weights["down_proj"], 1 if experts.is_transposed else 2, pairs)
        bias = weights.get("down_proj_bias")
        if bias is not None:
            tensor, device = self.tensor, bias.device
            first = per_rank(lambda rank: torch.tensor(tensor.index(rank) == 0, device=device))
            weights["down_proj_bias"] = bias.masked_fill(~first, 0)
        return weights
