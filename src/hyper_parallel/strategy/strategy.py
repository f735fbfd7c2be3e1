"""The Strategy: everything that says how a model is spread, and nothing about the model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from hyper_parallel.strategy.axes import Axes
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.strategy.placement import Placement
from hyper_parallel.strategy.precision import Precision
from hyper_parallel.strategy.section import Section

RuleName = Literal["colwise", "colwise_gather", "rowwise", "vocab", "shared", "replicate"]
"""What a rule may say of a module's weights under the `tensor` axis:

- `colwise`: output features are split; the output stays split.
- `colwise_gather`: output features are split; the output is gathered.
- `rowwise`: input features are split; the output is summed over the axis.
- `vocab`: an embedding's rows are split; the output is summed over the axis.
- `shared`: kept whole, and applied to what `colwise` modules split (a norm of each head): gradients are summed.
- `replicate`: kept whole on each rank of the axis, and applied to what is whole.
"""


class Strategy(Section):
    """How a model is spread over devices and computed; a file that can be kept, compared and replayed.

    >>> Strategy(axes={"shard": 2, "tensor": 2}, sequence=True).axes.world
    4
    """

    reserved: ClassVar = {
        "context": "context parallelism comes with HyperShard's full set of axes",
        "pipeline": "pipeline parallelism comes with HyperMPMD",
        "submodels": "running submodels side by side comes with HyperMPMD",
        "expert_replicas": "expert parallelism comes with HyperShard's full set of axes",
    }

    version: Literal[1] = 1
    """The version of the file's format."""
    axes: Axes = Axes()
    """The degrees of the mesh axes, outer to inner."""
    placement: Placement = Placement()
    """On which link level each axis lies. Where given it decides the order of the ranks, level by level."""
    sequence: bool = False
    """Shard activations between blocks along the sequence, over the tensor axis."""
    rules: dict[str, RuleName] = Field(default_factory=dict)
    """Module pattern to rule, over those that the model's family brings. `*` stands for one or more parts of
    a dotted name. A pattern that matches no module is an error; where several match, the last one wins."""
    precision: Precision = Precision()
    """Dtypes of parameters, arithmetic and gradient reduction."""
    memory: Memory = Memory()
    """What is recomputed rather than kept."""

    @model_validator(mode="after")
    def _placed_axes_in_order(self) -> Strategy:
        order = self.placement.order(self.axes)
        if order != self.axes.order:
            # Frozen for everybody else: the order of the axes is settled while the Strategy is made.
            object.__setattr__(self, "axes", self.axes.model_copy(update={"order": order}))
        return self
