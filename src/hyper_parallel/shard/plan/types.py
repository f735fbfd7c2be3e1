"""Types of a sharding plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.plan import ContextPlan
from hyper_parallel.shard.model_structure import Heads
from hyper_parallel.shard.tensor2d.norm import Formula
from hyper_parallel.shard.tensor2d.types import Tensor2D
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
    """What is done to a model. Names are those of ``named_modules`` and ``named_parameters``."""

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
