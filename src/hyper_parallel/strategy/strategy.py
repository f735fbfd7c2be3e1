"""The Strategy: everything that says how a model is spread, and nothing about the model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.strategy.axes import Axes
from hyper_parallel.strategy.context import Context
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.strategy.overlap import Overlap
from hyper_parallel.strategy.placement import Placement
from hyper_parallel.strategy.precision import Precision
from hyper_parallel.strategy.section import Section

RuleName = Literal[
    "colwise", "colwise_gather", "rowwise", "vocab", "shared", "replicate", "expert", "expert_tensor"
]
"""What a rule may say of a module's weights under the `tensor` axis:

- `colwise`: output features are split; the output stays split.
- `colwise_gather`: output features are split; the output is gathered.
- `rowwise`: input features are split; the output is summed over the axis.
- `vocab`: an embedding's rows are split; the output is summed over the axis.
- `shared`: kept whole, and applied to what `colwise` modules split (a norm of each head): gradients are summed.
- `replicate`: kept whole on each rank of the axis, and applied to what is whole.

and, of the experts of a mixture-of-experts layer:

- `expert`: experts are spread over the `expert` axis, tokens travel to them. The default where that is above 1.
- `expert_tensor`: each expert's features are split over the tensor axes. The default where `expert` is 1. With
  `expert` above 1 both are done: `expert` then folds over shard and context only.
"""


class Strategy(Section):
    """How a model is spread over devices and computed; a file that can be kept, compared and replayed.

    >>> Strategy(axes={"shard": 2, "tensor": 2}, sequence=True).axes.world
    4
    """

    reserved: ClassVar = {
        "pipeline": "pipeline parallelism comes with HyperMPMD",
        "submodels": "running submodels side by side comes with HyperMPMD",
    }

    version: Literal[1] = 1
    """The version of the file's format."""
    axes: Axes = Axes()
    """The degrees of the mesh axes, outer to inner."""
    placement: Placement = Placement()
    """On which link level each axis lies. Where given it decides the order of the ranks, level by level."""
    context: Context = Context()
    """How positions are split over the `context` axis."""
    sequence: bool = False
    """Shard activations between blocks along the sequence, over the tensor axis."""
    rules: dict[str, RuleName] = Field(default_factory=dict)
    """Module pattern to rule, over those that the model's family brings. `*` stands for one or more parts of
    a dotted name. A pattern that matches no module is an error; where several match, the last one wins."""
    expert_replicas: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Experts pattern to the numbers of hot experts, e.g. ``{"model.layers.*.mlp.experts": [5, 17]}``: their weights
    are copied to every rank of the `expert` axis at each step and their tokens stay where they are. The results are
    those without replicas."""
    precision: Precision = Precision()
    """Dtypes of parameters, arithmetic and gradient reduction."""
    memory: Memory = Memory()
    """What is recomputed rather than kept."""
    overlap: Overlap = Overlap()
    """Which collectives run beside which kernels."""

    @field_validator("expert_replicas")
    @classmethod
    def _once(cls, replicas: dict[str, list[int]]) -> dict[str, list[int]]:
        for pattern, experts in replicas.items():
            if len(set(experts)) != len(experts):
                raise ValueError(f"{pattern!r} names an expert twice: {experts}; name each once")
        return replicas

    @model_validator(mode="after")
    def _placed_axes_in_order(self) -> Strategy:
        order = self.placement.order(self.axes)
        if order != self.axes.order:
            # Frozen for everybody else: the order of the axes is settled while the Strategy is made.
            object.__setattr__(self, "axes", self.axes.model_copy(update={"order": order}))
        return self
