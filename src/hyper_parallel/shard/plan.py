"""The plan: for every module and parameter of a model, what the tensor axis does to it.

A pure function of the model's structure and the Strategy: no process group, no values; the model may be on the
meta device. What cannot be right is refused here, with the reason, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout, chunk
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.rules import is_transformers, resolve
from hyper_parallel.shard.structure import (
    Heads,
    dim_of_features,
    fused_parts,
    heads_of,
    is_conv1d,
    layers_of,
    layers_or_refuse,
    text_config,
)
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.strategy import RuleName

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: where it lies and what happens between the stored and the computed tensor."""

    name: str
    layout: Layout
    """How it is stored, `shard` included."""
    summed: bool = False
    """Ranks of the tensor axis contribute different terms to its gradient, which are summed."""
    chosen: tuple[int, tuple[Intervals, ...]] | None = None
    """(dim, intervals by tensor index): computed with only these rows of a tensor that is stored whole, because
    there are fewer heads than ranks."""


@dataclass(frozen=True)
class ModulePlan:
    """One module that the tensor axis touches: how its input arrives and its output leaves."""

    rule: RuleName
    enters: str = "as it is"
    """`copy`, `gather` (from a split sequence) or `as it is`."""
    leaves: str = "as it is"
    """`reduce`, `reduce_split` (to a split sequence), `gather` or `as it is`."""
    features: int = 0
    """Length of the dim that `leaves: gather` gathers."""


@dataclass(frozen=True)
class Region:
    """An attention or MLP whose projections are split: activations enter once, at the module's own input."""

    heads: Heads | None
    enters: str


@dataclass(frozen=True)
class Plan:
    """What is done to a model. Names are those of ``named_modules`` and ``named_parameters``."""

    mesh: Mesh
    parameters: Mapping[str, ParameterPlan]
    modules: Mapping[str, ModulePlan] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    layers: str | None = None
    """The name of the list of decoder layers."""
    sequence: bool = False
    """Activations between the layers' regions are split along the sequence."""

    def layouts(self) -> dict[str, Layout]:
        """Parameter name to Layout."""
        return {name: plan.layout for name, plan in self.parameters.items()}


def make_plan(model: nn.Module, strategy: Strategy) -> Plan:
    """The plan of a strategy for a model. Raises StrategyError with the reason when there is no right one."""
    mesh = Mesh.of(strategy)
    found = layers_of(model)
    layers = found[0] if found else None
    plan = Plan(mesh, {}, layers=layers)
    rules, given = resolve(model, strategy.rules)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise StrategyError(
                f"the parameter {name!r} is {parameter.dtype}; only floating-point ones can be trained"
            )
        if parameter.dim() == 0 and strategy.axes.data > 1:
            raise StrategyError(
                f"the parameter {name!r} has no dims and cannot be spread over the data axes; give it one"
            )
    parameters = {
        name: ParameterPlan(name, Layout.replicated(mesh, tuple(p.shape)))
        for name, p in model.named_parameters()
    }
    if mesh.size("tensor") > 1:
        plan = _TensorPlanner(model, mesh, rules, given, strategy.sequence, parameters).plan(layers)
        parameters = dict(plan.parameters)
    elif strategy.sequence:
        raise StrategyError(
            "sequence: true splits activations over the tensor axis, which has degree 1; "
            "set axes.tensor or leave sequence out"
        )
    return replace(
        plan, parameters={name: replace(p, layout=_sharded(p.layout)) for name, p in parameters.items()}
    )


def _sharded(layout: Layout) -> Layout:
    """`layout` with dim 0 split by the shard axis, inside what already splits it; scalars stay whole."""
    return layout.split(0, "shard") if layout.shape else layout


class _TensorPlanner:
    """Makes the plan of the tensor axis, module by module."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        rules: Mapping[str, RuleName],
        given: frozenset[str],
        sequence: bool,
        parameters: dict[str, ParameterPlan],
    ) -> None:
        self.model, self.mesh, self.rules, self.given, self.sequence = model, mesh, rules, given, sequence
        self.size = mesh.size("tensor")
        self.config = text_config(model)
        self.names = dict(model.named_modules())
        self.parameters = parameters
        # A tied parameter has one name in named_parameters; every owner's plan must agree on it.
        self.known = {id(p): n for n, p in model.named_parameters()}
        self.set_by: dict[str, str] = {}
        self.modules: dict[str, ModulePlan] = {}
        self.regions: dict[str, Region] = {}

    def plan(self, layers: str | None) -> Plan:
        if not self.rules:
            raise StrategyError(
                f"axes.tensor is {self.size}, but no rule says how {type(self.model).__name__} is split; "
                "give strategy.rules, for example {'*.up': colwise, '*.down': rowwise}"
            )
        if self.sequence:
            if not is_transformers(self.model):
                raise StrategyError("sequence: true is understood for Transformers models only; leave it out")
            layers, _ = layers_or_refuse(self.model, "sequence: true")
        self._check_partners()
        self._find_regions()
        for name, rule in self.rules.items():
            self._module(name, self.names[name], rule)
        if self.sequence:
            assert layers is not None
            self._sequence(layers)
        self._check_ties()
        return Plan(self.mesh, self.parameters, self.modules, self.regions, layers, self.sequence)

    def _check_ties(self) -> None:
        """Every module that owns a split weight must know that it is split."""
        for name, module in self.names.items():
            for own, parameter in module._parameters.items():
                if parameter is None or name in self.modules:
                    continue
                tied = self.parameters[self.known[id(parameter)]]
                if "tensor" in tied.layout.split_axes:
                    raise StrategyError(
                        f"'{name}.{own}' is tied to {tied.name!r}, which is split as {tied.layout}; "
                        f"give {name!r} a rule in strategy.rules that splits it the same way"
                    )

    # Which modules belong together.

    def _siblings(self, name: str) -> Iterator[tuple[str, RuleName]]:
        parent = name.rpartition(".")[0]
        return ((n, r) for n, r in self.rules.items() if n.rpartition(".")[0] == parent)

    def _check_partners(self) -> None:
        for name, rule in self.rules.items():
            partner = {"colwise": "rowwise", "rowwise": "colwise"}.get(rule)
            if partner and not any(r == partner for _, r in self._siblings(name)):
                other = (
                    "its output would stay split; use colwise_gather"
                    if rule == "colwise"
                    else "its input is not split"
                )
                raise StrategyError(
                    f"{name!r} is {rule}, but nothing beside it is {partner}: {other}, or replicate"
                )

    def _find_regions(self) -> None:
        """Attention and MLP modules of Transformers models, whose input feeds their projections alone."""
        if not is_transformers(self.model):
            return
        for name, rule in self.rules.items():
            if rule != "rowwise":
                continue
            parent = name.rpartition(".")[0]
            module = self.names[parent]
            for child, leaf in module.named_modules(prefix=parent):
                own = [p for p, value in leaf._parameters.items() if value is not None]
                if own and child not in self.rules:
                    raise StrategyError(
                        f"the weights {own} of {child!r} lie between split projections and no rule says what they see; "
                        "give strategy.rules: shared if they are applied to split activations, replicate if not"
                    )
            self.regions[parent] = Region(
                heads_of(module, self.config), "gather" if self.sequence else "copy"
            )

    # One module.

    def _module(self, name: str, module: nn.Module, rule: RuleName) -> None:
        if rule == "replicate":
            return
        if rule == "shared":
            for own in module._parameters:
                self._set(name, module, own, summed=True)
            return
        if rule == "vocab":
            self._vocabulary(name, module)
            return
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; the rule {rule!r} splits nn.Linear and Conv1D only"
            )
        if rule == "rowwise":
            self._rowwise(name, module)
        else:
            self._colwise(name, module, rule)

    def _colwise(self, name: str, module: nn.Module, rule: RuleName) -> None:
        parent = name.rpartition(".")[0]
        region = self.regions.get(parent)
        dim = dim_of_features(module, output=True)
        weight = module._parameters["weight"]
        assert weight is not None
        features = int(weight.shape[dim])
        inside = region is not None and rule == "colwise"
        heads = region.heads if region is not None and inside else None
        parts = fused_parts(name, features, self.names[parent], heads) if inside else (features,)
        intervals = self._by_head(name, parts, heads) if heads is not None else None
        for own, d in (("weight", dim), ("bias", 0)):
            if module._parameters.get(own) is None:
                continue
            if intervals is not None:
                self._set(name, module, own, summed=True, chosen=(d, intervals))
            else:
                self._set(name, module, own, split=(d, parts))
        self.modules[name] = ModulePlan(
            rule,
            enters="as it is" if inside else "copy",
            leaves="gather" if rule == "colwise_gather" else "as it is",
            features=features,
        )

    def _by_head(self, name: str, parts: tuple[int, ...], heads: Heads) -> tuple[Intervals, ...] | None:
        """None when the tensor axis splits every part by whole heads; else what each rank computes with.

        With fewer key-value heads than ranks, a rank takes the head that its query heads attend with, and the
        projection is stored whole (on each rank of the tensor axis).
        """
        counts = [length / heads.size for length in parts]
        if any(count not in (heads.query, heads.kv) for count in counts):
            raise StrategyError(
                f"{name!r} has {sum(parts)} output features, which is neither {heads.query} query heads nor "
                f"{heads.kv} key-value heads of {heads.size}; give strategy.rules for it"
            )
        if heads.query % self.size:
            raise StrategyError(
                f"{name!r}: {heads.query} attention heads cannot be split over axes.tensor = {self.size}; use a divisor"
            )
        if heads.kv % self.size == 0:
            return None
        if self.size % heads.kv:
            raise StrategyError(
                f"{name!r}: {heads.kv} key-value heads over axes.tensor = {self.size}: one must divide the other; "
                f"use a divisor of {heads.kv}, or a multiple of it that divides {heads.query}"
            )
        if len(parts) == 1 and counts[0] == heads.query:
            return None
        return tuple(self._heads_of_rank(parts, heads, index) for index in range(self.size))

    def _heads_of_rank(self, parts: tuple[int, ...], heads: Heads, index: int) -> Intervals:
        chosen, at = [], 0
        for part, length in enumerate(parts):
            is_query = len(parts) > 1 and part == 0
            if is_query:
                start, stop = chunk(length, self.size, index)
            else:
                start = index * heads.kv // self.size * heads.size
                stop = start + heads.size
            chosen.append((at + start, at + stop))
            at += length
        return tuple(chosen)

    def _rowwise(self, name: str, module: nn.Module) -> None:
        self._set(name, module, "weight", split=(dim_of_features(module, output=False), None))
        self.modules[name] = ModulePlan("rowwise", leaves="reduce_split" if self.sequence else "reduce")

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; the rule 'vocab' splits nn.Embedding only"
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise StrategyError(
                f"{name!r}: max_norm, sparse and scale_grad_by_freq need the whole embedding; "
                "give it the rule replicate"
            )
        self._set(name, module, "weight", split=(0, None))
        self.modules[name] = ModulePlan("vocab", leaves="reduce")

    # Activations split along the sequence between regions.

    def _sequence(self, layers: str) -> None:
        inside = f"{layers}."
        for name, module in self.names.items():
            if not name.startswith(inside):
                continue
            if heads_of(module, self.config) is not None and name not in self.regions:
                raise StrategyError(
                    f"sequence: true needs every attention split over the tensor axis, and {name!r} is not"
                )
            rule, norm = self.rules.get(name), "norm" in type(module).__name__.lower()
            if rule is None and not norm and any(p is not None for p in module._parameters.values()):
                raise StrategyError(
                    f"sequence: true needs every module of a layer to be a split projection or a norm, which see one "
                    f"position at a time; {name!r} ({type(module).__name__}) may mix positions"
                )
            for own in module._parameters:
                whole = rule not in ("colwise", "colwise_gather", "vocab", "shared") and not (
                    rule == "rowwise" and own == "weight"
                )
                if whole:
                    self._set(name, module, own, summed=True)

    # One parameter.

    def _set(
        self,
        module_name: str,
        module: nn.Module,
        own: str,
        *,
        split: tuple[int, tuple[int, ...] | None] | None = None,
        summed: bool = False,
        chosen: tuple[int, tuple[Intervals, ...]] | None = None,
    ) -> None:
        parameter = module._parameters[own]
        if parameter is None:
            return
        name = self.known[id(parameter)]
        layout = Layout.replicated(self.mesh, tuple(parameter.shape))
        if split is not None:
            layout = layout.split(split[0], "tensor", split[1])
        made = ParameterPlan(name, layout, summed, chosen)
        if name in self.set_by and made != self.parameters[name]:
            raise StrategyError(
                f"{module_name!r} and {self.set_by[name]!r} share the weight {name!r}, but their rules differ "
                f"({made.layout} and {self.parameters[name].layout}); give both the same split in strategy.rules"
            )
        self.parameters[name] = made
        self.set_by[name] = module_name
