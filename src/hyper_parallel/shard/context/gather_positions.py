"""Context parallelism by gathering positions, for modules that mix positions in their own way.

An attention in a model's own code, a recurrence, a convolution: how they mix positions is not known, so they compute
with whole sequences on every rank, with the masks and positions that the model itself makes. What is known to see one
position at a time, the norms, MLPs and experts of the layers, and the head with the loss, computes with this rank's
positions. Between, activations [B, S / n, h] are gathered and cut:

    cut        this rank's positions          backward: zeros elsewhere, the ranks' parts are summed
    gather     the positions of all ranks     backward: the sum of what the ranks have of it (reduce-scatter)

As everywhere over the context axis, a rank has its positions' part of a weight's gradient, and the parts are summed.
Where the tensor axes split the sequence, the context axis splits what a rank has of it once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.context.model_inputs import ContextRoot, by_name, refuse_caches
from hyper_parallel.shard.context.plan import ContextPlan, PositionSplit, mixing
from hyper_parallel.shard.experts.plan import is_experts
from hyper_parallel.shard.hooks import Forward, all_positions, at_edges, wrap
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import (
    heads_of,
    is_called_attention,
    is_norm,
    layers_or_refuse,
    owns_parameters,
)
from hyper_parallel.shard.plan.plan import PlanBuilder

log = logging.getLogger(__name__)

_DIM = 1


def plan_gathered(draft: PlanBuilder, plan: ContextPlan) -> tuple[str, ...]:
    """The modules inside of layers that are given all positions, or layers as a whole; all others are known to see one
    position at a time."""
    layers, _ = layers_or_refuse(draft.model, "axes.context")
    if not layers.startswith(f"{plan.decoder}." if plan.decoder else ""):
        raise StrategyError(
            f"axes.context: the layers {layers!r} lie outside of the decoder; set axes.context to 1"
        )
    found: list[str] = []
    for index, layer in draft.names[layers].named_children():
        name = f"{layers}.{index}"
        children = [f"{name}.{child}" for child, _ in layer.named_children()]
        inline = [child for child in children if not list(draft.names[child].children())]
        if owns_parameters(layer) or not all(_apart(draft, child) for child in inline):
            found.append(name)
        else:
            found += [child for child in children if not _apart(draft, child)]
    kinds = sorted({type(draft.names[name]).__name__ for name in found})
    log.warning(
        "axes.context: %s; on every rank of the axis all positions go through %s, and only what is beside is split",
        plan.why,
        ", ".join(kinds),
    )
    return tuple(found)


def _apart(draft: PlanBuilder, name: str) -> bool:
    """Whether a module is known to see one position at a time: a norm, a split projection, an MLP, or experts with what
    is beside them."""
    module = draft.names[name]
    if not any(True for _ in module.parameters()) or name in draft.rules:
        return True
    if not list(module.children()):
        return is_norm(module)
    inner = dict(module.named_modules(prefix=name))
    if any(is_called_attention(m) or heads_of(m, draft.config) is not None for m in inner.values()):
        return False
    if any(True for _ in mixing(module)):
        return False
    if any(is_experts(m) for m in inner.values()):
        return True
    rules = {draft.rules.get(f"{name}.{child}") for child, _ in module.named_children()}
    own = [m for n, m in inner.items() if owns_parameters(m) and n not in draft.rules]
    return {"colwise", "rowwise"} <= rules and all(map(is_norm, own))


@dataclass(frozen=True)
class _Inner(PositionSplit):
    """Split of positions in which the tensor axes cut `outer` runs and the context axis splits each run."""

    outer: int = 1

    def positions(self, length: int, index: int) -> Tensor:
        """int64[length / size]: the global positions that an index of the axis holds, in order."""
        run = length // self.outer
        part = run // self.context.size
        starts = [at * run + index * part for at in range(self.outer)]
        return torch.cat([torch.arange(start, start + part) for start in starts])


class GatheredRoot(ContextRoot):
    """The wrappers of the decoder, which sees whole rows, and of the whole model, whose head and loss do not."""

    def __init__(
        self,
        model: nn.Module,
        plan: ContextPlan,
        split: PositionSplit,
        ring: Axis,
        outer: Callable[[str], int],
    ) -> None:
        """`outer`: over how many ranks the tensor axes split positions where a module stands."""
        super().__init__(model, plan, split, ring)
        self._outer = outer

    def positions_at(self, name: str) -> PositionSplit | None:
        """Inside of the decoder positions are split between those modules of the layers that are given all of them."""
        layers, decoder = self._plan.layers, self._plan.decoder
        if name.startswith(f"{layers}."):
            whole = any(name.startswith(f"{gathered}.") for gathered in self._plan.gathered)
            return None if whole else _Inner(self.split.context, self.split.ulysses, self._outer(name))
        inside = name.startswith(f"{decoder}." if decoder else "")
        return None if inside else super().positions_at(name)

    def around_decoder(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The wrapper of the decoder: whole rows in, this rank's positions out."""
        kwargs = by_name(args, kwargs)
        refuse_caches(kwargs)
        if kwargs.get("output_hidden_states"):
            raise StrategyError(
                "with axes.context this model's layers hold parts of the positions; leave output_hidden_states out"
            )
        output = forward(**{**kwargs, "use_cache": False})
        if isinstance(output, Tensor):
            return self.cut(output)
        if isinstance(output, tuple):
            return (self.cut(output[0]), *output[1:])
        output["last_hidden_state"] = self.cut(output["last_hidden_state"])
        return output


def apply_gathered(
    model: nn.Module, plan: ContextPlan, axes: Mapping[str, Axis], outer: Callable[[str], int]
) -> GatheredRoot:
    """Give positions to each module as the plan says. After what the tensor axes put around modules: what they split of
    the sequence is split once more."""
    split = PositionSplit(axes["context"], plan.ulysses)
    for name in plan.gathered:
        wrap(model.get_submodule(name), all_positions(lambda x: _gather(x, split), lambda x: _cut(x, split)))
    at_edges(model.get_submodule(plan.layers), lambda x: _cut(x, split), lambda x: _gather(x, split))
    root = GatheredRoot(model, plan, split, axes["context"], outer)
    wrap(model.get_submodule(plan.decoder), root.around_decoder)
    return root


def _cut(x: Tensor, split: PositionSplit) -> Tensor:
    if x.dim() != 3:
        raise StrategyError(
            f"axes.context expects activations [batch, sequence, features] between layers; they have {x.dim()} dims; "
            "set axes.context to 1 for this model"
        )
    return split.cut(x, _DIM)


def _gather(x: Tensor, split: PositionSplit) -> Tensor:
    return split.context.gather_sum(x, _DIM)
