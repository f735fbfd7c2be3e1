"""Makes the plan of a strategy for a model, with the rules that are inferred where a module has none.

A pure function of the model's structure and the Strategy: no process group, no values; the model may be on the
meta device. What cannot be right is refused here, with the reason, before anything is computed.
"""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import one_device
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.gather_positions import plan_gathered
from hyper_parallel.shard.context.plan import plan_context, with_context_folds
from hyper_parallel.shard.experts.plan import plan_experts
from hyper_parallel.shard.hooks import StandIn
from hyper_parallel.shard.lora_adapters import adapted_layers, refuse_other_adapters, without_adapters
from hyper_parallel.shard.model_structure import (
    Heads,
    features_of,
    fused_parts,
    has_encoder,
    heads_of,
    is_called_attention,
    is_norm,
    is_projection,
    is_transformers,
    layers_of,
)
from hyper_parallel.shard.plan.plan import Plan, PlanBuilder
from hyper_parallel.shard.tensor.factorization import with_digits
from hyper_parallel.shard.tensor.norm import width_of
from hyper_parallel.shard.tensor.plan_1d import plan_tensor
from hyper_parallel.shard.tensor.plan_2d import plan_tensor_2d
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


# Inferred rules: modules without a rule are classified before planning.
#
# Rules are inferred from a family's own plan and from names (`shard.rules`). This pass then decides two things for each
# attention or MLP, the modules with a first and a last projection:
#
# - What the weights between its projections see. A norm of one head's features is applied to split activations
#   (`shared`); one over the features of all heads, or of the whole MLP, has its statistics summed over ranks (`norm`).
# - Whether it can be split at all. A module that holds unknown weights (an indexer, a convolution), or mixes features
#   between its projections, stays whole on every rank, with a line in the log. If the user gave a rule inside it, that
#   rule is refused instead.

log = logging.getLogger(__name__)

_BETWEEN = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm|\w*sub_?norm")
"""Norms that are named after what lies between projections, not after the module that they stand before."""
_FEATURES, _ROWS = 16, 64


def infer_rules(draft: PlanBuilder) -> None:
    """Add the rules of weights between projections, and take away those of modules that cannot be split."""
    if not is_transformers(draft.model) or any(True for _ in adapted_layers(draft.model)):
        return
    if has_encoder(draft.model):
        return  # their pairs may lie in two modules; the planner says what lies between
    _settle_shared(draft)
    left: dict[str, str] = {}
    for parent in sorted(
        {name.rpartition(".")[0] for name, rule in draft.rules.items() if rule in ("colwise", "rowwise")}
    ):
        own = {name: rule for name, rule in draft.rules.items() if name.rpartition(".")[0] == parent}
        given = [name for name in draft.rules if name in draft.given and name.startswith(f"{parent}.")]
        if {"colwise", "rowwise"} <= set(own.values()):
            why = _settle(draft, parent)
        else:
            why = "its projections are no pair, one that splits features and one that sums them again"
            given = given or [name for name in own if name in draft.given]
        if why is None or (
            parent.rpartition(".")[0] == draft.layers and heads_of(draft.names[parent], draft.config) is None
        ):
            continue
        if given:
            continue  # the planner refuses it, by what the user gave
        for name in [name for name in draft.rules if name.startswith(f"{parent}.")]:
            del draft.rules[name]
        left.setdefault(f"{type(draft.names[parent]).__name__}: {why}", parent)
    _settle_shared(draft)
    for reason, parent in left.items():
        log.warning("axes.tensor leaves %r whole on every rank, and modules like it: %s", parent, reason)


def _settle_shared(draft: PlanBuilder) -> None:
    """What is applied to split activations is only where a module around it is split: elsewhere, where the user left
    its projections whole, gradients are whole on every rank already."""
    pairs = {
        kind: {name.rpartition(".")[0] for name, rule in draft.rules.items() if rule == kind}
        for kind in ("colwise", "rowwise")
    }
    both = pairs["colwise"] & pairs["rowwise"]
    for name, rule in list(draft.rules.items()):
        around = name.split(".")
        if rule in ("shared", "norm") and not any(".".join(around[:at]) in both for at in range(len(around))):
            if name in draft.given:
                raise StrategyError(
                    f"strategy.rules: {name!r} is {rule}, which is for what sees split activations, and no projections "
                    f"around it are split; give it replicate: {{{name!r}: replicate}}"
                )
            del draft.rules[name]


def _settle(draft: PlanBuilder, parent: str) -> str | None:
    """Why a module cannot be split; None where it can, with rules for all that is in it."""
    module = draft.names[parent]
    heads = heads_of(module, draft.config)
    found: dict[str, Any] = {}
    for child, leaf in module.named_modules(prefix=parent):
        own = {own: p for own, p in leaf._parameters.items() if p is not None}
        if child == parent:
            own = {name: p for name, p in own.items() if heads is None or tuple(p.shape) != (heads.query,)}
        if not own or child in draft.rules:
            continue
        rule = _rule_between(draft, parent, child, leaf, heads)
        if rule is None:
            return f"nothing is known of the weights {', '.join(own)} of {child.removeprefix(f'{parent}.')!r}"
        found[child] = rule
    sums = [name for name, rule in _projections(draft, parent) if rule == "rowwise"]
    if len(sums) > 1:
        return f"{' and '.join(sums)} both sum features again"
    if heads is None and is_called_attention(module):
        return "its heads are not recognised (known by a number head_dim on the module)"
    if heads is not None:
        strange = _strange_projection(draft, parent, heads)
        if strange is not None:
            return strange
    elif not found and _mixes(draft, parent):
        return "it mixes features between its projections"
    draft.rules.update(found)
    return None


def _rule_between(draft: PlanBuilder, parent: str, child: str, leaf: nn.Module, heads: Heads | None) -> Any:
    """The rule of weights between projections; None where it is not known."""
    own, last = [p for p in leaf._parameters.values() if p is not None], child.rpartition(".")[2]
    if heads is None and child != parent and all(p.numel() == 1 for p in own):
        return "shared"  # an activation function with numbers to learn
    width = width_of(leaf)
    if width is None or not is_norm(leaf) or not _BETWEEN.fullmatch(last):
        return None
    if heads is not None and width == heads.size:
        return "shared"
    size = draft.mesh.size(draft.mesh.tensor)
    if heads is not None and not heads.latent:
        query, pairs = heads.query * heads.size, heads.kv * heads.size
        # With fewer key-value heads than ranks, several ranks compute with the same one.
        even = width == query or (width == pairs and heads.kv % size == 0)
        return "norm" if even else None
    between = {
        features_of(draft.names[name], output=False)
        for name, rule in _projections(draft, parent)
        if rule == "rowwise"
    }
    return "norm" if between == {width} else None


def _strange_projection(draft: PlanBuilder, parent: str, heads: Heads) -> str | None:
    """Why the projections of an attention are not those of its heads."""
    for name, rule in _projections(draft, parent):
        features = features_of(draft.names[name], output=rule == "colwise")
        parts = fused_parts(name, features, draft.names[parent], heads) if rule == "colwise" else (features,)
        by_interface = getattr(without_adapters(draft.model), "_supports_attention_backend", False)
        if len(parts) > 1 and not by_interface:
            return f"only the attention's own code knows the order of what {name.removeprefix(f'{parent}.')!r} holds"
        counts = [part / heads.size for part in parts]
        by_latent = heads.latent and features % heads.query == 0
        if not by_latent and any(count not in (heads.query, heads.kv) for count in counts):
            return (
                f"{name.removeprefix(f'{parent}.')!r} has {features} features, neither {heads.query} query heads "
                f"nor {heads.kv} key-value heads of {heads.size}"
            )
    return None


def _projections(draft: PlanBuilder, parent: str) -> list[tuple[str, str]]:
    return [
        (name, rule)
        for name, rule in draft.rules.items()
        if name.rpartition(".")[0] == parent
        and rule in ("colwise", "rowwise")
        and is_projection(draft.names[name])
    ]


def _mixes(draft: PlanBuilder, parent: str) -> bool:
    """Whether an MLP's last projection sees other features when half of those of its first ones are others.

    Its own forward is tried, with a few random features in the place of what the first ones give. False where it cannot
    be run so.
    """
    projections = _projections(draft, parent)
    if len(projections) != len([n for n in draft.rules if n.rpartition(".")[0] == parent]):
        return False
    parts = {
        name: len(fused_parts(name, features_of(draft.names[name], output=True), draft.names[parent], None))
        for name, rule in projections
        if rule == "colwise"
    }
    rowwise = [name for name, rule in projections if rule == "rowwise"]
    if len(rowwise) != 1:
        return False
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, _ROWS, _FEATURES, generator=generator) for _ in range(count)]

    first = {name: draw(count) for name, count in parts.items()}
    half = _FEATURES // 2
    other = {
        name: [
            torch.cat([x[..., :half], y[..., half:]], -1)
            for x, y in zip(first[name], draw(count), strict=True)
        ]
        for name, count in parts.items()
    }
    try:
        with one_device(), torch.no_grad():
            seen = [_seen(draft.names[parent], parent, rowwise[0], given) for given in (first, other)]
    except Exception:  # whatever the module's own code raises: it wants more than projections
        return False
    if any(x.shape != (1, _ROWS, _FEATURES) for x in seen):
        return False
    return not torch.equal(seen[0][..., :half], seen[1][..., :half])


def _seen(module: nn.Module, parent: str, rowwise: str, given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """The input of the last projection when the first ones return what is given."""
    kept, modes = dict(module._modules), {part: part.training for part in module.modules()}
    stub = StandIn(torch.zeros(1, _ROWS, _FEATURES))
    try:
        for name, parts in given.items():
            module._modules[name.removeprefix(f"{parent}.")] = StandIn(torch.cat(parts, -1))
        module._modules[rowwise.removeprefix(f"{parent}.")] = stub
        probe = copy.copy(module)
        probe._modules = dict(module._modules)
        probe.eval()
    finally:
        module._modules.clear()
        module._modules.update(kept)
    try:
        probe(torch.zeros(1, _ROWS, _FEATURES))
    finally:
        for part, mode in modes.items():  # the probe shares its children with the module
            part.training = mode
    seen: torch.Tensor = stub.seen
    return seen
