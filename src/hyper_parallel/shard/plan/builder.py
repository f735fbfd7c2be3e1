"""Builder of a sharding plan, to which each axis adds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.plan import ContextPlan
from hyper_parallel.shard.model_structure import text_config
from hyper_parallel.shard.plan.types import ExpertsPlan, Intervals, ModulePlan, ParameterPlan, Plan, Region
from hyper_parallel.shard.rules import resolve
from hyper_parallel.shard.tensor2d.types import Tensor2D
from hyper_parallel.strategy import Strategy

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
        self.known = {id(p): name for name, p in model.named_parameters()}
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
        made = ParameterPlan(name, layout, storage or self.mesh.storage, summed, chosen)
        if name in self._set_by and made != self.parameters[name]:
            raise StrategyError(
                f"{module_name!r} and {self._set_by[name]!r} share the weight {name!r}, but their rules differ "
                f"({made.layout} and {self.parameters[name].layout}); give both the same split in strategy.rules"
            )
        self.parameters[name] = made
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
            if _is_in(module, name):
                self.set_again(module, own)
                self.by_position.discard((module, own))
        for region in self.regions:
            if _is_in(region, name):
                self.regions[region] = replace(self.regions[region], enters="copy", keeps=True)
        for child, plan in self.modules.items():
            if _is_in(child, name):
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


def _is_in(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")
