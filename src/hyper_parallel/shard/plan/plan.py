"""Sharding plan of a model: what each axis does to its modules and parameters, and the builder to which each axis adds.

A plan also says which row lengths it can split (`length_multiple`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.plan import ContextPlan, multiple_over_context
from hyper_parallel.shard.model_structure import Heads, is_inside, names_of_parameters, text_config
from hyper_parallel.shard.rules import resolve
from hyper_parallel.shard.tensor.factorization import Tensor2D
from hyper_parallel.shard.tensor.norm import Formula
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.strategy import RuleName

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: where it lies and what happens between the stored and the computed tensor."""

    name: str
    layout: Layout
    """How it is stored, the split of its storage included."""
    storage: str
    """The axis, joint or fold over which its storage is split: innermost of its dim, gathered before use."""
    summed: tuple[str, ...] = ()
    """Axes whose ranks contribute different terms to its gradient, which are summed."""
    chosen: tuple[int, tuple[Intervals, ...]] | None = None
    """(dim, intervals by tensor index): computed with only these rows of a tensor that is stored whole, because
    there are fewer heads than ranks."""

    @property
    def storage_dim(self) -> int | None:
        """The dim along which the storage is split; None when every rank stores the whole."""
        return next((dim for dim, axes in enumerate(self.layout.dims) if self.storage in axes), None)

    @property
    def computed(self) -> Layout:
        """The layout of what is gathered over the storage axis."""
        return self.layout if self.storage_dim is None else self.layout.without(self.storage)


@dataclass(frozen=True)
class ModulePlan:
    """One module that the tensor axis touches: how its input arrives and its output leaves."""

    rule: RuleName
    enters: str = "as it is"
    """`copy`, `gather` (from a split sequence) or `as it is`."""
    leaves: str = "as it is"
    """`reduce`, `reduce_split` (to a split sequence), `gather` or `as it is`."""
    features: int = 0
    """Length of the dim that `leaves: gather` gathers, or that a `norm` normalises."""
    formula: Formula | None = None
    """How a `norm` is computed."""
    pair: str = ""
    """The module in which a colwise or rowwise projection has its counterparts."""


@dataclass(frozen=True)
class Region:
    """An attention or MLP whose projections are split: activations enter once, at the module's own input."""

    heads: Heads | None
    enters: str
    """`copy`, `gather` (from a split sequence), or `as it is`: they enter at each projection."""
    keeps: bool = True
    """What enters gathered is kept for the backward pass; otherwise it is gathered again."""


@dataclass(frozen=True)
class ExpertsPlan:
    """The experts of one layer: where they compute, and how tokens get there."""

    rule: RuleName
    count: int
    """The number of experts, over all ranks."""
    taken_over: bool
    """Computed by this package; on one device the model's own code does."""
    features: bool
    """Each expert's features are split over the tensor axes."""
    own_tokens: bool
    """Ranks of the tensor axes come with different tokens, not with the same ones."""
    replicas: tuple[int, ...] = ()
    """Experts whose weights every rank of the expert axis gets, and whose tokens stay; where `balanced`, the first
    ones."""
    balanced: bool = False
    """Experts are placed on ranks, and have replicas, by their loads (`shard.experts.placement`)."""


@dataclass(frozen=True)
class Plan:
    """The changes to a model. Names are those of ``named_modules`` and ``named_parameters``."""

    mesh: Mesh
    parameters: Mapping[str, ParameterPlan]
    modules: Mapping[str, ModulePlan] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    layers: str | None = None
    """The name of the list of decoder layers."""
    experts: Mapping[str, ExpertsPlan] = field(default_factory=dict)
    sequence: bool = False
    """Activations between the layers' regions are split along the sequence."""
    whole: tuple[str, ...] = ()
    """Modules inside of layers, or layers, that may mix positions in a way of their own: where the sequence is split
    they are given all positions, and compute alike on every rank of the tensor axes."""
    tensor2d: Tensor2D | None = None
    """Where tensor_y is above 1: the regions that compute in two dims, and what lies between them."""
    context: ContextPlan | None = None
    """Where context is above 1: how positions are split."""

    def layouts(self) -> dict[str, Layout]:
        """Parameter name to Layout."""
        return {name: plan.layout for name, plan in self.parameters.items()}


def length_multiple(plan: Plan) -> int:
    """The number that the positions of a row must be a multiple of."""
    multiple = (
        multiple_over_context(plan.context.ring, plan.context.ulysses) if plan.context is not None else 1
    )
    if plan.sequence:
        multiple = math.lcm(multiple, plan.mesh.size("context") * plan.mesh.size(plan.mesh.tensor))
    return multiple


def check_length(plan: Plan, length: int) -> None:
    """Raise StrategyError when rows of `length` positions cannot be split evenly over context and tensor."""
    multiple = length_multiple(plan)
    if length % multiple:
        context, tensor = plan.mesh.size("context"), plan.mesh.size(plan.mesh.tensor)
        split = [f"context {context}"] if context > 1 else []
        split += [f"tensor {tensor} (the sequence)"] if plan.sequence else []
        raise StrategyError(
            f"rows of {length} positions cannot be split evenly over {' and '.join(split)}; "
            f"use a multiple of {multiple}"
        )


Split = tuple[int, str, tuple[int, ...] | None]
"""(dim, axis, lengths of the fused parts that the axis splits one by one)."""


class PlanBuilder:
    """The model with its names and rules, and what has been decided so far."""

    def __init__(self, model: nn.Module, strategy: Strategy, mesh: Mesh, layers: str | None) -> None:
        self.model, self.strategy, self.mesh, self.layers = model, strategy, mesh, layers
        self.rules, self.given = resolve(model, strategy.rules, tensor=mesh.size(mesh.tensor))
        self.config = text_config(model)
        self.names = dict(model.named_modules())
        # A tied parameter has one name in named_parameters; every owner's plan must agree on it.
        self.known = names_of_parameters(model)
        self.parameters = {
            name: ParameterPlan(name, Layout.replicated(mesh, tuple(p.shape)), mesh.storage)
            for name, p in model.named_parameters()
        }
        self.modules: dict[str, ModulePlan] = {}
        self.regions: dict[str, Region] = {}
        self.experts: dict[str, ExpertsPlan] = {}
        self.pointwise: set[str] = set()
        """Modules without a rule that are known to see one position at a time."""
        self.sequence = False
        self.by_position: set[tuple[str, str]] = set()
        """(module, own name) of weights whose gradients are summed because ranks compute with other positions."""
        self.whole: list[str] = []
        """Modules inside of layers that are given all positions where the sequence is split."""
        self.tensor2d: Tensor2D | None = None
        self.context: ContextPlan | None = None
        self._set_by: dict[str, str] = {}
        self._storage_dims: dict[str, int] = {}

    def set(
        self,
        module_name: str,
        own: str,
        *,
        split: Iterable[Split] = (),
        summed: tuple[str, ...] = (),
        chosen: tuple[int, tuple[Intervals, ...]] | None = None,
        storage: str | None = None,
        storage_dim: int = 0,
    ) -> None:
        """Decide on one parameter of a module. Raises StrategyError when a module that shares it decided otherwise."""
        parameter = self.names[module_name]._parameters[own]
        if parameter is None:
            return
        name = self.known[id(parameter)]
        layout = Layout.replicated(self.mesh, tuple(parameter.shape))
        for dim, axis, parts in split:
            layout = layout.split(dim, axis, parts)
        planned = ParameterPlan(name, layout, storage or self.mesh.storage, summed, chosen)
        if name in self._set_by and planned != self.parameters[name]:
            raise StrategyError(
                f"{module_name!r} and {self._set_by[name]!r} share the weight {name!r}, but their rules differ "
                f"({planned.layout} and {self.parameters[name].layout}); give both the same split in strategy.rules"
            )
        self.parameters[name] = planned
        self._set_by[name] = module_name
        self._storage_dims[name] = storage_dim

    def set_again(self, module_name: str, own: str, **decision: Any) -> None:
        """Like `set`, for a planner that refines what an earlier one decided of a parameter that is not shared."""
        parameter = self.names[module_name]._parameters[own]
        if parameter is not None:
            self._set_by.pop(self.known[id(parameter)], None)
            self.set(module_name, own, **decision)

    def give_all_positions(self, name: str) -> None:
        """A module inside of the layers, or a layer, sees whole sequences, on every rank the same: inside, all is as if
        the sequence was not split."""
        self.whole.append(name)
        for module, own in sorted(self.by_position):
            if is_inside(module, name):
                self.set_again(module, own)
                self.by_position.discard((module, own))
        for region in self.regions:
            if is_inside(region, name):
                self.regions[region] = replace(self.regions[region], enters="copy", keeps=True)
        for child, plan in self.modules.items():
            if is_inside(child, name):
                enters = "copy" if plan.enters == "gather" else plan.enters
                leaves = "reduce" if plan.leaves == "reduce_split" else plan.leaves
                self.modules[child] = replace(plan, enters=enters, leaves=leaves)

    def is_tied(self, module_name: str) -> bool:
        """Whether another module has a weight of this one too."""
        mine = {id(p) for p in self.names[module_name]._parameters.values() if p is not None}
        return any(
            id(p) in mine
            for name, module in self.names.items()
            if name != module_name
            for p in module._parameters.values()
        )

    def finished(self) -> Plan:
        """The plan, with the storage of every parameter split inside what already splits it; scalars, and what has
        no elements, stay whole."""
        parameters = {
            name: ParameterPlan(
                name,
                plan.layout.split(self._storage_dims.get(name, 0), plan.storage)
                if math.prod(plan.layout.shape) and plan.layout.shape
                else plan.layout,
                plan.storage,
                plan.summed,
                plan.chosen,
            )
            for name, plan in self.parameters.items()
        }
        return Plan(
            self.mesh,
            parameters,
            self.modules,
            self.regions,
            self.layers,
            self.experts,
            self.sequence,
            tuple(self.whole),
            self.tensor2d,
            self.context,
        )
