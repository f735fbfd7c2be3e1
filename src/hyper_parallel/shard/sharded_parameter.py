"""A sharded parameter: its name and layout, and this rank's piece of its values and of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.layout.device_group import DeviceGroup
from hyper_parallel.layout.layout import Layout


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter as one rank holds it."""

    name: str
    """Its fully qualified name, the same as in the unsharded model."""
    planned: Layout
    """Its layout in the plan, in the model's own order of experts."""
    parameter: nn.Parameter
    owners: tuple[DeviceGroup, ...] = ()
    """The device groups of a pipeline that hold it; empty without a pipeline."""
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Name of a parameter to the order of its dim 0, where experts were placed by their loads; changes during a run."""

    @property
    def layout(self) -> Layout:
        """The layout that it has now. Experts that are placed anew have another one afterwards: ask each time."""
        order = self.orders.get(self.name)
        return self.planned if order is None else self.planned.ordered(0, order)

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece, without autograd; writing to it writes the parameter."""
        return local_of(self.parameter.detach())

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's piece of the gradient, or None before a backward pass."""
        return None if self.parameter.grad is None else local_of(self.parameter.grad)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
