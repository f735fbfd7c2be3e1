"""`ShardedModel`: parameters with layouts, gradients and collectives of a parallelized model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat import collectives, fsdp
from hyper_parallel.compat.local_tensor import on_rank, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.context.position_split import length_multiple
from hyper_parallel.shard.dropout import Draw, drawing
from hyper_parallel.shard.gradient_clipping import clip_gradients, gradient_norm
from hyper_parallel.shard.mesh_axis import MeshAxes
from hyper_parallel.shard.plan.types import Plan
from hyper_parallel.shard.saved_gathers import SavedGathers
from hyper_parallel.strategy import Strategy

if TYPE_CHECKING:
    from hyper_parallel.shard.experts.load_balancing import Routing

_ATTRIBUTE = "_hyper_parallel"

ROW_AXES = ("replicate", "shard")
"""The axes along which ranks see different rows."""
LOSS_AXES = (*ROW_AXES, "context")
"""The axes over which the ranks' parts of a loss are summed; ranks along the others hold the same part."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter as one rank holds it."""

    name: str
    """Its fully qualified name, the same as in the unsharded model."""
    layout: Layout
    parameter: nn.Parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece, without autograd; writing to it writes the parameter."""
        return _local(self.parameter.detach())

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's piece of the gradient, or None before a backward pass."""
        return None if self.parameter.grad is None else _local(self.parameter.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """What `parallelize` knows of a model. Made by it, found again by `sharded`."""

    model: nn.Module
    strategy: Strategy
    plan: Plan
    axes: MeshAxes
    """Every axis, joint or fold by name."""
    skeleton: nn.Module | None
    """The model as it was, without values; weights are initialised and loaded by its structure."""
    routing: Routing | None = None
    """What is seen of its routers; None when it has no experts."""
    kept: SavedGathers = field(default_factory=SavedGathers)
    """What is kept between micro-batches in the traceable lowering."""

    @property
    def mesh(self) -> Mesh:
        """The mesh as arithmetic."""
        return self.plan.mesh

    @property
    def rank(self) -> int:
        """This process's rank; 0 when the strategy is that of one device."""
        return dist.get_rank() if self.mesh.world > 1 else 0

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's index on each axis."""
        return self.mesh.coordinate(self.rank)

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank computes, 0 ≤ index < replicate · shard."""
        return self.data_index_of(self.rank)

    def data_index_of(self, rank: int) -> int:
        """Which share of the batch a rank computes."""
        there = self.mesh.coordinate(rank)
        return there["replicate"] * self.mesh.size("shard") + there["shard"]

    def parameters(self) -> list[ShardedParameter]:
        """Every parameter once, in the model's order; tied ones under their first name."""
        layouts = self.plan.layouts()
        return [
            ShardedParameter(name, layouts[name], parameter)
            for name, parameter in self.model.named_parameters()
        ]

    def process_groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name of each process group that the model's collectives use to its (axis, ranks); empty on one device."""
        groups = self.axes.groups
        return groups.members() if groups is not None else {}

    @property
    def length_multiple(self) -> int:
        """What the number of positions of a row must be a multiple of: they are dealt over context and tensor."""
        plan = self.plan.context
        multiple = length_multiple(plan.ring, plan.ulysses) if plan is not None else 1
        if self.plan.sequence:
            multiple = math.lcm(multiple, self.mesh.size("context") * self.mesh.size(self.mesh.tensor))
        return multiple

    def check_length(self, length: int) -> None:
        """Raise StrategyError when rows of `length` positions cannot be split evenly over context and tensor."""
        if length % self.length_multiple:
            context, tensor = self.mesh.size("context"), self.mesh.size(self.mesh.tensor)
            split = [f"context {context}"] if context > 1 else []
            split += [f"tensor {tensor} (the sequence)"] if self.plan.sequence else []
            raise StrategyError(
                f"rows of {length} positions cannot be split evenly over {' and '.join(split)}; "
                f"use a multiple of {self.length_multiple}"
            )

    # Tensors between whole and split.

    def cut(self, full: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's piece of a whole tensor that every rank has."""
        return per_rank(lambda rank: cut(on_rank(full, rank), layout, rank))

    def gather(self, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The whole tensor, on every rank, from each one's piece. Uneven and fused layouts included."""
        axes = layout.split_axes
        if all(self.mesh.size(axis) == 1 for axis in axes):
            return local

        def place(rank: int) -> torch.Tensor:
            mine = on_rank(local, rank)
            whole = torch.zeros(layout.shape, dtype=mine.dtype, device=mine.device)
            for box in layout.boxes(self.mesh.coordinate(rank)):
                whole[box.global_slices] = mine[box.local_slices]
            return whole

        return self.all_reduce(per_rank(place), axes)

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
        """The sum (or ``max``) of `tensor` over `axes`, on every rank of them; its own over axes of degree 1."""
        live = [axis for axis in axes if self.mesh.size(axis) > 1]
        if live and math.prod(self.mesh.size(axis) for axis in live) == self.mesh.world:
            return collectives.all_reduce(tensor, dist.group.WORLD.group_name, op)  # type: ignore[union-attr]
        for axis in live:
            tensor = collectives.all_reduce(tensor, self.axes[axis].group, op)
        return tensor

    # Gradients.

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient, the same on every rank; each element is counted once."""
        return gradient_norm(self.parameters(), lambda total: self.all_reduce(total, self.mesh.names))

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale every gradient so that their norm, given as `norm`, is at most `max_norm`."""
        clip_gradients([p.grad for p in self.parameters() if p.grad is not None], norm, max_norm)

    @contextlib.contextmanager
    def micro_batch(
        self,
        *,
        seed: int = 0,
        step: int | torch.Tensor = 0,
        rows: torch.Tensor | None = None,
        last: bool = True,
    ) -> Iterator[None]:
        """Compute one micro-batch's loss and its backward pass inside.

        `rows`: int64[B], the index in the step's global batch of each row at hand; needed where the model drops
        activations. `last`: this is the step's last micro-batch, after whose backward pass gradients are whole sums
        over the data axes; before it they are what `strategy.memory.shard` leaves.
        """
        level = self.strategy.memory.shard
        fsdp.begin_micro_batch(
            self.model,
            last=last,
            keep_parameters=level != "parameters",
            keep_gradients=level == "optimizer",
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.kept.micro_batch(level, last=last))
            if rows is not None:
                stack.enter_context(drawing(Draw(seed, step, rows)))
            yield


def cut(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The piece of a whole tensor that a rank holds, in memory of its own."""
    coordinate = layout.mesh.coordinate(rank)
    local = torch.empty(layout.local_shape(coordinate), dtype=full.dtype, device=full.device)
    for box in layout.boxes(coordinate):
        local[box.local_slices] = full[box.global_slices]
    return local


def attach(handle: ShardedModel) -> None:
    """Make `sharded(handle.model)` find the handle."""
    handle.model.__dict__[_ATTRIBUTE] = handle


def is_sharded(model: nn.Module) -> bool:
    """Whether `sharded` finds a handle."""
    return _ATTRIBUTE in model.__dict__


def sharded(model: nn.Module) -> ShardedModel:
    """The handle of a model that `parallelize` returned. Raises StrategyError for another one."""
    handle: Any = model.__dict__.get(_ATTRIBUTE)
    if handle is None:
        raise StrategyError(
            f"this {type(model).__name__} was not parallelized; call hp.parallelize(model, strategy) first"
        )
    assert isinstance(handle, ShardedModel)
    return handle
