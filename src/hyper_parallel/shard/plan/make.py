"""The plan of a strategy for a model.

A pure function of the model's structure and the Strategy: no process group, no values; the model may be on the
meta device. What cannot be right is refused here, with the reason, before anything is computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.gather_positions import plan_gathered
from hyper_parallel.shard.context.plan import plan_context, with_context_folds
from hyper_parallel.shard.experts.plan import plan_experts
from hyper_parallel.shard.lora_adapters import refuse_other_adapters
from hyper_parallel.shard.model_structure import layers_of
from hyper_parallel.shard.plan.builder import PlanBuilder
from hyper_parallel.shard.plan.inferred_rules import infer_rules
from hyper_parallel.shard.plan.tensor1d import plan_tensor
from hyper_parallel.shard.plan.types import Plan
from hyper_parallel.shard.tensor2d.plan import plan_tensor_2d
from hyper_parallel.shard.tensor2d.types import with_digits
from hyper_parallel.strategy import Strategy


def make_plan(model: nn.Module, strategy: Strategy) -> Plan:
    """The plan of a strategy for a model. Raises StrategyError with the reason when there is no right one."""
    context = plan_context(model, strategy)
    mesh = with_context_folds(with_digits(Mesh.of(strategy)), context)
    _check_parameters(model, mesh, strategy.precision.param)
    refuse_other_adapters(model, split=mesh.size(mesh.tensor) > 1)
    found = layers_of(model)
    draft = PlanBuilder(model, strategy, mesh, layers=found[0] if found else None)
    draft.context = context
    plan_experts(draft)
    if mesh.size(mesh.tensor) > 1:
        infer_rules(draft)
        plan_tensor(draft)
        if mesh.size("tensor_y") > 1:
            plan_tensor_2d(draft)
    elif strategy.sequence:
        raise StrategyError(
            "sequence: true splits activations over the tensor axis, which has degree 1; "
            "set axes.tensor or leave sequence out"
        )
    if context is not None and context.method == "gathered":
        draft.context = replace(context, gathered=plan_gathered(draft, context))
    if strategy.memory.gathered != "keep" and not draft.sequence:
        raise StrategyError(
            f"memory.gathered: {strategy.memory.gathered} is for inputs gathered from a split sequence; "
            "set sequence: true or axes.tensor_y, or leave it out"
        )
    return draft.finished()


def _check_parameters(model: nn.Module, mesh: Mesh, precision: str) -> None:
    data = mesh.size("replicate") * mesh.size(mesh.storage)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise StrategyError(
                f"the parameter {name!r} is {parameter.dtype}; only floating-point ones can be trained"
            )
        if parameter.dtype == torch.float64 != torch.get_default_dtype():
            raise StrategyError(
                f"the parameter {name!r} is torch.float64, which strategy.precision.param would round to "
                f"{precision}; convert the model first: model.to(torch.{precision})"
            )
        if parameter.dim() == 0 and data > 1:
            raise StrategyError(
                f"the parameter {name!r} has no dims and cannot be spread over the data axes; give it one"
            )
