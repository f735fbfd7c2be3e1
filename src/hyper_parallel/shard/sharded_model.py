"""`ShardedModel`: the handle of a parallelized model, which brings its parts together.

| part | what it is |
|---|---|
| `plan` | the sharding metadata: a Layout for each parameter, and what is done around each module |
| `axes` | the mesh of processes: ranks, coordinates, process groups, collectives (`shard.process_mesh`) |
| `pipeline` | this rank's place in a pipeline, and which parameters it holds (`shard.process_mesh`) |
| `gathers` | what is saved between the micro-batches of a step (`shard.saved_gathers`) |
| `routing` | the loads of its experts (`shard.experts.routing`) |
| `balancing` | its routers' auxiliary loss (`shard.loss.auxiliary_loss`) |

Its methods are those of the parts, on this model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat import collectives, fsdp
from hyper_parallel.compat.kernels import scale_, sum_of_squares
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import Draw, current_step
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import DeviceGroup, Mesh
from hyper_parallel.shard.plan.plan import Plan
from hyper_parallel.shard.process_mesh import DATA_AXES, PipelinePlace, ProcessMesh
from hyper_parallel.shard.reshard import cut_on_ranks, gathered
from hyper_parallel.shard.saved_gathers import SavedGathers
from hyper_parallel.strategy import Strategy

if TYPE_CHECKING:
    from hyper_parallel.shard.experts.routing import Routing
    from hyper_parallel.shard.loss.auxiliary_loss import Balancing

_ATTRIBUTE = "_hyper_parallel"


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """The handle of a parallelized model, made by `parallelize` and found again by `sharded`."""

    model: nn.Module
    strategy: Strategy
    plan: Plan
    axes: ProcessMesh
    """Every axis, joint or fold by name."""
    skeleton: nn.Module | None
    """The model as it was, without values; weights are initialised and loaded by its structure."""
    routing: Routing | None = None
    """None when it has no experts."""
    balancing: Balancing | None = None
    """None when its own loss has no such term."""
    pipeline: PipelinePlace | None = None
    """None where the model is not cut into stages. `mesh` and `axes` are those of this rank's stage."""
    gathers: SavedGathers = field(default_factory=SavedGathers)
    """Used in the traceable lowering; FSDP2 keeps its own."""
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of an experts' parameter to the expert at each place of its dim 0, where experts were placed by their loads
    (`shard.experts.move_experts`)."""

    @property
    def mesh(self) -> Mesh:
        """The mesh as arithmetic."""
        return self.plan.mesh

    @property
    def rank(self) -> int:
        """This process's rank in the run; 0 when the strategy is that of one device."""
        return self.axes.rank

    @property
    def world(self) -> int:
        """The ranks of the run."""
        if self.pipeline is None:
            return self.mesh.world
        return sum(group.mesh.world for group in self.pipeline.groups)

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's index on each axis."""
        return self.axes.coordinate

    @property
    def device(self) -> torch.device:
        """Where this rank's pieces are."""
        named, place = self.model.named_parameters(), self.pipeline
        return next(one for name, one in named if place is None or place.owns(name)).device

    @property
    def data_index(self) -> int:
        """The index of the share of the batch that this rank computes, 0 ≤ index < replicate · shard."""
        return self.axes.data_index_of(self.axes.rank)

    def data_index_of(self, rank: int) -> int:
        """The index of the share of the batch that a rank of the run computes; ranks of all stages of a pipeline have
        the same rows."""
        groups = (self.axes.devices,) if self.pipeline is None else self.pipeline.groups
        group = next((one for one in groups if rank in one.ranks), self.axes.devices)
        return group.index(DATA_AXES, rank)

    def parameters(self) -> list[ShardedParameter]:
        """Every parameter once, in the model's order; tied ones under their first name."""
        layouts = self.plan.layouts()
        return [
            ShardedParameter(name, layouts[name], parameter, self.owners(name), self.orders)
            for name, parameter in self.model.named_parameters()
        ]

    def owners(self, name: str) -> tuple[DeviceGroup, ...]:
        """The device groups of a pipeline that hold a parameter or buffer; empty without a pipeline."""
        return () if self.pipeline is None else self.pipeline.holders(name)

    def owned(self) -> list[ShardedParameter]:
        """The `parameters` that this rank holds: all, but in a pipeline those of its stages. The others are on the
        meta device."""
        return [one for one in self.parameters() if self.pipeline is None or self.pipeline.owns(one.name)]

    def cut(self, full: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's piece of a whole tensor that every rank has."""
        return cut_on_ranks(self.axes, full, layout)

    def gather(self, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The whole tensor, on every rank, from each one's piece. Uneven and fused layouts included."""
        return gathered(self.axes, local, layout)

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
        """The sum (or ``max``) of `tensor` over `axes`, on every rank of them; its own over axes of degree 1."""
        return self.axes.all_reduce(tensor, axes, op)

    def over_all_ranks(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum (or ``max``) of `tensor` over all ranks of the run, on every one; shapes are equal."""
        if self.pipeline is None:
            return self.all_reduce(tensor, self.mesh.names, op)
        return collectives.all_reduce(tensor, str(dist.group.WORLD.group_name), op)  # type: ignore[union-attr]

    def speaks(self, axes: tuple[str, ...]) -> float:
        """1 on one rank of those that hold the same, 0 on the others: of ranks that differ along other axes than these,
        and of the groups of a pipeline."""
        first = self.pipeline is None or self.pipeline.index == 0
        return float(first) * self.axes.speaks(axes, self.rank)

    def auxiliary_loss(self) -> torch.Tensor:
        """This rank's part of the last forward pass's auxiliary loss, as `Balancing.loss`; zero where the model's own
        loss has no such term."""
        if self.balancing is None or not self.balancing.logits:
            return torch.zeros((), device=self.device)
        return self.balancing.loss(self.axes)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient, the same on every rank; each element is counted once."""
        place = self.pipeline
        counted = [one for one in self.owned() if place is None or place.counts(one.name)]
        # Where this rank has no gradient, nothing else says where the sum is computed.
        return gradient_norm(counted, lambda total: self.over_all_ranks(total.to(self.device)))

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale every gradient so that their norm, given as `norm`, is at most `max_norm`."""
        clip_gradients([p.grad for p in self.owned() if p.grad is not None], norm, max_norm)

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
            self.model, last=last, keep_parameters=level != "parameters", keep_gradients=level == "optimizer"
        )
        context = replace(current_step(), gathers=self.gathers)
        if rows is not None:
            context = replace(context, draw=Draw(seed, step, rows))
        with self.gathers.micro_batch(level, last=last), context.installed():
            yield


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


# Gradient norm and clipping across meshes: one norm over all parameters, whatever their layouts.
#
#     norm² = Σ over parameters: (Σ over ranks: ‖local gradient‖²) / copies                        `gradient_norm`
#     clipped = gradient · min(1, max_norm / (norm + 1e-6))                                        `clip_gradients`
#
# `copies` counts the ranks that hold the same elements; the factor is that of torch.nn.utils.clip_grad_norm_. Eager and
# captured steps, and the `clip_grad_norm_` of the integrations, compute the norm and clip with these two functions.


def gradient_norm(
    parameters: Iterable[ShardedParameter], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The 2-norm of the whole gradient, fp32 []; `reduce` sums over all ranks of the mesh."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    total = torch.zeros(())
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            by_copies.setdefault(parameter.layout.copies, []).append(gradient)
    for copies, gradients in sorted(by_copies.items()):
        total = total.to(gradients[0].device) + sum_of_squares(gradients) / copies
    return reduce(total).sqrt()


def clip_gradients(
    gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float, *, in_graph: bool = False
) -> None:
    """Scale gradients in place so that their norm, given as `norm`, is at most `max_norm`.

    `in_graph`: the step is being captured. The comparison with the limit, which an eager step makes on the host, is
    then an operator of the device, and a separate operator scales each gradient, so that `graph.host_nodes` can move
    it together with that parameter's update.
    """
    if not in_graph:
        # A stage of a pipeline may have nothing that is trained.
        if found := list(gradients):
            scale_(found, _factor(norm, max_norm))
        return
    factor = torch.where(norm > max_norm, _factor(norm, max_norm), torch.ones_like(norm))
    for gradient in gradients:
        gradient.mul_(factor)


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
